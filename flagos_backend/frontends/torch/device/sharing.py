"""The device's memory in other processes: the host's shared memory, where the host's memory is the device's; refused by
name elsewhere, as is the use of such a device in a forked process.

A storage is moved to shared memory when it is first sent, as PyTorch does with the host's: sender and receiver, and all
tensors on the storage, see each other's changes.
"""

from __future__ import annotations

import functools
import importlib
import os
import threading
from collections.abc import Callable
from multiprocessing import queues, reduction
from typing import Any, Final, NamedTuple

import torch
from torch import UntypedStorage
from torch.multiprocessing import get_sharing_strategy, reductions
from torch.utils.weak import WeakIdKeyDictionary

from flagos_backend.frontends.torch.device import _native
from flagos_backend.frontends.torch.device.memory import can_exchange_storages, wrap
from flagos_backend.frontends.torch.device.opening import DEVICE_TYPE, is_open, is_registered, open_device

_FORKED: Final = (
    f"Cannot re-initialize {DEVICE_TYPE} in forked subprocess. To use {DEVICE_TYPE} with multiprocessing, you must use "
    "the 'spawn' start method"
)
_NOT_SHARED: Final = (
    f"Cannot send a tensor on device '{DEVICE_TYPE}' to another process: its memory is that of an accelerator. Send "
    "tensor.cpu(), and move it to the device in the process that receives it."
)

#: Held where a storage changes its memory: a process is forked before or after that.
_lock: Final = threading.Lock()
#: The shared memory of each storage of the device that is in one.
_shared: Final = WeakIdKeyDictionary()
_is_host_memory = False
_is_in_bad_fork = False


class _SharedMemory(NamedTuple):
    """A storage of the host, and PyTorch's strategy by which it is shared: by another, PyTorch would move it."""

    host: UntypedStorage
    strategy: str


def install() -> None:
    """Once, when the device is registered. Nothing changes for storages of other devices."""
    storage: Any = UntypedStorage
    storage.share_memory_ = _of_device(storage.share_memory_, share_memory_)
    storage.is_shared = _of_device(storage.is_shared, is_shared)
    storage._new_shared = classmethod(_new_shared(storage._new_shared.__func__))
    reduction.register(UntypedStorage, _delivering(_of_device(reductions.reduce_storage, reduce_storage)))
    for class_ in (torch.Tensor, torch.nn.Parameter):
        reduction.register(class_, _delivering(reductions.reduce_tensor))


def install_opened(*, host_memory: bool) -> None:
    """Once, when the device is opened: says whether its memory is the host's, and what becomes of it in a fork."""
    global _is_host_memory
    _is_host_memory = host_memory
    os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_begin_forked)


def is_in_bad_fork() -> bool:
    """Whether this is a forked process that cannot use the device."""
    return _is_in_bad_fork


def require_usable() -> None:
    """Raises RuntimeError in a forked process that cannot use the device."""
    if _is_in_bad_fork:
        raise RuntimeError(_FORKED)


def _begin_forked() -> None:
    """A forked process has none of the threads. The host computes on with one, as a DataLoader's workers do: PyTorch's
    OpenMP would wait for its others for ever. An accelerator's driver does not work at all."""
    global _is_in_bad_fork
    _lock.release()
    if _is_host_memory:
        torch.set_num_threads(1)
    else:
        _is_in_bad_fork = True
        _native.refuse(_FORKED)


def _of_device(original: Callable[..., Any], ours: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def method(self: UntypedStorage, *args: Any, **kwargs: Any) -> Any:
        return (ours if self.device.type == DEVICE_TYPE else original)(self, *args, **kwargs)

    return method


# ---- Shared memory --------------------------------------------------------------------------------------------------


def share_memory_(storage: UntypedStorage) -> UntypedStorage:
    """UntypedStorage.share_memory_: moves to shared memory. Without effect on an accelerator, as PyTorch has it."""
    if _is_host_memory and storage.nbytes():
        _host_storage(storage)
    return storage


def is_shared(storage: UntypedStorage) -> bool:
    """UntypedStorage.is_shared: whether it is in shared memory."""
    return storage in _shared


def _new_shared(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def _new_shared(cls: Any, size: int, *, device: Any = "cpu") -> Any:
        """What a DataLoader's workers put batches together in."""
        if torch.device(device).type != DEVICE_TYPE:
            return original(cls, size, device=device)
        open_device()
        if not (_is_host_memory and size):
            return original(cls, size, device=device)
        with _lock:
            return _named(_new_host_storage(size), _strategy())

    return _new_shared


def _host_storage(storage: UntypedStorage) -> UntypedStorage:
    """The storage of the host, in shared memory, that a storage of the device names; moves it there first."""
    with _lock, torch.no_grad(), torch._C.DisableTorchFunction():
        known: _SharedMemory | None = _shared.get(storage)  # type: ignore[no-untyped-call]
        if known is not None and known.strategy == _strategy():
            return known.host
        if not can_exchange_storages():
            raise RuntimeError(
                f"Moving a storage of device '{DEVICE_TYPE}' to shared memory takes PyTorch 2.13 or later, and this is "
                f"{torch.__version__}. Update PyTorch, or send tensor.cpu()."
            )
        host = _new_host_storage(storage.nbytes())
        moved = wrap(_bytes(host))
        moved.copy_(_bytes(storage))
        storage._swap_data_ptr_(moved.untyped_storage())  # type: ignore[attr-defined]  # missing in PyTorch's stubs
        _remember(storage, host, _strategy())
        return host


def _named(host: UntypedStorage, strategy: str) -> UntypedStorage:
    """A storage of the device over shared memory. The lock is held."""
    named = wrap(_bytes(host)).untyped_storage()
    _remember(named, host, strategy)
    return named


def _remember(storage: UntypedStorage, host: UntypedStorage, strategy: str) -> None:
    _shared[storage] = _SharedMemory(host, strategy)
    reductions.shared_cache[_key(host)] = reductions.StorageWeakRef(storage)  # type: ignore[no-untyped-call]


def _key(host: UntypedStorage) -> tuple[str, int, int]:
    """In PyTorch's table of shared storages: of the storage of the device that names this one of the host."""
    return DEVICE_TYPE, host._cdata, host.data_ptr()


def _new_host_storage(size: int) -> UntypedStorage:
    made: UntypedStorage = UntypedStorage._new_shared(size)  # type: ignore[no-untyped-call]
    return made


def _strategy() -> str:
    return str(get_sharing_strategy())  # type: ignore[no-untyped-call]


def _bytes(storage: UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


# ---- To other processes, and from them ------------------------------------------------------------------------------


def reduce_storage(storage: UntypedStorage) -> tuple[Any, ...]:
    """For ForkingPickler: how another process finds a storage of the device. Raises RuntimeError where it cannot."""
    require_usable()
    if not _is_host_memory:
        raise RuntimeError(_NOT_SHARED)
    if storage.nbytes() == 0:
        return rebuild_empty, ()
    return rebuild_storage, reductions.reduce_storage(_host_storage(storage))  # type: ignore[no-untyped-call]


def rebuild_storage(rebuild: Callable[..., UntypedStorage], arguments: tuple[Any, ...]) -> UntypedStorage:
    """The storage of the device over a storage of the host that another process sent, always the same for one."""
    _open_here()
    host = rebuild(*arguments)
    with _lock, torch._C.DisableTorchFunction():
        known: UntypedStorage | None = reductions.storage_from_cache(UntypedStorage, _key(host))  # type: ignore[no-untyped-call]
        by_descriptor = rebuild is reductions.rebuild_storage_fd
        return _named(host, "file_descriptor" if by_descriptor else "file_system") if known is None else known


def rebuild_empty() -> UntypedStorage:
    """An empty storage of the device."""
    _open_here()
    return torch.empty(0, dtype=torch.uint8, device=DEVICE_TYPE).untyped_storage()


def _open_here() -> None:
    """The sender has the device; this process may not yet, where it is not made known by `import torch`."""
    require_usable()
    if not is_registered():
        # As PyTorch does it, which looks the module up by its name: it stands above this one.
        importlib.import_module("flagos_backend.frontends.torch.autoload").enable()
    if not is_open():
        open_device()
    if not _is_host_memory:
        raise RuntimeError(_NOT_SHARED)


def _delivering(reduce: Callable[[Any], tuple[Any, ...]]) -> Callable[[Any], tuple[Any, ...]]:
    """A queue's thread prints an error and drops what it was to send, and the receiver waits for ever: what cannot be
    sent is sent as the error, which the receiver raises."""

    @functools.wraps(reduce)
    def reduce_or_deliver(value: Any) -> tuple[Any, ...]:
        if value.device.type != DEVICE_TYPE:
            return reduce(value)
        try:
            return reduce(value)
        except Exception as error:
            if queues.Queue._on_queue_feeder_error not in getattr(threading.current_thread(), "_args", ()):  # type: ignore[attr-defined]
                raise
            return raise_delivered, (str(error),)

    return reduce_or_deliver


def raise_delivered(message: str) -> None:
    """Raises, where a tensor is received, why it could not be sent."""
    raise RuntimeError(message)
