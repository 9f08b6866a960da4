"""The names under which devices tell what front ends ask of them (plugin_abi/CONTRACT.md). Without torch, for those."""

from __future__ import annotations

from typing import Final

#: Holds PyTorch's name of the device, as "cuda:0": who has tensors there shares its memory.
TORCH_DEVICE: Final = "torch_device"
#: Numbers that PyTorch's device properties show.
CORE_COUNT: Final = "core_count"
MEMORY_BYTES: Final = "memory_bytes"
#: Hold DLPack's type and number of the device.
DLPACK_DEVICE: Final = ("dlpack_device_type", "dlpack_device_id")
