"""What is added to Triton's interpreter, on every version of Triton: Python's exact fractions are the oracle."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle, interpreter_builder

from flagos_backend.kernels.triton import interpreter_gaps
from flagos_backend.kernels.triton.launching import launch


@triton.jit
def add_rows(to, rows, count):
    total = tl.zeros([16], tl.float32)
    for row in range(tl.load(count)):
        total += tl.load(rows + row * 16 + tl.arange(0, 16))
    tl.store(to + tl.arange(0, 16), total)


def test_a_bound_of_a_loop_is_an_element() -> None:
    rows, total = torch.arange(64.0).view(4, 16), torch.zeros(16)
    launch(add_rows, (1,), total, rows, torch.tensor([3]))
    assert torch.equal(total, rows[:3].sum(0))


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "uint32", "uint64", "int8", "int64"])
def test_all_ones(dtype: str) -> None:
    all_ones = interpreter_gaps.with_unsigned(InterpreterBuilder.get_all_ones_value)
    found = all_ones(interpreter_builder, getattr(tl, dtype)).data
    assert found.dtype == dtype
    assert not (~found).any()


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_fma_rounds_once(dtype: str, rng: np.random.Generator) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a type that the C library has")

    x, y = (rng.standard_normal(100).astype(dtype) for _ in range(2))
    z = -(x * y)
    handles = [TensorHandle(array, getattr(tl, dtype)) for array in (x, y, z)]
    found = interpreter_gaps.with_one_rounding(refuse)(interpreter_builder, *handles).data
    assert found.dtype == dtype
    exact = [Fraction(float(a)) * Fraction(float(b)) + Fraction(float(c)) for a, b, c in zip(x, y, z, strict=True)]
    assert [float(value) for value in found] == [float(value) for value in exact]
