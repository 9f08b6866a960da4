"""The graph IR: HLO as small immutable dataclasses. SPEC.md beside this file is its written definition."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TypeVar

from flagos_backend.ir.attributes import NONE, Attributes, ParameterAttributes
from flagos_backend.ir.opcode import Opcode
from flagos_backend.ir.types import Shape

A = TypeVar("A")


@dataclass(frozen=True, slots=True, eq=False)
class Instruction:
    """One operation. Compared by identity: two equal-looking instructions are two values.

    ``called`` holds the computations it uses, in HLO's order: reduce (to_apply,), while (condition, body),
    conditional (branches...), sort (comparator,), select-and-scatter (select, scatter).
    """

    opcode: Opcode
    shape: Shape
    operands: tuple[Instruction, ...] = ()
    attributes: Attributes = NONE
    called: tuple[Computation, ...] = ()
    name: str = ""
    metadata: str = ""  # the framework's own name for it, for messages

    def attributes_as(self, kind: type[A]) -> A:
        """The attributes, known to be of ``kind``; TypeError otherwise."""
        if not isinstance(self.attributes, kind):
            raise TypeError(f"{self.name}: {self.opcode} carries {type(self.attributes).__name__}, not {kind.__name__}")
        return self.attributes

    def __repr__(self) -> str:
        operands = ", ".join(o.name for o in self.operands)
        return f"{self.name} = {self.shape} {self.opcode}({operands})"


@dataclass(frozen=True, slots=True, eq=False)
class Computation:
    """A function: ``instructions`` in an order where operands come first, ``parameters`` by number."""

    name: str
    instructions: tuple[Instruction, ...] = field(repr=False)
    root: Instruction = field(repr=False)

    @property
    def parameters(self) -> tuple[Instruction, ...]:
        found = [i for i in self.instructions if i.opcode is Opcode.PARAMETER]
        return tuple(sorted(found, key=lambda i: i.attributes_as(ParameterAttributes).number))


def parameter_number(instruction: Instruction) -> int | None:
    """The number of a parameter; None for any other instruction."""
    if instruction.opcode is not Opcode.PARAMETER:
        return None
    return instruction.attributes_as(ParameterAttributes).number


@dataclass(frozen=True, slots=True)
class Alias:
    """Output ``output_index`` may take over the storage of entry parameter ``parameter_number``."""

    output_index: tuple[int, ...]
    parameter_number: int
    parameter_index: tuple[int, ...] = ()
    must_alias: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Module:
    """A whole program. ``aliases`` are buffer donations; ``donors`` are parameters that any output may take over."""

    name: str
    entry: Computation
    aliases: tuple[Alias, ...] = ()
    donors: tuple[int, ...] = ()
    num_replicas: int = 1
    num_partitions: int = 1

    def computations(self) -> Iterator[Computation]:
        """Every reachable computation once, callees before callers."""
        yield from _reachable(self.entry, set())


def _reachable(computation: Computation, seen: set[Computation]) -> Iterator[Computation]:
    if computation in seen:
        return
    seen.add(computation)
    for instruction in computation.instructions:
        for callee in instruction.called:
            yield from _reachable(callee, seen)
    yield computation
