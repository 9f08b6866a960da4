"""Functions of complex numbers with XLA's accuracy and special values; the elementwise kernels take their tables."""

from __future__ import annotations

import torch

from flagos_backend.ir.opcode import Opcode
from flagos_backend.kernels.reference.integers import Binary, Unary

O = Opcode  # noqa: E741

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
    O.EXPM1: torch.expm1,
    O.IMAG: lambda z: z.imag.clone(),
    O.LOG: torch.log,
    O.LOG1P: torch.log1p,
    O.LOGISTIC: lambda z: 1 / (1 + torch.exp(-z)),
    O.NEGATE: torch.neg,
    O.REAL: lambda z: z.real.clone(),
    O.RSQRT: torch.rsqrt,
    O.SIGN: torch.sgn,
    O.SIN: torch.sin,
    O.SINH: torch.sinh,
    O.SQRT: torch.sqrt,
    O.TAN: torch.tan,
    O.TANH: torch.tanh,
}
BINARY: dict[Opcode, Binary] = {
    O.ADD: torch.add,
    O.DIVIDE: torch.div,
    O.MULTIPLY: torch.mul,
    O.POWER: torch.pow,
    O.SUBTRACT: torch.sub,
}
