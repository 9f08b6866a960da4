"""torch.Generator with one more device. PyTorch lets no device of Python make generators, so that this class stands for
both kinds once the device is registered: see patches.py."""

from __future__ import annotations

from typing import Any

import torch

from flagos_backend.frontends.torch.device.api.devices import opened
from flagos_backend.frontends.torch.device.generator import new_generator
from flagos_backend.frontends.torch.device.opening import DEVICE_TYPE

_HostGenerator = torch._C.Generator


class _AnyGenerator(type(_HostGenerator)):  # type: ignore[misc]
    """Of torch.Generator: PyTorch's generators are its instances, and it equals PyTorch's class."""

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, _HostGenerator)

    def __subclasscheck__(cls, subclass: type) -> bool:
        return issubclass(subclass, _HostGenerator)

    def __eq__(cls, other: object) -> bool:
        return other is cls or other is _HostGenerator

    def __hash__(cls) -> int:
        return hash(_HostGenerator)


class Generator(_HostGenerator, metaclass=_AnyGenerator):
    """torch.Generator with one more device; what it makes for the others is PyTorch's."""

    def __new__(cls, device: Any = "cpu") -> Any:
        if cls is not Generator:
            return _HostGenerator.__new__(cls, device)  # type: ignore[call-arg]
        if torch.device(device).type != DEVICE_TYPE:
            return _HostGenerator(device)
        return new_generator(opened(device).inner)


Generator.__module__, Generator.__qualname__ = "torch", "Generator"
