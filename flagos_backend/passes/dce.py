"""Dead code elimination: drops instructions that neither the root nor a side effect needs. Parameters stay."""

from __future__ import annotations

from flagos_backend.ir.effects import Effects
from flagos_backend.ir.hlo import Computation, Module
from flagos_backend.ir.opcode import Opcode
from flagos_backend.passes.rewrite import Substitution, rewrite_computations


def eliminate_dead_code(module: Module) -> Module:
    effects = Effects()

    def transform(computation: Computation, replaced: dict[int, Computation]) -> Computation:
        needed = {id(instruction) for instruction in effects.needed(computation)}
        live = [i for i in computation.instructions if id(i) in needed or i.opcode is Opcode.PARAMETER]
        substitution = Substitution(replaced)
        instructions = []
        for instruction in live:
            instructions.append(substitution.apply(instruction))
            substitution.record(instruction, instructions[-1])
        if len(live) == len(computation.instructions) and not substitution.values:
            return computation
        return Computation(computation.name, tuple(instructions), substitution.value(computation.root))

    return rewrite_computations(module, transform)
