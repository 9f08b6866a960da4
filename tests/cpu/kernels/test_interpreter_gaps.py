"""What is added to Triton's interpreter, on every version of Triton: Python's exact fractions are the oracle."""

from __future__ import annotations

import dataclasses
from fractions import Fraction

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle, _get_np_dtype, interpreter_builder

from flagos_backend.kernels.triton import interpreter_gaps
from flagos_backend.kernels.triton.launching import launch

#: How NumPy names what Triton names in its way; it has no bfloat16.
NUMPY = {"int1": "bool", "int8": "int8", "uint16": "uint16", "int64": "int64"}
NUMPY |= {"fp16": "float16", "fp64": "float64", "fp8e5": "uint8"}


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


@pytest.mark.parametrize("debug", [False, True])
def test_only_checks_that_nothing_reads_are_dropped(debug: bool) -> None:
    builder = InterpreterBuilder()
    builder.options = dataclasses.replace(builder.options, debug=debug)
    interpreter_gaps.drop_unread_checks(builder)
    assert builder.options.sanitize_overflow is debug
    assert builder.options == dataclasses.replace(InterpreterBuilder().options, debug=debug, sanitize_overflow=debug)


@triton.jit
def greatest_sum(to, x):
    tl.store(to, tl.load(x) + tl.load(x))


def test_sums_wrap() -> None:
    """As compiled kernels' do."""
    x, to = torch.tensor([2**31 - 1], dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    launch(greatest_sum, (1,), to, x)
    assert to.item() == -2


def test_types_are_those_of_the_interpreter() -> None:
    """Asked for twice, of scalars, blocks and pointers."""
    scalars = [
        getattr(tl, name) for name in ("int1", "int8", "uint16", "int64", "bfloat16", "float16", "float64", "float8e5")
    ]
    kinds = [*scalars, *(tl.block_type(kind, [4]) for kind in scalars)]
    kinds += [tl.pointer_type(tl.float32), tl.block_type(tl.pointer_type(tl.int8), [2])]
    asked = []

    def original(kind: tl.dtype) -> np.dtype:
        asked.append(kind.scalar.name)
        return np.dtype(np.uint64) if kind.scalar.is_ptr() else np.dtype(NUMPY.get(kind.scalar.name, "uint16"))

    dtype_of = interpreter_gaps.once_for_each_type(original)
    for _ in range(2):
        assert [dtype_of(kind) for kind in kinds] == [_get_np_dtype(kind) for kind in kinds]
    assert len(asked) == len(set(asked)) == len(scalars) + 2


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
