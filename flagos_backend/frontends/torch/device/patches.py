"""Where PyTorch has no hook for a device of Python: the functions of its own that this package stands in front of."""

from __future__ import annotations

import functools
from typing import Any

import torch

from flagos_backend.frontends.torch.device import moving
from flagos_backend.frontends.torch.device.any_generator import Generator
from flagos_backend.frontends.torch.device.memory import unwrap
from flagos_backend.frontends.torch.device.opening import DEVICE_TYPE


def install() -> None:
    """Once, when the device is registered. Nothing changes for tensors of other devices."""
    torch.serialization.register_package(5, _location_tag, _deserialize)
    torch.Tensor.__dlpack_device__ = _of_inner(torch.Tensor.__dlpack_device__)  # type: ignore[method-assign]
    torch.Tensor.__dlpack__ = _of_inner(torch.Tensor.__dlpack__)  # type: ignore[method-assign]
    torch.Generator = Generator  # type: ignore[misc]
    moving.install()
    saving = torch.autograd.graph.save_on_cpu
    saving.__init__ = _saving_pinned(saving.__init__)  # type: ignore[method-assign]
    torch.UntypedStorage.resize_ = _resize_storage(torch.UntypedStorage.resize_)  # type: ignore[method-assign]
    torch.UntypedStorage.__new__ = staticmethod(_new_storage(torch.UntypedStorage.__new__))  # type: ignore[method-assign]


def _of_inner(original: Any) -> Any:
    """DLPack's protocol: other libraries know the device's memory as the inner device's, which it is."""

    @functools.wraps(original)
    def method(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if not _is_here(self):
            return _as_host_memory(self, original(self, *args, **kwargs))
        if self.requires_grad:
            raise BufferError("Can't export tensors that require gradient, use tensor.detach()")
        return original(unwrap(self), *args, **kwargs)

    return method


def _as_host_memory(tensor: torch.Tensor, result: Any) -> Any:
    """DLPack's device of memory that is pinned for this device is not CUDA's."""
    devices = torch.utils.dlpack.DLDeviceType
    if isinstance(result, tuple) and result[0] == devices.kDLCUDAHost:
        from flagos_backend.frontends.torch.device.operators.pinning import is_marked

        return (devices.kDLCPU, 0) if is_marked(tensor) else result
    return result


def _is_here(tensor: torch.Tensor) -> bool:
    return tensor.device.type == DEVICE_TYPE


def _location_tag(_storage: Any) -> None:
    """PyTorch's own package tags storages of this device."""


def _deserialize(storage: Any, location: str) -> Any:
    """torch.load(map_location="flagos")."""
    if location.split(":")[0] != DEVICE_TYPE:
        return None
    if storage.device.type == DEVICE_TYPE:
        return storage
    bytes_ = torch.empty(0, dtype=torch.uint8).set_(storage)
    return bytes_.to(DEVICE_TYPE).untyped_storage()


def _new_storage(original: Any) -> Any:
    """UntypedStorage(size, device="flagos"): PyTorch has no allocator for the device, and would crash."""

    @functools.wraps(original)
    def __new__(cls: Any, *args: Any, **kwargs: Any) -> Any:
        device = kwargs.get("device")
        if device is None or torch.device(device).type != DEVICE_TYPE:
            return original(cls, *args, **kwargs)
        if args and not isinstance(args[0], int):
            return torch.tensor(args[0], dtype=torch.uint8, device=device).untyped_storage()
        size = args[0] if args else kwargs.get("size", 0)
        return torch.empty(size, dtype=torch.uint8, device=device).untyped_storage()

    return __new__


def _resize_storage(original: Any) -> Any:
    """PyTorch asks hooks that a device of Python cannot give."""

    @functools.wraps(original)
    def resize_(self: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
        if self.device.type != DEVICE_TYPE:
            return original(self, size)  # type: ignore[no-any-return]
        from flagos_backend.frontends.torch.device.operators.resizing import resize_storage

        resize_storage(self, size)
        return self

    return resize_


def _saving_pinned(original: Any) -> Any:
    """save_on_cpu(pin_memory=True, device_type="flagos"): PyTorch asks for pinned memory in the one way in which this
    device has none, a factory's argument."""

    @functools.wraps(original)
    def __init__(self: Any, pin_memory: bool = False, device_type: str = "cuda") -> None:
        if not pin_memory or device_type != DEVICE_TYPE:
            return original(self, pin_memory, device_type)  # type: ignore[no-any-return]
        return torch.autograd.graph.saved_tensors_hooks.__init__(self, _pack_pinned, _unpack_pinned)

    return __init__


def _pack_pinned(tensor: torch.Tensor) -> tuple[torch.device, torch.Tensor]:
    saved = tensor.cpu()
    return tensor.device, saved.pin_memory() if _is_here(tensor) else saved


def _unpack_pinned(packed: tuple[torch.device, torch.Tensor]) -> torch.Tensor:
    device, saved = packed
    return saved.to(device, non_blocking=True)
