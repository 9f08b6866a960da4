"""Elementary functions of floats. Those that loops mostly have are written without branches, by the formulas of
native/cpu/math.inc and math64.inc, so that LLVM makes vectors of them; the others are the C library's."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable

from flagos_backend.codegen.cpu.llvm.code import Function, NotCompilableError, value_type
from flagos_backend.ir.functions import ALL, WRITTEN
from flagos_backend.ir.opcode import Opcode
from flagos_backend.ir.types import ElementType

E = ElementType
Op = Opcode

_OF_LIBM = {function.opcode: function.in_libm for function in ALL if function.in_libm != WRITTEN}
# Adding this rounds a double of magnitude below 2^51 to the nearest integer and leaves that integer in the low bits.
_ROUND_MAGIC = 6755399441055744.0
_LOG2_E = 1.4426950408889634
# ln 2 in two parts; products of the first with whole numbers below 2^20 are exact.
_LN2_HIGH, _LN2_LOW = 6.93147180369123816490e-01, 1.90821492927058770002e-10
_ROOT_HALF_BITS = 0x3FE6A09E667F3BCD  # of sqrt(1/2)
_ONE_BITS = 0x3FF0000000000000


def float_constant(number: float) -> str:
    """A float or double, which a float holds exactly if it is to be one, by its bits as a double."""
    return f"0x{struct.unpack('<Q', struct.pack('<d', number))[0]:016X}"


def call(code: Function, opcode: Opcode, element_type: ElementType, operands: list[str]) -> str:
    """``opcode`` of floats. Raises NotCompilableError where there is no such function."""
    held = value_type(element_type)
    if opcode in _OF_LIBM:
        name = _OF_LIBM[opcode] + ("f" if element_type is E.F32 else "")
        return code.call(held, name, *((held, operand) for operand in operands))
    single, double = FORMULAS.get(opcode, (None, None))
    if single is None or double is None:
        raise NotCompilableError(f"{opcode} of {element_type.name}")
    if element_type is E.F64:
        return double(_Double(code, operands[0])).name
    wide = _Double(code, code.value(f"fpext float {operands[0]} to double"))
    return code.value(f"fptrunc double {single(wide).name} to float")


class _Double:
    """A double of the function that is being written, with Python's operators."""

    def __init__(self, code: Function, name: str) -> None:
        self.code = code
        self.name = name

    def _of(self, other: _Double | float) -> str:
        return other.name if isinstance(other, _Double) else float_constant(other)

    def _new(self, text: str) -> _Double:
        return _Double(self.code, self.code.value(text))

    def __add__(self, other: _Double | float) -> _Double:
        return self._new(f"fadd contract double {self.name}, {self._of(other)}")

    def __sub__(self, other: _Double | float) -> _Double:
        return self._new(f"fsub contract double {self.name}, {self._of(other)}")

    def __mul__(self, other: _Double | float) -> _Double:
        return self._new(f"fmul contract double {self.name}, {self._of(other)}")

    def __truediv__(self, other: _Double | float) -> _Double:
        return self._new(f"fdiv double {self.name}, {self._of(other)}")

    def __neg__(self) -> _Double:
        return self._new(f"fneg double {self.name}")

    def exact_add(self, other: _Double | float) -> _Double:
        """A sum that is not joined with a product."""
        return self._new(f"fadd double {self.name}, {self._of(other)}")

    def exact_subtract(self, other: _Double | float) -> _Double:
        return self._new(f"fsub double {self.name}, {self._of(other)}")

    def where(self, order: str, other: _Double | float, then: _Double | float) -> _Double:
        """``then`` where this compares so with ``other``, else this."""
        holds = self.code.value(f"fcmp {order} double {self.name}, {self._of(other)}")
        return self._new(f"select i1 {holds}, double {self._of(then)}, double {self.name}")

    def chosen(self, subject: _Double, order: str, other: _Double | float, then: _Double | float) -> _Double:
        """``then`` where ``subject`` compares so with ``other``, else this."""
        holds = self.code.value(f"fcmp {order} double {subject.name}, {self._of(other)}")
        return self._new(f"select i1 {holds}, double {self._of(then)}, double {self.name}")

    def bounded(self, low: float, high: float) -> _Double:
        """Between two numbers; a NaN stays."""
        return self.where("olt", low, low).where("ogt", high, high)

    def bits(self) -> str:
        return self.code.value(f"bitcast double {self.name} to i64")

    def from_bits(self, bits: str) -> _Double:
        return self._new(f"bitcast i64 {bits} to double")

    def rounded(self) -> _Double:
        return self.exact_add(_ROUND_MAGIC).exact_subtract(_ROUND_MAGIC)

    def reciprocal(self) -> _Double:
        return self._new(f"fdiv double 1.0, {self.name}")

    def power_of_two(self) -> _Double:
        """2 to this whole number, from -1022 to 1023."""
        shifted = self.code.value(f"shl i64 {self.exact_add(_ROUND_MAGIC).bits()}, 52")
        return self.from_bits(self.code.value(f"add i64 {shifted}, {_ONE_BITS}"))

    def polynomial(self, *coefficients: float) -> _Double:
        """Of this, the highest power first."""
        result = self * coefficients[0] + coefficients[1]
        for coefficient in coefficients[2:]:
            result = result * self + coefficient
        return result

    def call(self, name: str, *others: _Double) -> _Double:
        operands = [("double", o.name) for o in (self, *others)]
        return _Double(self.code, self.code.call("double", name, *operands))


# ---- of floats, in double ----


def _exp_parts(x: _Double) -> tuple[_Double, _Double]:
    """exp(x) = scale * (1 + tail) for |x| <= 700."""
    n = (x * _LOG2_E).rounded()
    r = x - n * 0.69314718055994531
    p = r.polynomial(
        *(2.4859589834589034e-5, 1.9899285575896282e-4, 1.3888854035666710e-3, 8.3332984698005895e-3),
        *(4.1666666719012259e-2, 1.6666666719028935e-1, 0.5),
    )
    return n.power_of_two(), p * (r * r) + r


def _exp32(x: _Double) -> _Double:
    scale, tail = _exp_parts(x.bounded(-110.0, 90.0))
    return scale + scale * tail


def _expm1_32(x: _Double) -> _Double:
    scale, tail = _exp_parts(x.bounded(-110.0, 90.0))
    return (scale.exact_subtract(1.0) + scale * tail).chosen(x, "oeq", 0.0, x)


def _logistic32(x: _Double) -> _Double:
    scale, tail = _exp_parts((-x).bounded(-110.0, 110.0))
    return (scale + scale * tail).exact_add(1.0).reciprocal()


def _tanh32(x: _Double) -> _Double:
    scale, tail = _exp_parts((x * 2.0).bounded(-44.0, 44.0))
    e = scale.exact_subtract(1.0) + scale * tail
    return (e / e.exact_add(2.0)).chosen(x, "oeq", 0.0, x)


def _log_of(x: _Double) -> _Double:
    """Of a positive, finite, normal double, well enough for a float."""
    code = x.code
    bits = x.bits()
    n = code.value(f"ashr i64 {code.value(f'sub i64 {bits}, {_ROOT_HALF_BITS}')}, 52")
    m = x.from_bits(code.value(f"sub i64 {bits}, {code.value(f'shl i64 {n}, 52')}"))
    s = m.exact_subtract(1.0) / m.exact_add(1.0)
    z = s * s
    p = z.polynomial(
        *(0.19362777249624352, 0.22191394465845578, 0.28571754636335620, 0.39999998796843751, 0.66666666667375460)
    )
    log_m = s * 2.0 + s * z * p
    whole = x.from_bits(code.value(f"add i64 {n}, {0x4338000000000000}")).exact_subtract(_ROUND_MAGIC)
    return whole * 0.6931471805599453 + log_m


def _special(y: _Double, x: _Double, zero: float = 0.0) -> _Double:
    """What every logarithm is where ``x`` is no positive finite number; ``zero``: where it is -inf."""
    y = y.chosen(x, "oeq", math.inf, x)
    y = y.chosen(x, "oeq", zero, -math.inf)
    y = y.chosen(x, "olt", zero, math.nan)
    return y.chosen(x, "uno", x, x)


def _log32(x: _Double) -> _Double:
    return _special(_log_of(x.chosen(x, "ule", 0.0, 1.0)), x)


def _log1p_32(x: _Double) -> _Double:
    wide = x.exact_add(1.0)
    y = _log_of(wide.where("ule", 0.0, 1.0))
    size = x.call("llvm.fabs.f64")
    y = y.chosen(size, "olt", 1e-7, x - (x * 0.5) * x)
    return _special(y, x, -1.0).chosen(x, "oeq", 0.0, x)


def _rsqrt32(x: _Double) -> _Double:
    return x.call("llvm.sqrt.f64").reciprocal()


# ---- of doubles ----


def _exponential(x: _Double) -> tuple[_Double, _Double]:
    """exp(x) = 2^n (1 + tail) for |x| <= 746."""
    n = (x * _LOG2_E).rounded()
    high, low = x - n * _LN2_HIGH, n * _LN2_LOW
    r = high.exact_subtract(low)
    rest = high.exact_subtract(r).exact_subtract(low)
    p = r.polynomial(*(1 / math.factorial(k) for k in range(13, 1, -1)))
    return n, r + (rest + (r * r) * p)


def _exp64(x: _Double) -> _Double:
    # Results that are zero are not computed through subnormal numbers, which take a hundred times as long.
    n, tail = _exponential(x.where("olt", -745.2, -1.0).where("ogt", 710.0, 710.0))
    half = (n * 0.5).rounded()
    scale = half.power_of_two()
    y = (scale + scale * tail) * n.exact_subtract(half).power_of_two()
    return y.chosen(x, "olt", -745.2, 0.0)


def _expm1_64(x: _Double) -> _Double:
    n, tail = _exponential(x.bounded(-40.0, 710.0))
    half = n.exact_subtract(1.0).power_of_two()  # 2^1024 is no double
    return ((half.exact_subtract(0.5) + half * tail) * 2.0).chosen(x, "oeq", 0.0, x)


def _logistic64(x: _Double) -> _Double:
    return _exp64(-x).exact_add(1.0).reciprocal()


def _tanh64(x: _Double) -> _Double:
    size = x.call("llvm.fabs.f64")
    e = _expm1_64(size.where("ogt", 22.0, 22.0) * 2.0)
    return (e / e.exact_add(2.0)).call("llvm.copysign.f64", x)


def _log_of_rest(f: _Double) -> _Double:
    """log(1 + f) - f for sqrt(1/2) <= 1 + f < sqrt(2)."""
    s = f / f.exact_add(2.0)
    z, half_square = s * s, (f * 0.5) * f
    p = z.polynomial(
        *(1.479819860511658591e-01, 1.531383769920937332e-01, 1.818357216161805012e-01, 2.222219843214978396e-01),
        *(2.857142874366239149e-01, 3.999999999940941908e-01, 6.666666666666735130e-01),
    )
    return s * (half_square + z * p) - half_square


def _split(x: _Double) -> tuple[_Double, _Double]:
    """x = 2^n (1 + f) with sqrt(1/2) <= 1 + f < sqrt(2), of positive finite x, subnormal ones included."""
    code = x.code
    small = 2.2250738585072014e-308
    bits = x.chosen(x, "olt", small, x * 2.0**54).bits()
    above = code.value(f"lshr i64 {code.value(f'add i64 {bits}, {(1023 << 52) - _ROOT_HALF_BITS}')}, 52")
    n = x.from_bits(code.value(f"add i64 {above}, {0x4330000000000000}")).exact_subtract(2.0**52 + 1023.0)
    exponent = code.value(f"shl i64 {code.value(f'sub i64 {above}, 1023')}, 52")
    m = x.from_bits(code.value(f"sub i64 {bits}, {exponent}"))
    return n.chosen(x, "olt", small, n.exact_subtract(54.0)), m.exact_subtract(1.0)


def _log64(x: _Double) -> _Double:
    n, f = _split(x.chosen(x, "ule", 0.0, 1.0))
    return _special(n * _LN2_HIGH + (f + (_log_of_rest(f) + n * _LN2_LOW)), x)


def _log1p_64(x: _Double) -> _Double:
    """By log(u) for u = 1 + x rounded, and what that rounding took."""
    u = x.exact_add(1.0)
    lost = u.exact_subtract(x)
    taken = (-lost).exact_add(1.0).chosen(x, "olt", 1.0, x.exact_subtract(u.exact_subtract(1.0)))
    n, f = _split(u.where("ule", 0.0, 1.0))
    y = n * _LN2_HIGH + (f + (_log_of_rest(f) + (n * _LN2_LOW + taken / u)))
    return _special(y, x.exact_add(1.0)).chosen(x, "oeq", 0.0, x)


def _rsqrt64(x: _Double) -> _Double:
    """Rounded twice; one step of Newton's method on the exact remainder 1 - x y^2 takes that back."""
    y = x.call("llvm.sqrt.f64").reciprocal()
    product = x * y
    one = _Double(x.code, float_constant(1.0))
    remainder = (-product).call("llvm.fma.f64", y, one) - x.call("llvm.fma.f64", y, -product) * y
    better = y + (y * 0.5) * remainder
    return better.chosen(better.call("llvm.fabs.f64"), "ueq", math.inf, y)


_Written = Callable[[_Double], _Double]
FORMULAS: dict[Opcode, tuple[_Written, _Written]] = {
    Op.EXP: (_exp32, _exp64),
    Op.EXPM1: (_expm1_32, _expm1_64),
    Op.LOG: (_log32, _log64),
    Op.LOG1P: (_log1p_32, _log1p_64),
    Op.LOGISTIC: (_logistic32, _logistic64),
    Op.TANH: (_tanh32, _tanh64),
    Op.RSQRT: (_rsqrt32, _rsqrt64),
}
