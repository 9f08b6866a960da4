"""torch.flagos: which devices there are, what they are, and which is the current one.

A process has one: PyTorch's hooks for devices that are written in Python know no other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from flagos_backend.devices.attributes import CORE_COUNT
from flagos_backend.frontends.torch.device import sharing
from flagos_backend.frontends.torch.device.opening import DEVICE_TYPE, is_accepted, is_open, open_device

if TYPE_CHECKING:
    from flagos_backend.frontends.torch.device.runtime import Runtime

#: How PyTorch's programs name a device.
DeviceLike = torch.device | str | int | None


def init() -> None:
    """Opens the device, which its first use does too.

    Raises DeviceUnavailable with the loader's reason, and RuntimeError in a forked process that cannot use it.
    """
    sharing.require_usable()
    open_device()


def is_initialized() -> bool:
    """Whether the device has been used."""
    return is_open()


def is_available() -> bool:
    """Whether the loader has accepted a backend. Where it has not, the first use of the device says why."""
    return is_accepted()


def device_count() -> int:
    """How many devices this process can use."""
    return int(is_available())


def current_device() -> int:
    """The index of the current device."""
    return 0


def index_of(device: DeviceLike) -> int:
    """The index that an argument names. Raises RuntimeError for a device that is not there, ValueError for others'."""
    if isinstance(device, int) and not isinstance(device, bool):
        index: int = device
    elif device is None:
        index = 0
    else:
        named = torch.device(device)
        if named.type != DEVICE_TYPE:
            raise ValueError(f"Expected a {DEVICE_TYPE} device, but got: {named}")
        index = 0 if named.index is None else named.index
    if index not in (-1, 0):
        raise RuntimeError(f"invalid device ordinal: {DEVICE_TYPE}:{index}; there is {DEVICE_TYPE}:0 only")
    return index


def opened(device: DeviceLike = None) -> Runtime:
    """The open device that an argument names."""
    # The loader and the backend come in with the first use.
    from flagos_backend.frontends.torch.device.runtime import runtime

    index_of(device)
    init()
    return runtime()


def set_device(device: DeviceLike) -> None:
    """Makes a device the current one."""
    index_of(device)


class device:
    """Context manager: the current device. With one device it has nothing to change, and still refuses others."""

    def __init__(self, device: DeviceLike) -> None:
        self.idx = index_of(device)
        self.prev_idx = -1

    def __enter__(self) -> None:
        self.prev_idx = current_device()

    def __exit__(self, *_: object) -> None:
        pass


class device_of(device):
    """Context manager: the device of a tensor or storage, if it is one of these."""

    def __init__(self, obj: Any) -> None:
        on_device = obj.device.type == DEVICE_TYPE
        super().__init__(obj.device if on_device else -1)


@dataclass(frozen=True)
class DeviceProperties:
    """What a device is. ``total_memory`` is in bytes."""

    name: str
    total_memory: int
    multi_processor_count: int
    kind: str
    inner_device: torch.device


def get_device_properties(device: DeviceLike = None) -> DeviceProperties:
    """What the backend says of a device."""
    found = opened(device)
    cores = found.count(CORE_COUNT)
    return DeviceProperties(found.device.debug_string, found.memory_bytes, cores, found.device.kind, found.inner)


def get_device_name(device: DeviceLike = None) -> str:
    """The device's name, as the backend gives it."""
    return get_device_properties(device).name


def get_device_capability(device: DeviceLike = None) -> dict[str, Any]:
    """Which dtypes the device computes with, as torch.accelerator.get_device_capability has it."""
    index_of(device)
    return {"supported_dtypes": set(_DTYPES)}


_DTYPES = (
    *(torch.bool, torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.int8, torch.int16, torch.int32),
    *(torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128),
)
