"""Keys and values that a program repeats for the groups of queries that share them, and the sums of their gradients
over a group: kernels take keys and values as they were before, and sum themselves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from flagos_backend.ir.attributes import DimensionsAttributes
from flagos_backend.ir.hlo import Instruction
from flagos_backend.ir.opcode import Opcode
from flagos_backend.passes.attention.assemble import Matched, Result
from flagos_backend.passes.attention.labels import Labels, dims_of, element_type_of, moved, peel, scalar_of
from flagos_backend.passes.attention.recognize import reduced_with

Users = Mapping[Instruction, Sequence[Instruction]]

ARRANGEMENTS = frozenset({Opcode.TRANSPOSE, Opcode.RESHAPE, Opcode.CONVERT})
# The letter and the label of a group that was merged with the heads.
_NEW_GROUP, _NEW_LABEL = "y", -2


@dataclass(frozen=True, slots=True)
class Operand:
    instruction: Instruction
    dims: str


@dataclass(frozen=True, slots=True)
class Repetition:
    """``key`` and ``value`` before each entry of the dimension ``letter`` was repeated ``times``. Every other array's
    ``letter`` is taken apart into ``letter`` and ``group``, unless ``letter`` is itself the ``group``."""

    key: Operand
    value: Operand
    letter: str
    group: str
    times: int

    @property
    def splits(self) -> bool:
        return self.group != self.letter

    def split_dims(self, dims: str) -> str:
        return dims.replace(self.letter, self.letter + self.group) if self.splits else dims


def arranged(result: Result, users: Users) -> Result:
    """``result`` after the rearrangements and the rounding that alone use it: the kernel writes it like that."""
    while len(users[result.instruction]) == 1:
        user = users[result.instruction][0]
        labels = moved(user, result.labels) if user.opcode in ARRANGEMENTS else None
        if labels is None or not element_type_of(user).is_float:
            break
        result = Result(user, labels)
    return result


def repetition_of(matched: Matched) -> Repetition | None:
    a = matched.attention
    key, value = Operand(matched.key, a.key), Operand(matched.value, a.value)
    first, second = _before_repeat(key), _before_repeat(value)
    if first is None or second is None or (first.letter, first.times, first.merged) != (
        second.letter, second.times, second.merged,
    ):  # fmt: skip
        return None
    letter = first.letter
    if first.merged:
        return Repetition(first.source, second.source, letter, _NEW_GROUP, first.times)
    return Repetition(first.source, second.source, letter, letter, first.times)


@dataclass(frozen=True, slots=True)
class _Repeated:
    """``source`` before it was repeated; ``merged``: the dimension ``letter`` had entries before."""

    source: Operand
    letter: str
    times: int
    merged: bool


def _before_repeat(operand: Operand) -> _Repeated | None:
    """Of a broadcast that repeats an array along one dimension, or of one that a reshape merged with the one before."""
    numbers = tuple(None if letter == "1" else ord(letter) for letter in operand.dims)
    instruction, labels = peel(operand.instruction, numbers, exact=True)
    merged = instruction.opcode is Opcode.RESHAPE
    broadcast = instruction
    while broadcast.opcode is Opcode.RESHAPE:  # several are as good as the last one
        broadcast = broadcast.operands[0]
    if broadcast.opcode is not Opcode.BROADCAST:
        return None
    sizes, source = dims_of(broadcast), broadcast.operands[0]
    dimensions = broadcast.attributes_as(DimensionsAttributes).dimensions
    new = [d for d, size in enumerate(sizes) if d not in dimensions and size > 1]
    if (
        len(new) != 1
        or list(dimensions) != sorted(dimensions)
        or dims_of(source) != tuple(sizes[d] for d in dimensions)
    ):
        return None
    place, times = new[0], sizes[new[0]]
    if merged:
        if place == 0 or sizes[place - 1] == 1:
            return None
        if dims_of(instruction) != (*sizes[: place - 1], sizes[place - 1] * times, *sizes[place + 1 :]):
            return None
        label, labels = labels[place - 1], (*labels[:place], None, *labels[place:])
    else:
        label = labels[place]
    if label is None or chr(label) in "sde":
        return None
    dims = "".join("1" if (found := labels[d]) is None else chr(found) for d in dimensions)
    return _Repeated(Operand(source, dims), chr(label), times, merged)


def summed(
    results: Mapping[str, Result], repetition: Repetition, matched: Matched, users: Users
) -> dict[str, Result] | None:
    """``results`` with the gradients of key and value after the program summed each group; None where it does not."""
    label = next(label for label, letter in matched.letters.items() if letter == repetition.letter)
    found = {name: _summed(results[name], repetition, label, users) for name in results if name != "query"}
    given = {name: result for name, result in found.items() if result is not None}
    return {**results, **given} if len(given) == len(found) else None


def _summed(result: Result, repetition: Repetition, label: int, users: Users) -> Result | None:
    while len(users[result.instruction]) == 1:
        instruction, labels = result.instruction, result.labels
        (user,) = users[instruction]
        if user.opcode is Opcode.REDUCE:
            left = labels_of_sum(user, labels)
            group = _NEW_LABEL if _NEW_LABEL in labels else label
            if left is None or set(labels) - set(left) - {None} != {group}:
                return None
            if dims_of(instruction)[labels.index(group)] != repetition.times:
                return None
            return arranged(Result(user, left), users)
        found = moved(user, labels) if user.opcode in ARRANGEMENTS else None
        if found is None and user.opcode is Opcode.RESHAPE and label in labels:
            found = _taken_apart(user, labels, label, repetition.times)
        if found is None or not element_type_of(user).is_float:
            return None
        result = Result(user, found)
    return None


def _taken_apart(reshape: Instruction, labels: Labels, label: int, times: int) -> Labels | None:
    """Labels of a reshape that takes the dimension ``label`` apart into entries and how often each was repeated."""
    old, place = dims_of(reshape.operands[0]), labels.index(label)
    if dims_of(reshape) != (*old[:place], old[place] // times, times, *old[place + 1 :]):
        return None
    return (*labels[: place + 1], _NEW_LABEL, *labels[place + 1 :])


def labels_of_sum(reduce: Instruction, labels: Labels) -> Labels | None:
    """Of a reduce's result, if it adds; from those of its operand."""
    if len(reduce.operands) != 2 or reduced_with(reduce) is not Opcode.ADD or scalar_of(reduce.operands[1]) != 0:
        return None
    reduced = reduce.attributes_as(DimensionsAttributes).dimensions
    return tuple(label for d, label in enumerate(labels) if d not in reduced)
