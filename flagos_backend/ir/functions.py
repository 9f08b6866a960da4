"""The elementwise functions of one and of two floats, a row each: what all stages and both targets know of them.

Read by shape rules, costs, the reference, the rules of torch.compile and the emitters. C++ has its list from here, too:
tools/native_tables.py writes it when the library is built, with nothing but the standard library.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Final

from flagos_backend.ir.opcode import Opcode

#: In the place of a name: code of its own, in the file that the field's description names.
WRITTEN: Final = ""


@dataclass(frozen=True, slots=True)
class Function:
    """``name`` is what PyTorch, the C library and device libraries call it, where no field says otherwise.

    16-bit floats are computed in float32, and rounded once.
    """

    opcode: Opcode
    name: str
    torch: str | None = None
    """The reference: a function of torch. WRITTEN: kernels/reference/elementwise.py."""
    aten: str | None = None
    """PyTorch's operator. WRITTEN: it has none, or one with a rule of its own."""
    libm: str | None = None
    """What machine code calls. WRITTEN: codegen/cpu/llvm; loops of what that lacks are not compiled."""
    host: tuple[str, str] | None = None
    """C++ of a float and of a double ``x``, for tiles; of two, ``x`` and ``y``. A pair of WRITTEN: a structure in
    native/cpu/kernels.inc."""
    accelerator: str | None = None
    """Triton for chips with a device library: a function, or a text with {x}."""
    plain: str | None = None
    """The same for chips without one, by default of codegen/triton/formulas.py."""
    is_cheap: bool = False
    """Whether it takes about as long as a sum."""
    lines: int = 40
    """Lines of PTX for each element of a lane, as compilers write all of it out for each: counted for an H200, of
    float32. Trigonometric functions hold the reduction of large arguments."""
    of_complex: bool = True
    """Whether complex numbers have it."""
    of_integers: bool = False
    """Whether integers have it: kernels/reference/integers.py, codegen/triton/scalars.py."""
    in_hlo: bool = True
    """Whether it is an instruction of HLO. Programs call any other: see FUNCTION_OF_TARGET."""
    operands: int = 1

    @property
    def in_torch(self) -> str:
        return self.name if self.torch is None else self.torch

    @property
    def in_aten(self) -> str:
        return self.name if self.aten is None else self.aten

    @property
    def in_libm(self) -> str:
        return self.name if self.libm is None else self.libm

    @property
    def on_host(self) -> tuple[str, str]:
        return self.host or (f"std::{self.name}({', '.join('xy'[: self.operands])})",) * 2

    @property
    def on_accelerator(self) -> str:
        return self.accelerator or f"libdevice.{self.name}"

    @property
    def in_plain_triton(self) -> str:
        return self.plain or f"fm.{self.name}"


_O, _F = Opcode, Function
_F2 = functools.partial(Function, operands=2)
#: Their order is part of the format of native programs.
TABLE: Final = (
    _F(_O.CEIL, "ceil", libm=WRITTEN, accelerator="tl.ceil", plain="tl.ceil", is_cheap=True, lines=4, of_complex=False),
    _F(
        _O.FLOOR,
        "floor",
        libm=WRITTEN,
        accelerator="tl.floor",
        plain="tl.floor",
        is_cheap=True,
        lines=4,
        of_complex=False,
    ),
    _F(
        _O.ROUND_AFZ,
        "round",
        torch=WRITTEN,
        aten=WRITTEN,
        libm=WRITTEN,
        accelerator="fm.round_away",
        plain="fm.round_away",
        is_cheap=True,
        lines=4,
        of_complex=False,
    ),
    _F(
        _O.ROUND_EVEN,
        "rint",
        torch="round",
        aten="round",
        libm=WRITTEN,
        plain="fm.round_even",
        is_cheap=True,
        lines=4,
        of_complex=False,
    ),
    _F(_O.SQRT, "sqrt", libm=WRITTEN, accelerator="fm.sqrt", lines=4),
    _F(_O.RSQRT, "rsqrt", libm=WRITTEN, host=("Rsqrt32(x)", "Rsqrt64(x)"), lines=4),
    _F(_O.CBRT, "cbrt", torch=WRITTEN, aten=WRITTEN),
    _F(_O.EXP, "exp", libm=WRITTEN, host=("Exp32(x)", "Exp64(x)"), plain="tl.exp", lines=16),
    _F(_O.EXPM1, "expm1", libm=WRITTEN, host=("Expm132(x)", "Expm164(x)")),
    _F(_O.LOG, "log", libm=WRITTEN, host=("Log32(x)", "Log64(x)"), plain="tl.log"),
    _F(_O.LOG1P, "log1p", libm=WRITTEN, host=("Log1p32(x)", "Log1p64(x)")),
    _F(
        _O.LOGISTIC,
        "sigmoid",
        libm=WRITTEN,
        host=("Logistic32(x)", "Logistic64(x)"),
        accelerator="fm.reciprocal(1.0 + libdevice.exp(fm.negate({x})))",
        plain="fm.logistic",
        lines=16,
    ),
    _F(_O.TANH, "tanh", libm=WRITTEN, host=("Tanh32(x)", "Tanh64(x)")),
    _F(_O.SIN, "sin", host=(WRITTEN, WRITTEN), plain="tl.sin", lines=124),
    _F(_O.COS, "cos", host=(WRITTEN, WRITTEN), plain="tl.cos", lines=124),
    _F(_O.TAN, "tan", host=(WRITTEN, WRITTEN), lines=124),
    _F(_O.ASIN, "asin"),
    _F(_O.ACOS, "acos"),
    _F(_O.ASINH, "asinh"),
    _F(_O.ACOSH, "acosh"),
    _F(_O.ATANH, "atanh"),
    _F(_O.SINH, "sinh", torch=WRITTEN),
    _F(_O.COSH, "cosh", torch=WRITTEN),
    _F(_O.ERF, "erf", host=("Erf32(x)", "std::erf(x)"), plain="tl.erf", of_complex=False),
    _F(_O.ERFC, "erfc", host=("Erfc32(x)", "std::erfc(x)"), of_complex=False, in_hlo=False),
)
#: The same for those of two floats.
TABLE_OF_TWO: Final = (
    _F2(
        _O.REMAINDER,
        "fmod",
        torch=WRITTEN,
        aten=WRITTEN,
        libm=WRITTEN,
        host=(WRITTEN, WRITTEN),
        plain="fm.remainder",
        lines=96,
        of_integers=True,
    ),
    _F2(_O.POWER, "pow", aten=WRITTEN, host=(WRITTEN, WRITTEN), plain="fm.power", lines=164, of_integers=True),
    _F2(_O.ATAN2, "atan2", lines=60),
    _F2(_O.COPYSIGN, "copysign", is_cheap=True, lines=4, of_complex=False, in_hlo=False),
)
ALL: Final = (*TABLE, *TABLE_OF_TWO)
FUNCTIONS: Final = tuple(function.opcode for function in TABLE)
FUNCTIONS_OF_TWO: Final = tuple(function.opcode for function in TABLE_OF_TWO)
#: Those that take many times as long as a sum.
EXPENSIVE: Final = frozenset(function.opcode for function in ALL if not function.is_cheap)
#: The custom calls that stand for what HLO lacks.
FUNCTION_OF_TARGET: Final = {f"flagos.{f.opcode}": f.opcode for f in ALL if not f.in_hlo}
TARGET_OF_FUNCTION: Final = {opcode: target for target, opcode in FUNCTION_OF_TARGET.items()}
