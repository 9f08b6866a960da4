# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Device code of QR factorisations by Householder reflectors, as LAPACK's geqrf and orgqr leave them. A program holds a
whole matrix in registers."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def factor(matrix, packed, taus, ROWS, COLUMNS, STEPS, M: tl.constexpr, N: tl.constexpr):
    """matrix [programs, ROWS, COLUMNS] -> packed, alike: R, and below it the reflectors without their leading ones;
    taus [programs, STEPS]."""
    number = tl.program_id(0).to(tl.int64)
    rows, columns = tl.arange(0, M), tl.arange(0, N)
    places = number * ROWS * COLUMNS + rows[:, None] * COLUMNS + columns[None, :]
    inside = (rows < ROWS)[:, None] & (columns < COLUMNS)[None, :]
    a = tl.load(matrix + places, mask=inside, other=0.0)
    for step in range(STEPS):
        here, below = columns == step, rows > step
        column = tl.sum(tl.where(here[None, :], a, 0.0), 1)
        tail = tl.where(below, column, 0.0)
        head = tl.sum(tl.where(rows == step, column, 0.0), 0)
        # Squares of what is divided by the largest neither overflow nor vanish; NaN are in the sum.
        largest = tl.maximum(tl.max(tl.abs(tail), 0), tl.abs(head))
        unit = tl.where(largest > 0.0, largest, 1.0)
        squares = tl.sum((tail / unit) * (tail / unit), 0)
        norm = unit * tl.sqrt(squares + (head / unit) * (head / unit))
        beta = tl.where(head < 0.0, norm, -norm)
        # With nothing below, the reflector is the identity.
        tau = tl.where(squares == 0.0, 0.0, (beta - head) / beta)
        beta = tl.where(squares == 0.0, head, beta)
        reflector = tail / tl.where(squares == 0.0, 1.0, head - beta)
        whole = tl.where(rows == step, 1.0, reflector)
        along = tl.sum(whole[:, None] * a, 0) * tau
        a = tl.where((columns > step)[None, :], a - whole[:, None] * along[None, :], a)
        left = tl.where(rows == step, beta, reflector)
        a = tl.where(here[None, :] & (rows >= step)[:, None], left[:, None], a)
        tl.store(taus + number * STEPS + step, tau)
    tl.store(packed + places, a, mask=inside)


@triton.jit
def multiply(packed, taus, product, ROWS, COLUMNS, STEPS, M: tl.constexpr, N: tl.constexpr):
    """packed [programs, ROWS, COLUMNS], taus [programs, STEPS] -> the first COLUMNS columns of the product of all
    reflectors, the last one first."""
    number = tl.program_id(0).to(tl.int64)
    rows, columns = tl.arange(0, M), tl.arange(0, N)
    q = tl.where(rows[:, None] == columns[None, :], 1.0, 0.0).to(product.dtype.element_ty)
    start = number * ROWS * COLUMNS
    for back in range(STEPS):
        step = STEPS - 1 - back
        reflector = tl.load(packed + start + rows * COLUMNS + step, mask=(rows > step) & (rows < ROWS), other=0.0)
        whole = tl.where(rows == step, 1.0, reflector)
        along = tl.sum(whole[:, None] * q, 0) * tl.load(taus + number * STEPS + step)
        q -= whole[:, None] * along[None, :]
    inside = (rows < ROWS)[:, None] & (columns < COLUMNS)[None, :]
    tl.store(product + start + rows[:, None] * COLUMNS + columns[None, :], q, mask=inside)
