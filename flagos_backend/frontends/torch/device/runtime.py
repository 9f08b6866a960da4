"""The device as its backend describes it: which inner device computes for it, its name and memory, its generator.

Opened once, by registration.py, when the device is used for the first time.
"""

from __future__ import annotations

import functools
import threading
from dataclasses import dataclass
from typing import Any

import torch

from flagos_backend.devices.attributes import MEMORY_BYTES, TORCH_DEVICE
from flagos_backend.frontends.torch.device import _native
from flagos_backend.frontends.torch.device.errors import DeviceUnavailable, NoInnerDevice
from flagos_backend.frontends.torch.device.generator import default_generator
from flagos_backend.frontends.torch.device.opening import DEVICE_TYPE
from plugin_abi import frameworks, isolation, loader
from plugin_abi.errors import FlagosStatusError
from plugin_abi.host import Context, Device


@dataclass(frozen=True)
class Runtime:
    """The open device."""

    device: Device
    #: Where its tensors are computed. Its memory is the device's.
    inner: torch.device
    #: What random operators draw from.
    generator: torch.Generator

    @property
    def inner_module(self) -> Any:
        """PyTorch's module of the inner device: torch.cpu, torch.cuda."""
        return torch.get_device_module(self.inner)

    @property
    def memory_bytes(self) -> int:
        """The size of the device's memory."""
        return self.count(MEMORY_BYTES)

    def count(self, attribute: str) -> int:
        """A number that the backend tells of the device; 0 where it tells none."""
        value = self.device.attributes.get(attribute, 0)
        return value if isinstance(value, int) else 0


_lock = threading.Lock()


def runtime() -> Runtime:
    """The open device. Raises DeviceUnavailable or NoInnerDevice."""
    # Operators draw from its generator, so that there is one, whoever uses the device first.
    with _lock:
        return _opened()


@functools.cache
def _opened() -> Runtime:
    torch_facts = frameworks.detect("torch")
    result = loader.load(DEVICE_TYPE, frameworks=() if torch_facts is None else (torch_facts,))
    if result.accepted is None:
        raise DeviceUnavailable(reason=loader.no_such_device_message(DEVICE_TYPE))
    try:
        devices = Context(result.accepted).addressable_devices
    except FlagosStatusError as error:
        raise DeviceUnavailable(reason=loader.no_device_message(result.accepted, error)) from error
    if not devices:
        nothing = "it has no device in this process"
        raise DeviceUnavailable(reason=loader.no_device_message(result.accepted, nothing))
    if isolation.PROCESS_ATTRIBUTE in devices[0].attributes:
        raise DeviceUnavailable(reason=loader.no_device_message(result.accepted, isolation.OUT_OF_REACH))
    inner = inner_device(devices[0])
    type_, index = torch.empty(0, device=inner).__dlpack_device__()
    _native.open(torch.Tensor, torch.OutOfMemoryError, (int(type_), index))
    # Random numbers of the device are a stream of their own, beside that of the inner device.
    return Runtime(devices[0], inner, default_generator(inner))


def inner_device(device: Device) -> torch.device:
    """PyTorch's device that computes for a backend's device. Raises NoInnerDevice."""
    if device.is_host_memory:
        return torch.device("cpu")
    name = device.attributes.get(TORCH_DEVICE)
    if not isinstance(name, str):
        raise NoInnerDevice(attribute=TORCH_DEVICE, place=device.debug_string)
    return torch.device(name)
