"""The numbers of native programs: what emitters write and native/cpu parses. C++ has them from here
(tools/native_tables.py), so nothing is imported that needs more than the standard library."""

from __future__ import annotations

import enum
import functools
import zlib
from typing import Final, NamedTuple

from flagos_backend.ir.functions import FUNCTIONS, FUNCTIONS_OF_TWO
from flagos_backend.ir.opcode import Comparison, Opcode
from flagos_backend.ir.types import ElementType
from flagos_backend.loop_ir.intrinsics import SUBTRACTED, Intrinsic


class ItemKind(enum.IntEnum):
    """What a program is made of."""

    LOOP = 1
    PRODUCT = 2
    CALL = 3
    SLICE = 4
    UPDATE = 5
    WHILE = 6
    CONDITIONAL = 7
    ROW_LOOP = 8
    TOP_K = 9
    COMPLEX = 10
    GATHER = 11
    SCATTER = 12
    ARG_MIN_MAX = 13
    LINEAR_ALGEBRA = 14
    MACHINE_CODE = 15
    FOURIER = 16
    SORT = 17


class StepKind(enum.IntEnum):
    """What a step of a loop's iteration is."""

    APPLY = 0
    CONVERT = 1
    BITCAST = 2
    PAIR = 3
    PART = 4
    TAKE = 5


class LinearAlgebraKind(enum.IntEnum):
    CHOLESKY = 0
    LU = 1
    TRIANGULAR_SOLVE = 2
    QR = 3
    REFLECTORS = 4
    # From here on LAPACK's.
    EIGH = 5
    SVD = 6
    EIG = 7
    SCHUR = 8
    HESSENBERG = 9
    TRIDIAGONAL = 10
    PIVOTED_QR = 11
    APPLY_REFLECTORS = 12


class LapackRoutine(enum.IntEnum):
    """Of real matrices, by the names that LAPACK has for general and symmetric ones."""

    SYEVD = 0
    GESDD = 1
    GEEV = 2
    GEES = 3
    GEHRD = 4
    SYTRD = 5
    GEQP3 = 6
    ORMQR = 7


class Split(enum.IntEnum):
    """What the workers of a scatter divide among themselves."""

    NONE = 0
    BATCH = 1
    WINDOW = 2
    RUN = 3


_E = ElementType
#: The types that tiles compute in.
ARITHMETIC: Final = (
    *(_E.PRED, _E.S8, _E.S16, _E.S32, _E.S64, _E.U8, _E.U16, _E.U32, _E.U64),
    *(_E.F16, _E.BF16, _E.F32, _E.F64),
)
#: How reductions combine, in the order of their numbers.
COMBINES: Final = (
    *(Opcode.ADD, Opcode.MULTIPLY, Opcode.MAXIMUM, Opcode.MINIMUM),
    *(Opcode.AND, Opcode.OR, Opcode.XOR),
)
#: Between complex numbers and real ones: their parts, absolute values, and numbers of two parts.
PARTS: Final = (Opcode.REAL, Opcode.IMAG, Opcode.ABS, Opcode.COMPLEX)
#: Of complex numbers of doubles, which tiles do not hold.
COMPLEX_OPERATIONS: Final = (Opcode.MULTIPLY, Opcode.DIVIDE)
COMPARISONS: Final = (Comparison.EQ, Comparison.NE, Comparison.GE, Comparison.GT, Comparison.LE, Comparison.LT)
# What StepKind.APPLY computes. native/cpu/parse_steps.cc tells operations of one operand, of two, comparisons and those
# of three apart by this order.
_UNARY = (Opcode.ABS, Opcode.NEGATE, Opcode.NOT, Opcode.SIGN, *FUNCTIONS, Opcode.IS_FINITE, Opcode.POPCNT, Opcode.CLZ)
_BINARY = (
    *(Opcode.ADD, Opcode.SUBTRACT, Opcode.MULTIPLY, Opcode.DIVIDE, Opcode.MAXIMUM, Opcode.MINIMUM),
    *FUNCTIONS_OF_TWO,
    *(Opcode.AND, Opcode.OR, Opcode.XOR),
    *(Opcode.SHIFT_LEFT, Opcode.SHIFT_RIGHT_ARITHMETIC, Opcode.SHIFT_RIGHT_LOGICAL),
)


@functools.cache
def cpp_name(name: str) -> str:
    """A Python constant's name as C++ has it: ROUND_EVEN is RoundEven."""
    return "".join(word.capitalize() for word in name.split("_"))


#: Their names, in the order of their numbers.
OPERATIONS: Final = (
    *(cpp_name(opcode.name) for opcode in (*_UNARY, *_BINARY)),
    *(cpp_name(direction) for direction in COMPARISONS),
    *(cpp_name(direction) + "Total" for direction in COMPARISONS),
    *("Select", "Clamp", "Log2", "RotateLeft", "FloorDivide", "FloorRemainder"),
)


class Pair(NamedTuple):
    """Two operations of which only ``second`` reads ``first``: one step with the operands of ``first`` and the other of
    ``second``, which comes first where ``is_subtracted``."""

    first: Opcode | Intrinsic
    second: Opcode
    is_subtracted: bool = False

    @property
    def detail(self) -> str:
        """What the joined operation's ``Apply.detail`` is; its opcode is that of ``second``."""
        return f"{self.first}{SUBTRACTED if self.is_subtracted else ''}"

    @property
    def cpp_names(self) -> tuple[str, str]:
        """The structures of native/cpu that compute the two."""
        first = "RotateLeft" if self.first is Intrinsic.ROTATE else cpp_name(self.first.name)
        return first, cpp_name(self.second.name) + ("From" if self.is_subtracted else "")


#: What StepKind.PAIR computes of F32 and F64, in the order of the numbers.
FLOAT_PAIRS: Final = tuple(
    Pair(first, second, is_subtracted)
    for first in (Opcode.ADD, Opcode.SUBTRACT, Opcode.MULTIPLY)
    for second, is_subtracted in (
        *((Opcode.ADD, False), (Opcode.SUBTRACT, False)),
        *((Opcode.SUBTRACT, True), (Opcode.MULTIPLY, False)),
    )
)
#: What it computes of U32 and U64.
INTEGER_PAIRS: Final = tuple(
    Pair(first, second)
    for first in (
        *(Opcode.ADD, Opcode.AND, Opcode.OR, Opcode.XOR),
        *(Opcode.SHIFT_LEFT, Opcode.SHIFT_RIGHT_LOGICAL, Intrinsic.ROTATE),
    )
    for second in (Opcode.ADD, Opcode.AND, Opcode.OR, Opcode.XOR)
)
_NUMBERS: Final = {name: number for number, name in enumerate(OPERATIONS)}


def operation_number(name: str) -> int:
    """Of one of OPERATIONS."""
    return _NUMBERS[name]


_MEMBERS = (
    *ARITHMETIC,
    *COMBINES,
    *PARTS,
    *COMPLEX_OPERATIONS,
    *ItemKind,
    *StepKind,
    *LinearAlgebraKind,
    *LapackRoutine,
    *Split,
)
_PAIRS = ("-".join(pair.cpp_names) for pair in (*FLOAT_PAIRS, *INTEGER_PAIRS))
_TABLES = ",".join((*OPERATIONS, *_PAIRS, *(f"{member.name}={member.value}" for member in _MEMBERS)))
#: The first word of a program: "FOSL", and a checksum of the tables above. A library built from others refuses it.
MAGIC: Final = 0x4C534F46 | (zlib.crc32(_TABLES.encode()) & 0x7FFFFFFF) << 32
