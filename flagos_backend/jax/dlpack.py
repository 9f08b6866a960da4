"""DLPack for arrays on a flagos device in host memory, both ways and without a copy.

JAX's own code knows CPUs and GPUs by the names of their platforms only; this stands in front of it for ours.
"""

from __future__ import annotations

import ctypes
import math
from typing import Any, Final

import jax
import numpy as np

from flagos_backend.jax import PLATFORM, jax_internals

#: DLDeviceType of ordinary host memory.
_DL_CPU: Final = 1
#: The names that JAX and torch share.
_ELEMENT_TYPES: Final = frozenset(
    {"bool", "float16", "bfloat16", "float32", "float64", "complex64", "complex128"}
    | {f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)}
)


def enable() -> None:
    """Have jax.Array and jax.dlpack.from_dlpack take flagos arrays."""
    jax_internals.wrap_dlpack(export=_export, device_of=_device_of, import_=_import)


def _is_ours(device: Any) -> bool:
    return getattr(device, "platform", None) == PLATFORM


def _is_host(device: Any) -> bool:
    return _is_ours(device) and device.device_kind == "cpu"


def _device_of(array: Any) -> tuple[int, int] | None:
    """`__dlpack_device__` of a flagos array; None for others. Raises BufferError for memory that is not the host's."""
    devices = array.devices()
    if not any(_is_ours(device) for device in devices):
        return None
    if len(devices) > 1:
        raise BufferError(f"__dlpack__ takes an array on one device, this one is on {len(devices)}")
    (device,) = devices
    if not _is_host(device):
        raise BufferError(f"__dlpack__ of memory on {device} is not available. Move the array to a CPU device first.")
    return _DL_CPU, 0


# ---- To others -----------------------------------------------------------------------------------------------------


def _export(array: Any, *, dl_device: tuple[int, int] | None, copy: bool | None, **options: Any) -> Any:
    """`__dlpack__` of a flagos array. The storage is pinned as long as the capsule's consumer lives."""
    if dl_device is not None and (int(dl_device[0]), int(dl_device[1])) != (_DL_CPU, 0):
        raise BufferError(f"the array is in host memory, not on DLPack device {tuple(map(int, dl_device))}")
    tensor = _tensor(array)
    return (tensor.clone() if copy else tensor).__dlpack__(**options)


def _tensor(array: Any) -> Any:
    """A torch tensor over the array's storage."""
    import torch

    # A view that holds the storage: it is neither freed nor donated before the view goes.
    view = np.asarray(array)
    if array.dtype.name not in _ELEMENT_TYPES:
        raise BufferError(f"DLPack has no element type {array.dtype}. Convert the array first.")
    dtype = getattr(torch, array.dtype.name)
    if view.size == 0:
        return torch.empty(view.shape, dtype=dtype)
    memory = (ctypes.c_char * view.nbytes).from_address(view.ctypes.data)
    memory._view = view  # type: ignore[attr-defined]
    flat = torch.frombuffer(memory, dtype=dtype, count=math.prod(view.shape))
    return flat.reshape(view.shape)


# ---- From others ---------------------------------------------------------------------------------------------------


def _import(external: Any, device: Any, copy: bool | None) -> Any:
    """A flagos array over the memory of another framework's tensor; None where JAX's own function is the one to ask."""
    target = _target(device)
    if target is None or not hasattr(external, "__dlpack_device__"):
        return None
    if int(external.__dlpack_device__()[0]) != _DL_CPU:
        return None
    try:
        array = jax_internals.array_from_dlpack(external.__dlpack__(), target, copy, _DL_CPU)
    except jax.errors.JaxRuntimeError as error:
        # A tensor that is not dense and row major. JAX's own way goes through its CPU device and copies.
        if copy is False:
            raise ValueError(f"this tensor needs a copy: {error} Pass copy=None.") from error
        return None
    # Without x64, JAX's arrays have 32-bit types.
    return jax.numpy.asarray(array, dtype=jax.dtypes.canonicalize_dtype(array.dtype))


def _target(device: Any) -> Any:
    """The flagos device in host memory that from_dlpack(device=...) names."""
    if isinstance(device, jax.sharding.Sharding):
        devices = tuple(device.device_set)
        device = devices[0] if len(devices) == 1 else None
    if device is None and not jax_internals.has_backend("cpu"):
        # Tensors in host memory go to JAX's CPU; with JAX_PLATFORMS=flagos that is this one.
        device = jax.local_devices()[0]
    return device if _is_host(device) else None
