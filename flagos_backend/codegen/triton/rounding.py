"""Values of float32 whose last bits are rounded away, so that fewer instructions may compute them. For exponentials.py
and divisions.py."""

from __future__ import annotations

from flagos_backend.codegen.triton.elements import HALF
from flagos_backend.codegen.triton.running import as_running
from flagos_backend.fusion.region import Apply, Expression, Fold, Literal, Region
from flagos_backend.ir.opcode import Opcode
from flagos_backend.ir.types import ElementType

# Whose error, as a part of itself, is that of these operands.
_FACTORS = {
    Opcode.DIVIDE: (0,),
    Opcode.MULTIPLY: (0, 1),
    Opcode.NEGATE: (0,),
    Opcode.SELECT: (1, 2),
}


def rounded_away(region: Region) -> set[Expression]:
    """Those that may be off by a few units in the last place of float32, if they are from 0 to 1: what comes of them is
    rounded to 16 bits, or is a sum of exponentials to which the largest adds 1."""
    seen: set[Expression] = {store.value for store in region.stores if store.value.element_type not in HALF}
    seen |= {start for store in region.stores for start in store.index.starts}
    expressions = region.expressions()
    for user in reversed(expressions):
        for number, operand in enumerate(user.operands):
            if operand.element_type not in HALF and not _hides(user, number, user in seen):
                seen.add(operand)
    return set(expressions) - seen


def _hides(user: Expression, number: int, is_seen: bool) -> bool:
    """Whether the last bits of its operand of this ``number`` are not in ``user``, or nobody sees them there."""
    if isinstance(user, Fold):
        return number == 0 and as_running(user) is not None
    if not isinstance(user, Apply):
        return False
    if user.opcode is Opcode.CONVERT:
        return user.element_type in HALF
    if number in _FACTORS.get(user.opcode, ()):
        return not is_seen
    is_moved = user.opcode in (Opcode.ADD, Opcode.SUBTRACT) and _is_constant(user.operands[1 - number])
    return is_moved and not is_seen


def _is_constant(expression: Expression) -> bool:
    """Whether no number that is computed goes into it, but conditions may."""
    if not isinstance(expression, Apply):
        return isinstance(expression, Literal)
    if expression.opcode is Opcode.CONVERT:
        return expression.operands[0].element_type is ElementType.PRED
    numbers = _FACTORS.get(expression.opcode)
    return numbers is not None and all(_is_constant(expression.operands[number]) for number in numbers)
