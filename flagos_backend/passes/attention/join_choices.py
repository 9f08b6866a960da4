"""What one choice keeps less what the same choice leaves, as JAX's gradient of |x| is written, is one choice of signs:
where(p, g, 0) - where(p, 0, g) is where(p, g, -g), but for the sign of a zero. Before the match, as logsumexp takes
|l|."""

from __future__ import annotations

from flagos_backend.ir.hlo import Instruction, Module
from flagos_backend.ir.opcode import Opcode
from flagos_backend.passes.attention.labels import scalar_of
from flagos_backend.passes.rewrite import Emitter, apply_rule


def join_choices(module: Module) -> Module:
    return apply_rule(module, _rule)


def _rule(instruction: Instruction, emitter: Emitter) -> Instruction | None:
    if instruction.opcode not in (Opcode.ADD, Opcode.SUBTRACT):
        return None
    left, right = instruction.operands
    pairs = [(left, right)]
    if instruction.opcode is Opcode.ADD:
        pairs = [(a, b.operands[0]) for a, b in ((left, right), (right, left)) if b.opcode is Opcode.NEGATE]
    for kept, taken in pairs:
        if not kept.opcode is taken.opcode is Opcode.SELECT:
            continue
        predicate, value, zero = kept.operands
        if taken.operands[0] is predicate and taken.operands[2] is value and _are_zero(zero, taken.operands[1]):
            negative = emitter.emit(Opcode.NEGATE, instruction.shape, (value,), like=instruction)
            return emitter.emit(Opcode.SELECT, instruction.shape, (predicate, value, negative), like=instruction)
    return None


def _are_zero(*instructions: Instruction) -> bool:
    return all(scalar_of(instruction) == 0 for instruction in instructions)
