"""Values of float32 whose last bits are rounded away, so that fewer instructions may compute them. For exponentials.py
and divisions.py."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from flagos_backend.codegen.triton.elements import HALF
from flagos_backend.codegen.triton.loop_transforms.running import as_running
from flagos_backend.ir.opcode import Opcode
from flagos_backend.ir.types import ElementType
from flagos_backend.loop_ir.region import Apply, Expression, Literal, Reduce, Region

# Whose error, as a part of itself, is that of these operands.
_FACTORS = {
    Opcode.DIVIDE: (0,),
    Opcode.MULTIPLY: (0, 1),
    Opcode.NEGATE: (0,),
    Opcode.SELECT: (1, 2),
}


def rounded_away(region: Region) -> set[Expression]:
    """Those that may be off by up to 2**-17 of themselves, if they are exponentials below a maximum or quotients of
    them by their sum: what comes of them is rounded to 16 bits, or is a sum to which the largest adds 1. Nothing but a
    constant may be added before it is rounded, as what is left of a difference shows more digits: near the constant
    it does then, too. Among them are all 16-bit floats, which are rounded before anybody reads them."""
    expressions = region.expressions()
    constants = _constants(expressions)
    seen: set[Expression] = {store.value for store in region.stores if store.value.element_type not in HALF}
    seen |= {start for store in region.stores for start in store.index.starts}
    for user in reversed(expressions):
        for number, operand in enumerate(user.operands):
            if operand.element_type not in HALF and not _hides(user, number, user in seen, constants):
                seen.add(operand)
    return set(expressions) - seen


def _hides(user: Expression, number: int, is_seen: bool, constants: Collection[Expression]) -> bool:
    """Whether the last bits of its operand of this ``number`` are not in ``user``, or nobody sees them there."""
    if isinstance(user, Reduce):
        return number == 0 and as_running(user) is not None
    if not isinstance(user, Apply):
        return False
    if user.opcode is Opcode.CONVERT:
        return user.element_type in HALF
    if user.opcode in (Opcode.ADD, Opcode.SUBTRACT):
        return not is_seen and user.operands[1 - number] in constants
    return not is_seen and number in _FACTORS.get(user.opcode, ())


def _constants(expressions: Sequence[Expression]) -> set[Expression]:
    """Into which no number goes that is computed, but conditions may; ``expressions``: operands first."""
    found: set[Expression] = set()
    for e in expressions:
        if isinstance(e, Apply) and e.opcode is Opcode.CONVERT:
            is_constant = e.operands[0].element_type is ElementType.PRED
        elif isinstance(e, Apply) and e.opcode in _FACTORS:
            numbers = e.operands[1:] if e.opcode is Opcode.SELECT else e.operands
            is_constant = found.issuperset(numbers)
        else:
            is_constant = isinstance(e, Literal)
        if is_constant:
            found.add(e)
    return found
