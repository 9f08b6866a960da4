"""The walk that passes share: callees before callers, operands before users, untouched parts kept as they are."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from flagos_backend.ir.attributes import NONE, Attributes, ParameterAttributes, TupleIndexAttributes
from flagos_backend.ir.hlo import Computation, Instruction, Module
from flagos_backend.ir.opcode import Opcode
from flagos_backend.ir.types import ArrayShape, ElementType, Shape

# Looks at an instruction whose operands are already rewritten; a value to use instead, or None to keep it.
Rule = Callable[[Instruction, "Emitter"], Instruction | None]


class Emitter:
    """Collects the instructions of the computation being rewritten. New ones pass through the rule as well."""

    def __init__(self, rule: Rule | None = None) -> None:
        self.instructions: list[Instruction] = []
        self._rule = rule

    def emit(
        self,
        opcode: Opcode,
        shape: Shape,
        operands: Iterable[Instruction],
        attributes: Attributes = NONE,
        called: tuple[Computation, ...] = (),
        *,
        like: Instruction,
    ) -> Instruction:
        """The value of a new instruction, which takes name and metadata from ``like``."""
        return self.put(Instruction(opcode, shape, tuple(operands), attributes, called, like.name, like.metadata))

    def put(self, instruction: Instruction) -> Instruction:
        """Appends ``instruction`` unless the rule has something better; the value to use."""
        if self._rule is not None:
            better = self._rule(instruction, self)
            if better is not None:
                return better
        self.instructions.append(instruction)
        return instruction


def array_shape(instruction: Instruction) -> ArrayShape:
    """The shape of a value known to be an array; TypeError otherwise."""
    if not isinstance(instruction.shape, ArrayShape):
        raise TypeError(f"{instruction!r} is no array")
    return instruction.shape


def index_in(value: Instruction, state: Instruction) -> int:
    """Which element of the tuple ``state`` ``value`` is, -1 for none."""
    if value.opcode is not Opcode.GET_TUPLE_ELEMENT or value.operands[0] is not state:
        return -1
    return value.attributes_as(TupleIndexAttributes).index


def sum_of(element_type: ElementType) -> Computation:
    """The combiner of a reduce that adds."""
    return combiner_of(Opcode.ADD, element_type)


def combiner_of(opcode: Opcode, element_type: ElementType) -> Computation:
    """The combiner of a reduce by the operation ``opcode`` of two numbers."""
    scalar = ArrayShape(element_type, ())
    x, y = (
        Instruction(Opcode.PARAMETER, scalar, (), ParameterAttributes(number), name=name)
        for number, name in enumerate("xy")
    )
    name = "sum" if opcode is Opcode.ADD else str(opcode)
    total = Instruction(opcode, scalar, (x, y), name=name)
    return Computation(name, (x, y, total), total)


def with_operands(
    instruction: Instruction, operands: tuple[Instruction, ...], called: tuple[Computation, ...]
) -> Instruction:
    return Instruction(
        instruction.opcode,
        instruction.shape,
        operands,
        instruction.attributes,
        called,
        instruction.name,
        instruction.metadata,
    )


class Substitution:
    """Values that replace others, applied to instructions in order. Identity when nothing was replaced."""

    def __init__(self, computations: dict[int, Computation]) -> None:
        self.values: dict[int, Instruction] = {}
        self._computations = computations

    def apply(self, instruction: Instruction) -> Instruction:
        """``instruction`` on the replaced operands and computations; itself when none of them was."""
        values = self.values
        operands = instruction.operands
        for operand in operands:
            if id(operand) in values:
                operands = tuple([values.get(id(o), o) for o in operands])
                break
        called = instruction.called
        if called:
            replaced = tuple([self._computations[id(callee)] for callee in called])
            called = called if all(map(_same, replaced, called)) else replaced
        if operands is instruction.operands and called is instruction.called:
            return instruction
        return with_operands(instruction, operands, called)

    def record(self, old: Instruction, new: Instruction) -> None:
        if new is not old:
            self.values[id(old)] = new

    def value(self, old: Instruction) -> Instruction:
        return self.values.get(id(old), old)


def with_callees(computation: Computation, replaced: dict[int, Computation]) -> Computation:
    """``computation`` on what became of its callees; itself where these are what they were."""
    substitution = Substitution(replaced)
    instructions = []
    for original in computation.instructions:
        instructions.append(substitution.apply(original))
        substitution.record(original, instructions[-1])
    if not substitution.values:
        return computation
    return Computation(computation.name, tuple(instructions), substitution.value(computation.root))


def _same(a: object, b: object) -> bool:
    return a is b


def rewrite_computations(
    module: Module, transform: Callable[[Computation, dict[int, Computation]], Computation]
) -> Module:
    """``module`` with each reachable computation transformed, callees first.

    ``transform`` gets the computation and what became of each of its callees; the same module when all return what
    they got.
    """
    replaced: dict[int, Computation] = {}
    kept: list[Computation] = []  # ids are unique only among living objects
    for computation in list(module.computations()):
        kept.append(computation)
        replaced[id(computation)] = transform(computation, replaced)
    entry = replaced[id(module.entry)]
    return module if entry is module.entry else replace(module, entry=entry)


# The value to use instead of an instruction, and the instructions that make it of operands as they were.
Replacement = tuple[Instruction, list[Instruction]]


def replace_each(
    computation: Computation,
    replaced: dict[int, Computation],
    find: Callable[[Instruction], Replacement | None],
) -> Computation:
    """``computation`` on what became of its callees, and with what ``find`` has for its instructions."""
    emitter, substitution = Emitter(), Substitution(replaced)
    kept: list[Instruction] = []  # ids are unique only among living objects
    for instruction in computation.instructions:
        found = find(instruction)
        if found is None:
            substitution.record(instruction, emitter.put(substitution.apply(instruction)))
            continue
        value, made = found
        kept += made
        for new in made:
            substitution.record(new, emitter.put(substitution.apply(new)))
        substitution.record(instruction, substitution.value(value))
    if not substitution.values:
        return computation
    return Computation(computation.name, tuple(emitter.instructions), substitution.value(computation.root))


def users_of(computation: Computation) -> dict[int, list[Instruction]]:
    """The instructions that take each value, by its id, as often as they do."""
    users: dict[int, list[Instruction]] = {}
    for instruction in computation.instructions:
        for operand in instruction.operands:
            users.setdefault(id(operand), []).append(instruction)
    return users


def apply_rule(module: Module, rule: Rule) -> Module:
    """``module`` with ``rule`` offered every instruction once its operands are rewritten."""

    def transform(computation: Computation, replaced: dict[int, Computation]) -> Computation:
        emitter, substitution = Emitter(rule), Substitution(replaced)
        for instruction in computation.instructions:
            substitution.record(instruction, emitter.put(substitution.apply(instruction)))
        if not substitution.values:
            return computation
        return Computation(computation.name, tuple(emitter.instructions), substitution.value(computation.root))

    return rewrite_computations(module, transform)
