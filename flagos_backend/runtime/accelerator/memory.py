"""Where graphs have their temporaries: pools of torch's allocator. What is kept of all programs of a device shares one.
Between capture.py, which fills them, and torch."""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Iterator
from typing import Any

from flagos_backend.devices.device_lock import device_lock
from flagos_backend.devices.streams import own_stream
from flagos_backend.process.torch_loading import torch


class Pool:
    """A pool that stays until this object goes, whatever graphs have it: torch refuses one again that none had left.
    torch.cuda.MemPool is not for this: one that goes while any thread captures frees its memory, which ends the
    process."""

    def __init__(self, device: torch.device) -> None:
        self.handle: torch.cuda._POOL_HANDLE = torch.cuda.graph_pool_handle()
        self._index = device.index
        torch._C._cuda_beginAllocateCurrentThreadToPool(self._index, self.handle)
        torch._C._cuda_endAllocateToPool(self._index, self.handle)
        release = weakref.finalize(self, torch._C._cuda_releasePool, self._index, self.handle)
        release.atexit = False

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """What this thread allocates lies there, but for what a graph under capture does."""
        torch._C._cuda_beginAllocateCurrentThreadToPool(self._index, self.handle)
        try:
            yield
        finally:
            torch._C._cuda_endAllocateToPool(self._index, self.handle)
            torch._C._cuda_releasePool(self._index, self.handle)


# Streams to capture on that nobody has. Each is one graph's at a time: torch finds the workspace of BLAS by the stream.
_spare: dict[torch.device, list[Any]] = {}


def _take_stream(device: torch.device) -> Any:
    try:
        return _spare.setdefault(device, []).pop()  # in one step, for any thread
    except IndexError:
        return own_stream(device)


@contextlib.contextmanager
def lent_stream(device: torch.device) -> Iterator[Any]:
    """A stream to capture on that nobody else has."""
    stream = _take_stream(device)
    try:
        yield stream
    finally:
        _spare[device].append(stream)


class BodyMemory:
    """Where bodies have their temporaries, which stay until this object goes: a pool, and for each depth the stream
    that its blocks belong to."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._streams: list[Any] = []
        weakref.finalize(self, _give_streams_back, device, self._streams).atexit = False

    @functools.cached_property
    def pool(self) -> Pool:
        return Pool(self._device)

    @property
    def pools(self) -> tuple[torch.cuda._POOL_HANDLE, ...]:
        return (self.pool.handle,) if "pool" in self.__dict__ else ()

    def stream(self, depth: int) -> Any:
        while len(self._streams) <= depth:
            self._streams.append(_take_stream(self._device))
        return self._streams[depth]


def _give_streams_back(device: torch.device, streams: list[Any]) -> None:
    _spare.setdefault(device, []).extend(streams)


class GraphMemory:
    """Where graphs have their temporaries, and the bodies in them: a pool, and the streams that its blocks belong to:
    those of collectives to ``communication``. Graphs that share one are launched one after another, and none reads
    what another left."""

    def __init__(self, device: torch.device) -> None:
        self.pool = Pool(device)
        self.stream = _take_stream(device)
        self.bodies = BodyMemory(device)
        self._device = device
        self._graphs: weakref.WeakSet[Any] = weakref.WeakSet()
        self._had_graphs = False
        self._streams = [self.stream]
        weakref.finalize(self, _give_streams_back, device, self._streams).atexit = False

    @functools.cached_property
    def communication(self) -> Any:
        self._streams.append(_take_stream(self._device))
        return self._streams[-1]

    def add(self, graph: Any) -> None:
        """``graph`` has been captured in it."""
        self._graphs.add(graph)
        self._had_graphs = True

    @property
    def is_over(self) -> bool:
        """Whether all of its graphs are gone: torch's allocator of pinned memory gives up the pool with the last, and
        refuses the next capture there."""
        return self._had_graphs and not self._graphs

    def segments(self) -> tuple[tuple[int, int], ...]:
        """(address, bytes) of what it has by now."""
        pools = {tuple(handle) for handle in (self.pool.handle, *self.bodies.pools)}
        segments = torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
        return tuple(
            (int(segment["address"]), int(segment["total_size"]))
            for segment in segments
            if segment["device"] == self._device.index and tuple(segment["segment_pool_id"]) in pools
        )


def give_back(device: torch.device) -> None:
    """Pools that nobody has any more go back to the device: torch would keep them until it runs out. What else it keeps
    it leaves alone while anything allocates to a pool, and all of it while any thread captures."""
    with device_lock, Pool(device).entered():
        torch.cuda.empty_cache()


# While a graph has it. A device has one, as all its graphs are launched on its one compute stream.
_shared: weakref.WeakValueDictionary[torch.device, GraphMemory] = weakref.WeakValueDictionary()
_lock = threading.Lock()


def shared_memory(device: torch.device) -> GraphMemory:
    """That of the graphs that are kept of all programs of ``device``."""
    with _lock:
        memory = _shared.get(device)
        if memory is None or memory.is_over:
            memory = _shared[device] = GraphMemory(device)
        return memory
