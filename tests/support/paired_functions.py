"""Functions of two operands that machine code has for every type."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from flagos_backend.ir.opcode import Opcode

FUNCTIONS: dict[Opcode, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    Opcode.ADD: np.add,
    Opcode.SUBTRACT: np.subtract,
    Opcode.MULTIPLY: np.multiply,
    Opcode.AND: np.bitwise_and,
    Opcode.OR: np.bitwise_or,
    Opcode.XOR: np.bitwise_xor,
    Opcode.SHIFT_LEFT: lambda x, y: np.where(y < x.itemsize * 8, x << np.minimum(y, x.itemsize * 8 - 1), 0),
    Opcode.SHIFT_RIGHT_LOGICAL: lambda x, y: np.where(y < x.itemsize * 8, x >> np.minimum(y, x.itemsize * 8 - 1), 0),
}
BITS = (Opcode.ADD, Opcode.AND, Opcode.OR, Opcode.XOR)
SHIFTS = (Opcode.SHIFT_LEFT, Opcode.SHIFT_RIGHT_LOGICAL)
