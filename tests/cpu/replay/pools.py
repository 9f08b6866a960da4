"""Stands for torch's allocator under capture, over host memory: pools of segments that never move, in which a capture
finds free what the captures before it had."""

from __future__ import annotations

import ctypes
import itertools
from dataclasses import dataclass, field

import torch

Handle = tuple[int, int]

_ALIGNMENT = 512
_GARBAGE = 0xA5


@dataclass(slots=True)
class _Pool:
    """``uses``: who has it. ``filled``: how much of each segment the capture that goes on has. ``adopted``: memory that
    captures made elsewhere."""

    uses: int = 0
    segments: list[torch.UntypedStorage] = field(default_factory=list)
    filled: list[int] = field(default_factory=list)
    adopted: list[torch.UntypedStorage] = field(default_factory=list)


class Pools:
    """``current``: the pool of the capture that goes on. ``misplaced``: a pool whose captures have their temporaries
    elsewhere."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._pools: dict[Handle, _Pool] = {}
        self._elsewhere: list[torch.UntypedStorage] = []
        # Torch's allocator of pinned memory counts the graphs of a pool, and keeps one that none has any more.
        self._graphs: dict[Handle, int] = {}
        self.current: Handle = (0, 0)
        self.misplaced: Handle | None = None

    def handle(self) -> Handle:
        return 0, next(self._numbers)

    def take(self, handle: Handle) -> None:
        self._pools.setdefault(handle, _Pool()).uses += 1

    def release(self, handle: Handle) -> None:
        self._pools[handle].uses -= 1
        if not self._pools[handle].uses:
            del self._pools[handle]

    def begin(self, handle: Handle) -> None:
        """For a graph. Raises RuntimeError where the last one that the pool had is gone."""
        if self._graphs.get(handle) == 0:
            raise RuntimeError("it->second->use_count > 0 INTERNAL ASSERT FAILED")
        self._graphs[handle] = self._graphs.get(handle, 0) + 1
        self.take(handle)
        self.current = handle
        pool = self._pools[handle]
        pool.filled = [0] * len(pool.segments)

    def leave(self, handle: Handle) -> None:
        """A graph is gone."""
        self._graphs[handle] -= 1
        self.release(handle)

    def place(self, num_bytes: int) -> int:
        """The address of so many bytes in the current pool: in the first segment that has room, or a new one."""
        if self.current == self.misplaced:
            self._elsewhere.append(torch.UntypedStorage(num_bytes))
            return self._elsewhere[-1].data_ptr()
        pool = self._pools[self.current]
        wanted = -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        for number, segment in enumerate(pool.segments):
            if pool.filled[number] + wanted <= segment.nbytes():
                break
        else:
            number = len(pool.segments)
            pool.segments.append(torch.UntypedStorage(wanted))
            pool.filled.append(0)
        pool.filled[number] += wanted
        return pool.segments[number].data_ptr() + pool.filled[number] - wanted

    def adopt(self, storages: list[torch.UntypedStorage]) -> None:
        self._pools[self.current].adopted += storages

    def snapshot(self) -> list[dict[str, object]]:
        """As torch's."""
        return [
            {"device": None, "segment_pool_id": handle, "address": segment.data_ptr(), "total_size": segment.nbytes()}
            for handle, pool in self._pools.items()
            for segment in (*pool.segments, *pool.adopted)
        ]

    @property
    def in_use(self) -> dict[Handle, int]:
        """The bytes of each pool that has any."""
        sizes = {handle: sum(s.nbytes() for s in pool.segments) for handle, pool in self._pools.items()}
        return {handle: size for handle, size in sizes.items() if size}

    def spoil(self) -> None:
        """What lies there is whatever was launched before."""
        for pool in self._pools.values():
            for segment in pool.segments:
                ctypes.memset(segment.data_ptr(), _GARBAGE, segment.nbytes())
