"""The names under which devices say what other frameworks call them. For front ends too, so without torch."""

from __future__ import annotations

from typing import Final

#: Holds PyTorch's name of the device, as "cuda:0": who has tensors there shares its memory.
TORCH_DEVICE: Final = "torch_device"
#: Hold DLPack's type and number of the device.
DLPACK_DEVICE: Final = ("dlpack_device_type", "dlpack_device_id")
