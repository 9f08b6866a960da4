"""The one implementation of shape inference: the verifier holds instructions to it, the builder asks it."""

from __future__ import annotations

from flagos_backend.ir.attributes import ATTRIBUTES_OF
from flagos_backend.ir.hlo import Computation
from flagos_backend.ir.opcode import Opcode
from flagos_backend.ir.rules import contraction, elementwise, movement, structure
from flagos_backend.ir.rules.common import Operation, Rule, RuleBroken, Signature, broken
from flagos_backend.ir.types import Shape

RULES: dict[Opcode, Rule] = {**elementwise.RULES, **movement.RULES, **contraction.RULES, **structure.RULES}

# How many computations an opcode calls. Any number: conditional, custom-call.
_CALLS: dict[Opcode, int | None] = {
    Opcode.ALL_REDUCE: 1,
    Opcode.CALL: 1,
    Opcode.CONDITIONAL: None,
    Opcode.CUSTOM_CALL: None,
    Opcode.MAP: 1,
    Opcode.REDUCE: 1,
    Opcode.REDUCE_SCATTER: 1,
    Opcode.REDUCE_WINDOW: 1,
    Opcode.SCATTER: 1,
    Opcode.SELECT_AND_SCATTER: 2,
    Opcode.SORT: 1,
    Opcode.WHILE: 2,
}


def signature_of(computation: Computation) -> Signature:
    return Signature(tuple(parameter.shape for parameter in computation.parameters), computation.root.shape)


def infer_shape(operation: Operation) -> Shape:
    """The shape that ``operation`` must have. Raises RuleBroken with the rule that it breaks.

    ``operation.declared`` supplies what operands do not determine: the sizes of a reshape, the type of a convert.
    """
    opcode = operation.opcode
    if not isinstance(operation.attributes, ATTRIBUTES_OF[opcode]):
        broken(f"{opcode} carries {ATTRIBUTES_OF[opcode].__name__}, not {type(operation.attributes).__name__}")
    wanted = _CALLS.get(opcode, 0)
    if wanted is not None and len(operation.called) != wanted:
        broken(f"{opcode} calls {wanted} computations, not {len(operation.called)}")
    return RULES[opcode](operation)


__all__ = ["RULES", "Operation", "RuleBroken", "Signature", "infer_shape", "signature_of"]
