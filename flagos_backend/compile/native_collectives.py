"""What the devices of one process do in a collective without the interpreter: between codegen/cpu/emitter.py, whose
library calls collectives are, and native/collective.h, which has the same kinds and functions in this order."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from math import prod
from typing import Final

from flagos_backend.codegen.cpu.lower.instruction import Call
from flagos_backend.ir.attributes import CollectiveAttributes, CollectivePermuteAttributes
from flagos_backend.ir.opcode import Opcode
from flagos_backend.ir.participants import Position, group_mode, participants_of
from flagos_backend.ir.types import ArrayShape, ElementType
from flagos_backend.kernels.reference.computations import plain_combiner


class Kind(enum.IntEnum):
    """What each participant's results are made of the operands of all."""

    ALL_REDUCE = 0
    REDUCE_SCATTER = 1
    ALL_GATHER = 2
    ALL_TO_ALL = 3
    PERMUTE = 4


#: Functions of two elements, by number. Those of booleans are bitwise, which is the same.
FUNCTIONS: Final = (Opcode.ADD, Opcode.MULTIPLY, Opcode.MAXIMUM, Opcode.MINIMUM, Opcode.AND, Opcode.OR)
_KINDS: Final = {
    Opcode.ALL_REDUCE: Kind.ALL_REDUCE,
    Opcode.REDUCE_SCATTER: Kind.REDUCE_SCATTER,
    Opcode.ALL_GATHER: Kind.ALL_GATHER,
    Opcode.ALL_TO_ALL: Kind.ALL_TO_ALL,
    Opcode.COLLECTIVE_BROADCAST: Kind.PERMUTE,
    Opcode.COLLECTIVE_PERMUTE: Kind.PERMUTE,
}
_BITWISE: Final = frozenset({Opcode.AND, Opcode.OR})
_WHOLE: Final = frozenset(
    {
        *(ElementType.S8, ElementType.S16, ElementType.S32, ElementType.S64),
        *(ElementType.U8, ElementType.U16, ElementType.U32, ElementType.U64),
    }
)
_FLOATS: Final = frozenset({ElementType.F32, ElementType.F64})


@dataclass(frozen=True, slots=True)
class NativeCollective:
    """``function``: a number of FUNCTIONS, or -1 where nothing is computed. ``parts``: for each operand its element
    type, the size of the dimensions before the one that is split or joined, and that of one participant's share of the
    rest, in bytes. ``participants``: for each device of the launch its group, in order, or nothing where it is in none.
    ``sources``: of a permutation, the rank that each rank's results come from; -1: zeros.
    """

    kind: Kind
    function: int
    parts: tuple[tuple[int, int, int], ...]
    participants: tuple[tuple[int, ...], ...]
    sources: tuple[int, ...] = ()

    def plain(self) -> tuple[object, ...]:
        """For the native side."""
        return int(self.kind), self.function, self.parts, self.participants, self.sources


def native_collective(call: Call, replicas: int, partitions: int) -> NativeCollective | None:
    """None for what is no collective, or one that the interpreter carries out: operands that are parts of arrays,
    functions and types other than the plain ones, groups that do not fit the launch, which is an error of the
    launch."""
    instruction = call.instruction
    kind = _KINDS.get(instruction.opcode)
    if kind is None or any(call.views) or len(call.operands) != len(call.results):
        return None
    if any(shape.num_elements and shape.num_bytes % shape.num_elements for shape in call.operands):
        return None  # several elements of one byte
    function = -1
    if kind in (Kind.ALL_REDUCE, Kind.REDUCE_SCATTER):
        opcode = plain_combiner(instruction.called[0])
        if opcode not in FUNCTIONS or not all(_computes(opcode, shape.element_type) for shape in call.operands):
            return None
        function = FUNCTIONS.index(opcode)
    devices = replicas * partitions
    positions = [Position(number // partitions, number % partitions, replicas, partitions) for number in range(devices)]
    sources: tuple[int, ...] = ()
    if isinstance(instruction.attributes, CollectivePermuteAttributes):
        participants, sources = _permutation(instruction.attributes, positions)
    else:
        attributes = instruction.attributes_as(CollectiveAttributes)
        participants = tuple(participants_of(instruction.opcode, attributes, position) for position in positions)
        if kind is Kind.PERMUTE:
            sources = (0,) * max(map(len, participants))
        elif not all(participants):
            return None
    if any(not 0 <= number < devices for group in participants for number in group):
        return None
    if len({len(group) for group in participants if group}) > 1:
        return None
    size = max(map(len, participants), default=0)
    dimension = 0 if kind in (Kind.ALL_REDUCE, Kind.PERMUTE) else _dimension(call)
    if dimension is None or size == 0:
        return None
    parts = tuple(_part(kind, shape, dimension, size) for shape in call.operands)
    return NativeCollective(kind, function, parts, participants, sources)


def _computes(opcode: Opcode, element_type: ElementType) -> bool:
    if opcode in _BITWISE:
        return element_type in _WHOLE or element_type is ElementType.PRED
    return element_type in _WHOLE or element_type in _FLOATS


def _dimension(call: Call) -> int | None:
    """That is split or joined; None where each participant has an operand of its own."""
    return call.instruction.attributes_as(CollectiveAttributes).dimension


def _part(kind: Kind, shape: ArrayShape, dimension: int, size: int) -> tuple[int, int, int]:
    outer = prod(shape.dims[:dimension]) if dimension else 1
    inner = shape.num_bytes // outer if outer else 0
    if kind in (Kind.REDUCE_SCATTER, Kind.ALL_TO_ALL):
        inner //= size
    return int(shape.element_type), outer, inner


def _permutation(
    attributes: CollectivePermuteAttributes, positions: list[Position]
) -> tuple[tuple[tuple[int, ...], ...], tuple[int, ...]]:
    """The participants for each position, and the rank that each rank receives from."""
    mode = group_mode(Opcode.COLLECTIVE_PERMUTE, attributes.channel_id, use_global_device_ids=False)
    pairs = attributes.source_target_pairs
    members = sorted({number for pair in pairs for number in pair})
    source = {target: members.index(origin) for origin, target in pairs}
    participants = tuple(
        tuple(device for number in members for device in position.flatten(mode, number))
        if position.own_number(mode) in members
        else ()
        for position in positions
    )
    return participants, tuple(source.get(number, -1) for number in members)
