"""Collectives that do not wait for each other, and have the same kind and groups, become one of several arrays, as each
costs its devices a rendezvous. Weights that lie spread over devices are gathered by dozens, their gradients reduced so.

After the partitioner, which makes one for each array, and create_reduce_scatters.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace

from flagos_backend.ir.attributes import CollectiveAttributes, TupleIndexAttributes
from flagos_backend.ir.effects import COLLECTIVES, Effects
from flagos_backend.ir.hlo import Computation, Instruction, Module
from flagos_backend.ir.opcode import Opcode
from flagos_backend.ir.types import ArrayShape, TupleShape
from flagos_backend.passes.rewrite import Substitution, rewrite_computations, with_callees

_COMBINED = frozenset({Opcode.ALL_GATHER, Opcode.ALL_REDUCE, Opcode.REDUCE_SCATTER})
#: Bytes of the results of one collective, up to which another array joins it: what is gathered too early takes memory,
#: and the first is waited for as long as the last.
MOST_BYTES = 32 << 20


def combine_collectives(module: Module) -> Module:
    """Collectives whose arrays, kind, groups and function are the same, but for their channels, become one as well."""
    effects = Effects()

    def transform(computation: Computation, replaced: dict[int, Computation]) -> Computation:
        buckets = _buckets(computation, effects)
        if any(len(bucket) > 1 for bucket in buckets):
            return _Rewriter(computation, buckets, effects, Substitution(replaced)).rewritten()
        return with_callees(computation, replaced)

    return rewrite_computations(module, transform)


def _buckets(computation: Computation, effects: Effects) -> list[list[Instruction]]:
    """What becomes one collective, in the order of the program.

    None of those that are behind as many collectives waits for another of them, and so none of all that they become.
    """
    behind: dict[Instruction, int] = {}
    buckets: list[_Bucket] = []
    last: dict[Hashable, _Bucket] = {}
    for instruction, needed in _needs(computation, effects).items():
        level = max((behind[n] for n in needed), default=0)
        behind[instruction] = level + (instruction.opcode in COLLECTIVES)
        key = _key(instruction)
        if key is None:
            continue
        bucket = last.get((level, key))
        if bucket is None or not bucket.takes(instruction):
            bucket = last[level, key] = _Bucket()
            buckets.append(bucket)
        bucket.add(instruction)
    return [bucket.members for bucket in buckets]


class _Bucket:
    """Collectives that become one: of the same array one alone counts."""

    def __init__(self) -> None:
        self.members: list[Instruction] = []
        self._arrays: set[Instruction] = set()
        self._bytes = 0

    def takes(self, collective: Instruction) -> bool:
        return collective.operands[0] in self._arrays or self._bytes + _bytes(collective) <= MOST_BYTES

    def add(self, collective: Instruction) -> None:
        self.members.append(collective)
        if collective.operands[0] not in self._arrays:
            self._arrays.add(collective.operands[0])
            self._bytes += _bytes(collective)


def _needs(computation: Computation, effects: Effects) -> dict[Instruction, tuple[Instruction, ...]]:
    """What comes before each instruction: its operands, and of other effects the last one."""
    needs: dict[Instruction, tuple[Instruction, ...]] = {}
    last: tuple[Instruction, ...] = ()
    for instruction in computation.instructions:
        ordered = instruction.opcode not in COLLECTIVES and effects.of(instruction)
        needs[instruction] = (*instruction.operands, *(last if ordered else ()))
        last = (instruction,) if ordered else last
    return needs


def _key(instruction: Instruction) -> Hashable | None:
    """What collectives of one bucket have in common; None for all else."""
    if instruction.opcode not in _COMBINED or not isinstance(instruction.shape, ArrayShape):
        return None
    attributes = instruction.attributes_as(CollectiveAttributes)
    # Whether there is a channel says what numbers in the groups mean.
    alike = replace(attributes, channel_id=None if attributes.channel_id is None else 0)
    return instruction.opcode, alike, tuple(map(id, instruction.called)), instruction.shape.element_type


def _bytes(collective: Instruction) -> int:
    assert isinstance(collective.shape, ArrayShape)
    return collective.shape.num_bytes


class _Rewriter:
    """Writes a computation anew. A bucket comes where the first of its results is needed, behind what any of them is
    made from."""

    def __init__(
        self, computation: Computation, buckets: list[list[Instruction]], effects: Effects, substitution: Substitution
    ) -> None:
        self.computation, self.substitution = computation, substitution
        self.bucket_of = {member: bucket for bucket in buckets if len(bucket) > 1 for member in bucket}
        self.needs = _needs(computation, effects)
        self.done: set[Instruction] = set()
        self.instructions: list[Instruction] = []

    def rewritten(self) -> Computation:
        for instruction in self.computation.instructions:
            if instruction not in self.bucket_of:
                self._place(instruction)
        for instruction in self.bucket_of:  # whose results nobody needs
            self._place(instruction)
        root = self.substitution.value(self.computation.root)
        return Computation(self.computation.name, tuple(self.instructions), root)

    def _place(self, wanted: Instruction) -> None:
        waiting = [wanted]
        while waiting:
            instruction = waiting[-1]
            if instruction in self.done:
                waiting.pop()
                continue
            members = self.bucket_of.get(instruction, [instruction])
            missing = [n for member in members for n in self.needs[member] if n not in self.done]
            if missing:
                waiting.extend(reversed(missing))
            elif len(members) > 1:
                self._emit_bucket(members)
            else:
                self.instructions.append(self.substitution.apply(instruction))
                self.substitution.record(instruction, self.instructions[-1])
                self.done.add(instruction)

    def _emit_bucket(self, members: list[Instruction]) -> None:
        self.done.update(members)
        first = self.substitution.apply(members[0])
        arrays: dict[int, tuple[Instruction, ArrayShape]] = {}
        for member in members:
            operand = self.substitution.value(member.operands[0])
            assert isinstance(member.shape, ArrayShape)
            arrays.setdefault(id(operand), (operand, member.shape))
        if len(arrays) == 1:
            self.instructions.append(first)
            for member in members:
                self.substitution.record(member, first)
            return
        operands, shapes = zip(*arrays.values(), strict=True)
        combined = replace(first, shape=TupleShape(shapes), operands=operands)
        results = {
            operand: Instruction(
                Opcode.GET_TUPLE_ELEMENT, shape, (combined,), TupleIndexAttributes(n), name=f"{first.name}.{n}"
            )
            for n, (operand, (_, shape)) in enumerate(arrays.items())
        }
        self.instructions += [combined, *results.values()]
        for member in members:
            self.substitution.record(member, results[id(self.substitution.value(member.operands[0]))])
