"""What a loop nest's Apply means beyond its opcode: the values of ``Apply.detail``, but for comparisons' directions.

Transforms of loop nests make them, emitters write them, and the verifier holds expressions to the table below.
"""

from __future__ import annotations

from enum import StrEnum
from itertools import product

from flagos_backend.ir.opcode import Opcode


class Intrinsic(StrEnum):
    """A form of an operation that only emitters know."""

    BASE_TWO = "2"  # log: to base 2
    FLOOR = "floor"  # divide, remainder: rounded down; the divisor is a literal, and not 0
    ROTATE = "rotate"  # shift-left: what is pushed out comes back
    ALONE = "alone"  # add, subtract: not to be packed with another by the vendor's compiler
    BELOW = "below"  # exp: of 0, less, or NaN
    TERM = "term"  # exp: off by more the further below 0 its operand is, as what it adds to a sum gets less
    NEAR = "near"  # sqrt: the chip's approximation; log: to base 2 of 1 - x * x, approximated
    SCALE = "scale"  # divide, of the divisor alone: by what it and the dividend are multiplied first
    CORRECTED = "corrected"  # divide: dividend, divisor of no sign, its reciprocal
    BY_SUM = "by sum"  # divide: as CORRECTED, of a dividend from 0 to 1 and a divisor from 1 on; either may be NaN
    STRAIGHT = "straight"  # divide: through wider floats instead of branches


#: Added to the detail of a joined SUBTRACT whose second operand is the first operation; it comes last all the same.
SUBTRACTED = " subtracted"

_SECONDS = (Opcode.ADD, Opcode.SUBTRACT, Opcode.MULTIPLY, Opcode.AND, Opcode.OR, Opcode.XOR)
_FIRSTS = (*_SECONDS, Opcode.SHIFT_LEFT, Opcode.SHIFT_RIGHT_LOGICAL, Intrinsic.ROTATE)
_O, _I = Opcode, Intrinsic
#: How many operands each form has. Two operations as one are named after the first, and end with the second's other
#: operand.
OPERANDS: dict[tuple[Opcode, str], int] = {
    (_O.LOG, _I.BASE_TWO): 1,
    (_O.DIVIDE, _I.FLOOR): 2,
    (_O.REMAINDER, _I.FLOOR): 2,
    (_O.SHIFT_LEFT, _I.ROTATE): 2,
    (_O.ADD, _I.ALONE): 2,
    (_O.SUBTRACT, _I.ALONE): 2,
    (_O.EXP, _I.BELOW): 1,
    (_O.EXP, _I.TERM): 1,
    (_O.SQRT, _I.NEAR): 1,
    (_O.LOG, _I.NEAR): 1,
    (_O.DIVIDE, _I.SCALE): 1,
    (_O.DIVIDE, _I.CORRECTED): 3,
    (_O.DIVIDE, _I.BY_SUM): 3,
    (_O.DIVIDE, _I.STRAIGHT): 2,
    **{
        (second, f"{first}{order}"): 3
        for second, first, order in product(_SECONDS, _FIRSTS, ("", SUBTRACTED))
        if not order or second is _O.SUBTRACT
    },
}
