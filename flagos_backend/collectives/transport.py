"""Moves arrays among the members of one torch.distributed group: gloo, NCCL, FlagCX, whatever is registered there.
Under multi_process.py, which knows the participants of each member."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

from torch._C import _distributed_c10d as c10d
from torch.distributed import ReduceOp

from flagos_backend.devices.process_groups import is_late, members_text, reason_of
from flagos_backend.errors import CollectiveFailed, CollectiveOverdue
from flagos_backend.ir.opcode import Opcode
from flagos_backend.process.torch_loading import Tensor, torch

Reduce = Callable[[Sequence[Tensor]], Tensor]

# Up to here one round of messages is faster than moving less in two.
_ONE_ROUND_BYTES: Final = 16384

_REDUCE_OPS: Final = {
    Opcode.ADD: ReduceOp.SUM,
    Opcode.MULTIPLY: ReduceOp.PRODUCT,
    Opcode.MINIMUM: ReduceOp.MIN,
    Opcode.MAXIMUM: ReduceOp.MAX,
    Opcode.AND: ReduceOp.BAND,
    Opcode.OR: ReduceOp.BOR,
    Opcode.XOR: ReduceOp.BXOR,
}
_INTEGERS: Final = frozenset({torch.int8, torch.uint8, torch.int32, torch.int64})
_FLOATS: Final = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
# Transports know no NaN in minima and maxima, and NCCL's kin no bitwise operations.
_BITWISE: Final = frozenset({Opcode.AND, Opcode.OR, Opcode.XOR})


@dataclass(slots=True)
class Room:
    """Where the result of one operation may be made: ``array``, dense, or nowhere in particular."""

    array: Tensor | None = None

    def like(self, other: Tensor, shape: Sequence[int] | None = None) -> Tensor:
        """An array of the type and shape of another, or of ``shape``: the room, once, if that is as large."""
        made, self.array = self.array, None
        shape = other.shape if shape is None else shape
        if made is not None and made.nbytes == math.prod(shape) * other.itemsize:
            return made.view(-1).view(other.dtype).view(shape)
        return other.new_empty(shape)


# Enqueues a reduction of the first array over all members in the second one.
ReduceInto = Callable[[Tensor, Tensor, Any], None]


@dataclass(frozen=True, slots=True)
class Transport:
    """``group``: a torch.distributed ProcessGroup, or one of its backends. ``members``: by rank, their numbers among
    all of their ``kind``, "process" or "device". ``rank``: the caller's. ``name``: the group's, for messages;
    ``backend``: what carries it ("gloo"). ``unlike_nccl``: why that is more than calls of NCCL, if it is FlagCX, or "".
    ``coalesces``: whether several operations are one to the group, without their arrays being put together. ``meet``:
    returns when the caller's neighbours have called it too, other members whose threads share its process. They begin
    together, and go on when all have begun: a device that waits in a collective holds up whoever asks the driver for
    memory, and it waits for them. ``room``: for the result of the next operation. ``reduces``: sums that are not made
    in place, where the group has them.

    Every operation has to be called by all members in the same order, and raises CollectiveOverdue when the group's
    timeout passes and CollectiveFailed when a member is lost, naming ``channel``.
    """

    group: Any
    members: tuple[int, ...]
    rank: int
    name: str
    backend: str
    kind: str = "process"
    unlike_nccl: str = ""
    coalesces: bool = False
    meet: Callable[[], None] = lambda: None
    begun: Callable[[object], None] = lambda channel: None
    room: Room = field(default_factory=Room)
    reduces: ReduceInto | None = None

    @property
    def size(self) -> int:
        return len(self.members)

    def facts(self, channel: object) -> dict[str, object]:
        """What errors say of a collective here."""
        return {
            "channel": channel,
            "group": self.name,
            "backend": self.backend,
            "members": members_text(self.kind, self.members),
            "member": f"{self.kind} {self.members[self.rank]}",
        }

    def all_gather(self, channel: object, arrays: Sequence[Tensor]) -> list[Tensor]:
        """Each array of all members, equal in shape and dtype: [size, *array.shape]. They travel together."""
        if len(arrays) > 1 and not self.coalesces:
            (whole,) = self.all_gather(channel, [as_bytes(arrays)])
            parts = torch.split(whole, [array.nbytes for array in arrays], dim=1)
            shapes = ((array, (self.size, *array.shape)) for array in arrays)
            return [from_bytes(part.reshape(-1), *like) for part, like in zip(parts, shapes, strict=True)]
        arrays = [array.contiguous() for array in arrays]  # which stay until the last of them has begun
        results = [self.room.like(array, (self.size, *array.shape)) for array in arrays]
        options = _in_order(c10d.AllgatherOptions())

        def start(array: Tensor, result: Tensor) -> Any:
            return self.group._allgather_base(_bytes(result), _bytes(array), options)

        pairs = zip(arrays, results, strict=True)
        self._await(channel, [partial(start, *pair) for pair in pairs if pair[0].numel()])
        return results

    def all_to_all(self, channel: object, parts: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
        """``parts[r]``, bytes, goes to rank r; returns what came, ``sizes[r]`` bytes from rank r, one after another in
        new storage."""
        source = joined(parts)
        target = self.room.like(source, (sum(sizes),))
        given = [part.numel() for part in parts]
        options = _in_order(c10d.AllToAllOptions())
        self._await(channel, [lambda: self.group.alltoall_base(target, source, list(sizes), given, options)])
        return list(torch.split(target, list(sizes)))

    def broadcast(self, channel: object, array: Tensor, root: int) -> Tensor:
        """The array of rank ``root``, equal in shape and dtype on all members."""
        if self.unlike_nccl:
            # FlagCX's host adaptor sends each member another part of the root's memory (0c72129, BroadcastBootstrap).
            (whole,) = self.all_gather(channel, [array])
            return whole[root].clone()
        result = self.room.like(array).copy_(array)
        options = _in_order(c10d.BroadcastOptions())
        options.rootRank = root
        if array.numel():
            self._await(channel, [lambda: self.group.broadcast([_bytes(result)], options)])
        return result

    def exchange(self, channel: object, parts: Tensor) -> Tensor:
        """``parts``: [size, ...]; that of rank r goes there. Returns what came, by rank."""
        source = parts.contiguous()
        result = self.room.like(source)
        options = _in_order(c10d.AllToAllOptions())
        start = partial(self.group.alltoall_base, _bytes(result), _bytes(source), [], [], options)
        self._await(channel, [start] if source.numel() else [])
        return result

    def all_reduce(
        self, channel: object, arrays: Sequence[Tensor], reduction: Reduce, opcode: Opcode | None
    ) -> list[Tensor]:
        """The reduction of each array over all members, the same bits on each of them."""
        options = _in_order(c10d.AllreduceOptions())

        def native(arrays: Sequence[Tensor], operation: Any) -> list[Tensor]:
            if self.reduces is not None and len(arrays) == 1:
                return [self._reduced_into(channel, arrays[0].contiguous(), operation, self.reduces)]
            options.reduceOp = operation
            results = [self.room.like(array).copy_(array) for array in arrays]  # see ``copies``
            starts = (partial(self.group.allreduce, [result], options) for result in results if result.numel())
            self._await(channel, list(starts))
            return results

        return self._alike(arrays, opcode, native, lambda array: self._reduction(channel, array, reduction), 0)

    def copies(self, array: Tensor, opcode: Opcode | None) -> bool:
        """Whether ``all_reduce`` reads the array only to copy it first: no transport sees where it lies."""
        return self._native(opcode, array.dtype) is not None and self.reduces is None

    def _reduced_into(self, channel: object, array: Tensor, operation: Any, reduces: ReduceInto) -> Tensor:
        result = self.room.like(array)
        self._await(channel, [partial(reduces, array, result, operation)] if array.numel() else [])
        return result

    def _reduction(self, channel: object, array: Tensor, reduction: Reduce) -> Tensor:
        """What ``all_reduce`` gives, without the transport's own."""
        if array.nbytes <= _ONE_ROUND_BYTES:
            (whole,) = self.all_gather(channel, [array])
            return reduction(whole.unbind())
        # Everybody reduces one part, and gets the others.
        length = -(-array.numel() // self.size)
        padded = array.new_zeros(length * self.size)
        padded[: array.numel()] = array.reshape(-1)
        part = self._reduce_part(channel, padded.reshape(self.size, length), reduction)
        (whole,) = self.all_gather(channel, [part])
        return whole.reshape(-1)[: array.numel()].reshape(array.shape)

    def reduce_scatter(
        self, channel: object, parts: Sequence[Tensor], reduction: Reduce, opcode: Opcode | None
    ) -> list[Tensor]:
        """``parts``: of each array [size, ...]. The reduction of all members' part of this rank."""
        options = _in_order(c10d.ReduceScatterOptions())

        def start(parts: Tensor, result: Tensor) -> Any:
            return self.group._reduce_scatter_base(result.reshape(-1), parts.reshape(-1), options)

        def native(parts: Sequence[Tensor], operation: Any) -> list[Tensor]:
            options.reduceOp = operation
            parts = [part.contiguous() for part in parts]
            results = [self.room.like(part, part.shape[1:]) for part in parts]
            pairs = zip(parts, results, strict=True)
            self._await(channel, [partial(start, *pair) for pair in pairs if pair[1].numel()])
            return results

        return self._alike(parts, opcode, native, lambda part: self._reduce_part(channel, part, reduction), 1)

    def _reduce_part(self, channel: object, parts: Tensor, reduction: Reduce) -> Tensor:
        """What ``reduce_scatter`` gives, without the transport's own."""
        received = self.exchange(channel, parts)
        return reduction(received.unbind())

    def _alike(
        self,
        arrays: Sequence[Tensor],
        opcode: Opcode | None,
        native: Callable[[Sequence[Tensor], Any], list[Tensor]],
        reduction: Callable[[Tensor], Tensor],
        dimension: int,
    ) -> list[Tensor]:
        """``native`` of those arrays that the transport reduces itself, ``reduction`` of the others, both of all that
        are alike at once: put together along ``dimension``, unless the group does without. In the order of the
        arrays."""
        results: dict[int, Tensor] = {}
        for dtype in dict.fromkeys(array.dtype for array in arrays):
            numbers = [number for number, array in enumerate(arrays) if array.dtype == dtype]
            some, operation = [arrays[number] for number in numbers], self._native(opcode, dtype)

            def reduced(array: Tensor, operation: Any = operation) -> Tensor:
                return reduction(array) if operation is None else native([array], operation)[0]

            if len(some) == 1:
                made = [reduced(some[0])]
            elif operation is not None and self.coalesces:
                made = native(some, operation)
            else:
                made = _packed(some, reduced, dimension)
            results.update(zip(numbers, made, strict=True))
        return [results[number] for number in range(len(arrays))]

    def _native(self, opcode: Opcode | None, dtype: torch.dtype) -> Any:
        """The transport's own reduction, where it means what HLO means; else None."""
        if opcode not in _REDUCE_OPS:
            return None
        if dtype in _INTEGERS:
            return None if opcode in _BITWISE and self.backend != "gloo" else _REDUCE_OPS[opcode]
        return _REDUCE_OPS[opcode] if dtype in _FLOATS and opcode in (Opcode.ADD, Opcode.MULTIPLY) else None

    def _coalesced(self, starts: Sequence[Callable[[], Any]]) -> Any:
        self.group._start_coalescing()
        try:
            for start in starts:
                start()
        except Exception:
            # Or whatever the thread begins next would wait for an end, too.
            with contextlib.suppress(Exception):
                self.group._end_coalescing()
            raise
        return self.group._end_coalescing()

    def _await(self, channel: object, starts: Sequence[Callable[[], Any]]) -> None:
        """``starts``: several only where the group coalesces."""
        if not starts:
            return
        self.meet()
        begin = time.monotonic()
        try:
            work = starts[0]() if len(starts) == 1 else self._coalesced(starts)
            self.meet()
            # Nothing is returned where the stream waits by itself.
            if work is not None:
                work.wait()
            self.begun(channel)
        except (RuntimeError, ValueError) as error:
            seconds = time.monotonic() - begin
            reason = reason_of(error)
            facts = {**self.facts(channel), "reason": reason}
            if is_late(reason):
                raise CollectiveOverdue(**facts, seconds=f"{seconds:.1f}") from error
            raise CollectiveFailed(**facts) from error


def _in_order(options: Any) -> Any:
    """For a device: on the stream that the arrays are made and read on, not on one beside it."""
    options.asyncOp = False
    return options


def as_bytes(arrays: Sequence[Tensor]) -> Tensor:
    """The contents of the arrays, one after another."""
    return joined([_bytes(array) for array in arrays])


def joined(parts: Sequence[Tensor]) -> Tensor:
    """Vectors one after another; where all others are empty, the one that is not, as it is."""
    filled = [part for part in parts if part.numel()] or list(parts[:1])
    return filled[0] if len(filled) == 1 else torch.cat(filled)


def from_bytes(contents: Tensor, like: Tensor, shape: tuple[int, ...] | None = None) -> Tensor:
    """An array in new storage of its own, of the type and shape of another, or of ``shape``, with these contents."""
    result = like.new_empty(like.shape if shape is None else shape)
    _bytes(result).copy_(contents)
    return result


def _packed(arrays: Sequence[Tensor], work: Callable[[Tensor], Tensor], dimension: int) -> list[Tensor]:
    """``work`` on arrays of one dtype at once, whose first ``dimension`` dimensions are alike, and gone in its result:
    the part of each in new storage."""
    flat = [array.reshape(*array.shape[:dimension], -1) for array in arrays]
    parts = torch.split(work(torch.cat(flat, dim=dimension)), [array.shape[dimension] for array in flat])
    shapes = (array.shape[dimension:] for array in arrays)
    return [part.reshape(shape).clone() for part, shape in zip(parts, shapes, strict=True)]


def _bytes(array: Tensor) -> Tensor:
    return array.contiguous().reshape(-1).view(torch.uint8)
