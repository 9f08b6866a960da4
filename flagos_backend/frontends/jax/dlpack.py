"""DLPack for arrays on a flagos device, both ways and without a copy.

JAX's own code knows CPUs and GPUs by the names of their platforms only; this stands in front of it for ours.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any, Final

import jax

from flagos_backend.devices.attributes import DLPACK_DEVICE
from flagos_backend.frontends.jax import jax_internals
from flagos_backend.process.torch_loading import torch
from plugin_abi.isolation import OUT_OF_REACH, PROCESS_ATTRIBUTE
from plugin_abi.loader import DEFAULT_PLATFORM

#: DLDeviceType and number of ordinary host memory.
_HOST: Final = (1, 0)
#: The names that JAX and DLPack share.
_ELEMENT_TYPES: Final = frozenset(
    {"bool", "float16", "bfloat16", "float32", "float64", "complex64", "complex128"}
    | {f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)}
)
#: What a capsule is called until somebody takes what is in it.
_CAPSULE: Final = b"dltensor"
#: The field of FlagosDlManagedTensor that gives it back.
_DELETER: Final = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_DELETER_OFFSET: Final = 56


def enable(adapter: str) -> None:
    """Have jax.Array and jax.dlpack.from_dlpack take flagos arrays. ``adapter``: path of the PJRT adapter's library."""
    export = functools.partial(_export, adapter)
    jax_internals.wrap_dlpack(export=export, device_of=_device_of, import_=_import)


def _is_ours(device: Any) -> bool:
    return getattr(device, "platform", None) == DEFAULT_PLATFORM


def _place_of(device: Any) -> tuple[int, int] | None:
    """DLPack's name of a flagos device; None where the backend does not say."""
    kind, number = (getattr(device, name, None) for name in DLPACK_DEVICE)
    return None if kind is None or number is None else (int(kind), int(number))


def _device_of(array: Any) -> tuple[int, int] | None:
    """`__dlpack_device__` of a flagos array; None for others. Raises BufferError where there is no such device."""
    devices = array.devices()
    if not any(_is_ours(device) for device in devices):
        return None
    if len(devices) > 1:
        raise BufferError(f"__dlpack__ takes an array on one device, this one is on {len(devices)}")
    (device,) = devices
    place = _HOST if "host" in (array.sharding.memory_kind or "") else _place_of(device)
    if place is None:
        apart = f": {OUT_OF_REACH}" if hasattr(device, PROCESS_ATTRIBUTE) else ""
        raise BufferError(
            f"__dlpack__ of memory on {device} is not available{apart}. Move the array to a CPU device first."
        )
    return place


# ---- To others -----------------------------------------------------------------------------------------------------


def _export(adapter: str, array: Any, *, dl_device: tuple[int, int] | None, copy: bool | None, **options: Any) -> Any:
    """`__dlpack__` of a flagos array, whose contents are waited for. The storage is pinned as long as the capsule's
    consumer lives."""
    place = _device_of(array)
    assert place is not None
    if dl_device is not None and (int(dl_device[0]), int(dl_device[1])) != place:
        where = "in host memory" if place == _HOST else f"on DLPack device {place}"
        raise BufferError(f"the array is {where}, not on DLPack device {tuple(map(int, dl_device))}")
    if array.dtype.name not in _ELEMENT_TYPES:
        raise BufferError(f"DLPack has no element type {array.dtype}. Convert the array first.")
    tensor = _tensor(adapter, array, place)
    return (tensor.clone() if copy else tensor).__dlpack__(**options)


def _tensor(adapter: str, array: Any, place: tuple[int, int]) -> Any:
    """A torch tensor over the array's storage, which it holds."""
    # One right after the other, in this thread: the first tells the adapter which buffer the second means.
    lent = _lender(adapter)(array.unsafe_buffer_pointer(), *place)
    if not lent:
        raise BufferError(f"the backend does not lend the memory of this {array.dtype} array on {array.devices()}")
    try:
        return torch._C._from_dlpack(_new_capsule()(lent, _CAPSULE, None))
    except BaseException:
        _DELETER.from_address(lent + _DELETER_OFFSET)(lent)
        raise


@functools.cache
def _lender(adapter: str) -> Any:
    """FlagosPjrtLend of plugin_abi/pjrt/lend.h."""
    function = ctypes.CDLL(adapter).FlagosPjrtLend
    function.argtypes = (ctypes.c_size_t, ctypes.c_int32, ctypes.c_int32)
    function.restype = ctypes.c_void_p
    return function


@functools.cache
def _new_capsule() -> Any:
    function = ctypes.pythonapi.PyCapsule_New
    function.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
    function.restype = ctypes.py_object
    return function


# ---- From others ---------------------------------------------------------------------------------------------------


def _import(external: Any, device: Any, copy: bool | None) -> Any:
    """A flagos array over the memory of another framework's tensor; None where JAX's own function is the one to ask."""
    if not hasattr(external, "__dlpack_device__"):
        return None
    kind, number = map(int, external.__dlpack_device__())
    target = _target(device, (kind, number))
    if target is None:
        return None
    capsule = external.__dlpack__() if (kind, number) == _HOST else _completed(external)
    try:
        array = jax_internals.array_from_dlpack(capsule, target, copy, kind)
    except jax.errors.JaxRuntimeError as error:
        # A tensor that is not dense and row major. JAX's own way goes through its CPU device and copies.
        if copy is False:
            raise ValueError(f"this tensor needs a copy: {error} Pass copy=None.") from error
        return None
    # Without x64, JAX's arrays have 32-bit types.
    return jax.numpy.asarray(array, dtype=jax.dtypes.canonicalize_dtype(array.dtype))


def _completed(external: Any) -> Any:
    """A capsule of a device's memory whose contents are there: jaxlib takes it for that, whatever stream makes them."""
    tensor = torch.utils.dlpack.from_dlpack(external)  # in the order of the current stream
    torch.get_device_module(tensor.device).current_stream(tensor.device).synchronize()
    return tensor.__dlpack__()


def _target(device: Any, place: tuple[int, int]) -> Any:
    """The flagos device that has the memory at ``place`` and that from_dlpack(device=...) means; or None."""
    if isinstance(device, jax.sharding.Sharding):
        devices = tuple(device.device_set)
        device = devices[0] if len(devices) == 1 else None
    if device is not None:
        return device if _is_ours(device) and _place_of(device) == place else None
    # Tensors go to JAX's own backend for that memory, if it has one; else to ours.
    if jax_internals.has_backend("cpu" if place == _HOST else "cuda"):
        return None
    return next((d for d in jax.local_devices() if _is_ours(d) and _place_of(d) == place), None)
