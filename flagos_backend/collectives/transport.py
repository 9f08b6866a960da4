"""Moves arrays among the members of one torch.distributed group: gloo, NCCL, FlagCX, whatever is registered there.
Under spanning.py, which knows the participants of each member."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor
from torch._C import _distributed_c10d as c10d
from torch.distributed import ReduceOp

from flagos_backend.errors import CollectiveFailed, CollectiveOverdue
from flagos_backend.ir.opcode import Opcode

# Up to here one round of messages is faster than moving less in two.
_ONE_ROUND_BYTES: Final = 16384
_REASON_LENGTH: Final = 400

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


@dataclass(frozen=True, slots=True)
class Transport:
    """``group``: a torch.distributed ProcessGroup, or one of its backends. ``members``: by rank, their numbers among
    all of their ``kind``, "process" or "device". ``rank``: the caller's. ``name``: the group's, for messages;
    ``backend``: what carries it ("gloo"). ``meet``: returns when the caller's neighbours have called it too, other
    members whose threads share its process. They begin together, and go on when all have begun: a device that waits in
    a collective holds up whoever asks the driver for memory, and it waits for them.

    Every operation has to be called by all members in the same order, and raises CollectiveOverdue when the group's
    timeout passes and CollectiveFailed when a member is lost, naming ``channel``.
    """

    group: Any
    members: tuple[int, ...]
    rank: int
    name: str
    backend: str
    kind: str = "process"
    meet: Callable[[], None] = lambda: None
    begun: Callable[[object], None] = lambda channel: None

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

    def all_gather(self, channel: object, array: Tensor) -> Tensor:
        """The arrays of all members, equal in shape and dtype: [size, *array.shape]."""
        result = array.new_empty((self.size, *array.shape))
        source, target = _bytes(array), _bytes(result)
        if array.numel():
            self._await(channel, lambda: self.group._allgather_base(target, source, c10d.AllgatherOptions()))
        return result

    def all_to_all(self, channel: object, parts: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
        """``parts[r]``, bytes, goes to rank r; returns what came, ``sizes[r]`` bytes from rank r."""
        source = joined(parts)
        target = source.new_empty(sum(sizes))
        given = [part.numel() for part in parts]
        options = c10d.AllToAllOptions()
        self._await(channel, lambda: self.group.alltoall_base(target, source, list(sizes), given, options))
        return list(torch.split(target, list(sizes)))

    def broadcast(self, channel: object, array: Tensor, root: int) -> Tensor:
        """The array of rank ``root``, equal in shape and dtype on all members."""
        result = array.clone(memory_format=torch.contiguous_format)
        options = c10d.BroadcastOptions()
        options.rootRank = root
        if array.numel():
            self._await(channel, lambda: self.group.broadcast([_bytes(result)], options))
        return result

    def all_reduce(
        self, channel: object, array: Tensor, fold: Callable[[Sequence[Tensor]], Tensor], opcode: Opcode | None
    ) -> Tensor:
        """The fold of the arrays of all members, the same bits on each of them."""
        operation = self._native(opcode, array.dtype)
        if operation is not None:
            result = array.clone(memory_format=torch.contiguous_format)
            options = c10d.AllreduceOptions()
            options.reduceOp = operation
            if array.numel():
                self._await(channel, lambda: self.group.allreduce([result], options))
            return result
        if array.nbytes <= _ONE_ROUND_BYTES:
            return fold(self.all_gather(channel, array).unbind())
        # Everybody folds one part, and gets the others.
        length = -(-array.numel() // self.size)
        padded = array.new_zeros(length * self.size)
        padded[: array.numel()] = array.reshape(-1)
        part = self.reduce_scatter(channel, padded.reshape(self.size, length), fold, None)
        return self.all_gather(channel, part).reshape(-1)[: array.numel()].reshape(array.shape)

    def reduce_scatter(
        self, channel: object, parts: Tensor, fold: Callable[[Sequence[Tensor]], Tensor], opcode: Opcode | None
    ) -> Tensor:
        """``parts``: [size, ...]. The fold of all members' part of this rank."""
        operation = self._native(opcode, parts.dtype)
        if operation is None:
            sizes = [parts[0].nbytes] * self.size
            received = self.all_to_all(channel, [_bytes(part) for part in parts], sizes)
            return fold([from_bytes(part, parts[0]) for part in received])
        result = parts.new_empty(parts.shape[1:])
        options = c10d.ReduceScatterOptions()
        options.reduceOp = operation
        source, target = parts.contiguous().reshape(-1), result.reshape(-1)
        if result.numel():
            self._await(channel, lambda: self.group._reduce_scatter_base(target, source, options))
        return result

    def _native(self, opcode: Opcode | None, dtype: torch.dtype) -> Any:
        """The transport's own reduction, where it means what HLO means; else None."""
        if opcode not in _REDUCE_OPS:
            return None
        if dtype in _INTEGERS:
            return None if opcode in _BITWISE and self.backend != "gloo" else _REDUCE_OPS[opcode]
        return _REDUCE_OPS[opcode] if dtype in _FLOATS and opcode in (Opcode.ADD, Opcode.MULTIPLY) else None

    def _await(self, channel: object, start: Callable[[], Any]) -> None:
        self.meet()
        begin = time.monotonic()
        try:
            work = start()
            self.meet()
            work.wait()
            self.begun(channel)
        except (RuntimeError, ValueError) as error:
            seconds = time.monotonic() - begin
            reason = reason_of(error)
            facts = {**self.facts(channel), "reason": reason}
            # Transports say it in words only.
            if "timed out" in reason.lower() or "timeout" in reason.lower():
                raise CollectiveOverdue(**facts, seconds=f"{seconds:.1f}") from error
            raise CollectiveFailed(**facts) from error


def reason_of(error: Exception) -> str:
    """What torch.distributed says, on one line: some backends name the place on the first and the cause on the next.
    Without the stack that PyTorch may add."""
    text = str(error).partition("Exception raised from ")[0]
    line = "; ".join(part.strip().rstrip(".,;:") for part in text.splitlines() if part.strip())
    return line if len(line) <= _REASON_LENGTH else line[: _REASON_LENGTH - 1] + "…"


def members_text(kind: str, members: Sequence[int]) -> str:
    """Members of a group as messages name them."""
    return f"{'processes' if kind == 'process' else 'devices'} {list(members)}"


def as_bytes(arrays: Sequence[Tensor]) -> Tensor:
    """The contents of the arrays, one after another."""
    return joined([_bytes(array) for array in arrays])


def joined(parts: Sequence[Tensor]) -> Tensor:
    """Vectors one after another; a single one as it is."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def from_bytes(contents: Tensor, like: Tensor) -> Tensor:
    """An array in new storage of its own, shaped ``like`` another, with these contents."""
    result = like.new_empty(like.shape)
    _bytes(result).copy_(contents)
    return result


def _bytes(array: Tensor) -> Tensor:
    return array.contiguous().reshape(-1).view(torch.uint8)
