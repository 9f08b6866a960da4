"""Functions of complex numbers, accurate and with the special values of C99's Annex G, which XLA reaches up to numbers
that are infinite in one part and NaN in the other. The elementwise kernels take their tables."""

from __future__ import annotations

import math
from collections.abc import Callable

from flagos_backend.ir.opcode import Opcode
from flagos_backend.kernels.reference.integers import Binary, Unary
from flagos_backend.process.torch_loading import torch

O = Opcode  # noqa: E741


def _partwise(function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Binary:
    # torch's complex addition multiplies by its alpha, which makes NaN of an infinite part.
    def compute(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.view_as_complex(function(torch.view_as_real(a), torch.view_as_real(b)))

    return compute


def _negate(z: torch.Tensor) -> torch.Tensor:
    # torch subtracts complex numbers from 0, which leaves a part of +0 as it is: the other side of a branch cut.
    return torch.view_as_complex(torch.neg(torch.view_as_real(z)))


def _sign(z: torch.Tensor) -> torch.Tensor:
    """Of a zero the zero itself, with its signs."""
    return torch.where(z == 0, z, torch.sgn(z))


def _divide(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """C99 G.5.1: where plain division gives NaN in both parts, a quotient of infinities or by zero is recovered."""
    quotient = torch.div(a, b)
    x, y = quotient.real, quotient.imag
    ar, ai, br, bi = a.real, a.imag, b.real, b.imag
    by_zero = (br == 0) & (bi == 0)
    lost = x.isnan() & y.isnan()
    if not (by_zero | lost).any():
        return quotient
    infinite_a, infinite_b = _infinite(a), _infinite(b)
    finite_a, finite_b = ar.isfinite() & ai.isfinite(), br.isfinite() & bi.isfinite()

    huge = torch.copysign(torch.full_like(br, math.inf), br)
    x, y = torch.where(by_zero, huge * ar, x), torch.where(by_zero, huge * ai, y)

    overflow = lost & ~by_zero & infinite_a & finite_b
    ur, ui = _unit_box(ar), _unit_box(ai)
    x = torch.where(overflow, math.inf * (ur * br + ui * bi), x)
    y = torch.where(overflow, math.inf * (ui * br - ur * bi), y)

    vanish = lost & infinite_b & finite_a
    ur, ui = _unit_box(br), _unit_box(bi)
    x = torch.where(vanish, 0.0 * (ar * ur + ai * ui), x)
    y = torch.where(vanish, 0.0 * (ai * ur - ar * ui), y)
    return torch.complex(x, y)


def _unit_box(part: torch.Tensor) -> torch.Tensor:
    """1 for infinity and 0 for the rest, with the part's sign."""
    return torch.copysign(part.isinf().to(part.dtype), part)


def _expm1(z: torch.Tensor) -> torch.Tensor:
    """The real part is expm1(x) cos y - 2 sin²(y/2), which does not cancel near 0."""
    x, y = z.real, z.imag
    growth = torch.expm1(x)
    half = torch.sin(y / 2)
    real = torch.where(y == 0, growth, growth * torch.cos(y) - 2 * half * half)
    imaginary = torch.where(y == 0, y, torch.exp(x) * torch.sin(y))
    return torch.complex(real, imaginary)


def _log1p(z: torch.Tensor) -> torch.Tensor:
    return torch.where(_infinite(z), torch.log(z), torch.log1p(z))


def _tan(z: torch.Tensor) -> torch.Tensor:
    """C99 keeps an imaginary part of 0 beside a real part without a tangent; XLA and JAX's own tests do not."""
    return torch.where(~z.real.isfinite() & (z.imag == 0), complex(math.nan, math.nan), torch.tan(z))


def _rsqrt(z: torch.Tensor) -> torch.Tensor:
    """In the right half plane, on the other side of the real axis than z: torch's quotient drops the signs of zeros."""
    root = torch.where(_infinite(z), 0, torch.rsqrt(z))
    return torch.complex(root.real.abs(), torch.copysign(root.imag, -z.imag))


def _infinite(z: torch.Tensor) -> torch.Tensor:
    return z.real.isinf() | z.imag.isinf()


def _logistic(z: torch.Tensor) -> torch.Tensor:
    return _divide(torch.ones_like(z), 1 + torch.exp(-z))


def _power(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    # A large exponent multiplies the logarithm's error, so single precision goes through double.
    return torch.pow(a.to(torch.complex128), b.to(torch.complex128)).to(a.dtype)


def _atan2(y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """-i log((x + iy) / sqrt(x² + y²)), as XLA defines it: the real function where both are real.

    Both sums cancel, so single precision goes through double.
    """
    wide_y, wide_x = y.to(torch.complex128), x.to(torch.complex128)
    rotated = torch.complex(wide_x.real - wide_y.imag, wide_x.imag + wide_y.real)
    logarithm = torch.log(_divide(rotated, torch.sqrt(wide_x * wide_x + wide_y * wide_y)))
    return torch.complex(logarithm.imag, -logarithm.real).to(y.dtype)


def clamp(low: torch.Tensor, x: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    """As XLA's CPU does: real parts alone decide, a lower bound wins over its equal, NaN bounds nothing below."""
    raised = torch.where(low.real >= x.real, low, x)
    return torch.where(raised.real <= high.real, raised, high)


UNARY: dict[Opcode, Unary] = {
    O.ABS: torch.abs,
    O.ACOS: torch.acos,
    O.ACOSH: torch.acosh,
    O.ASIN: torch.asin,
    O.ASINH: torch.asinh,
    O.ATANH: torch.atanh,
    O.COS: torch.cos,
    O.COSH: torch.cosh,
    O.EXP: torch.exp,
    O.EXPM1: _expm1,
    O.IMAG: lambda z: z.imag.clone(),
    O.LOG: torch.log,
    O.LOG1P: _log1p,
    O.LOGISTIC: _logistic,
    O.NEGATE: _negate,
    O.REAL: lambda z: z.real.clone(),
    O.RSQRT: _rsqrt,
    O.SIGN: _sign,
    O.SIN: torch.sin,
    O.SINH: torch.sinh,
    O.SQRT: torch.sqrt,
    O.TAN: _tan,
    O.TANH: torch.tanh,
}
BINARY: dict[Opcode, Binary] = {
    O.ADD: _partwise(torch.add),
    O.ATAN2: _atan2,
    O.DIVIDE: _divide,
    O.MULTIPLY: torch.mul,
    O.POWER: _power,
    O.SUBTRACT: _partwise(torch.sub),
}
