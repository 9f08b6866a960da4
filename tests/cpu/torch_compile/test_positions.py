"""Minima and maxima with their positions, as eager gives them on the CPU: the first of equal ones, and a NaN before all
else."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from flagos_backend.frontends.torch.compile import report
from support.torch_compile import assert_same, compiled

DTYPES = [
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
]
PROGRAMS: dict[str, Callable[[torch.Tensor], object]] = {
    "argmax of rows": lambda x: x.argmax(-1),
    "argmin of columns": lambda x: torch.argmin(x, 0, keepdim=True),
    "argmax of all": lambda x: x.argmax(),
    "argmin of all, kept": lambda x: torch.argmin(x, keepdim=True),
    "max of the middle": lambda x: x.max(1),
    "min of rows": lambda x: x.min(-1, keepdim=True),
    "value alone": lambda x: x.max(0).values,
    "position alone": lambda x: x.min(0).indices + 1,
    "of a transposed array": lambda x: x.transpose(0, 2).max(0),
}


def of_ties(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    x = torch.randint(0, 6, shape)
    if not dtype.is_floating_point:
        return x.to(dtype)
    x = x.double()
    x[torch.rand(shape) < 0.2] *= -0.0
    x[torch.rand(shape) < 0.02] = float("inf")
    x[torch.rand(shape) < 0.02] = float("-inf")
    x[torch.rand(shape) < 0.01] = float("nan")
    return x.to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_minima_and_maxima_and_their_positions(dtype: torch.dtype) -> None:
    x = of_ties(dtype, 7, 40, 9)
    for name, program in PROGRAMS.items():
        torch.compiler.reset()
        report.clear()
        assert_same(compiled(program)(x), program(x), rtol=0, atol=0)
        (graph,) = report.reports()
        assert not graph.whole and not graph.fallback, name


@pytest.mark.parametrize("function", [lambda x: x.argmax(0), lambda x: x.max(-1)])
def test_one_number(function: Callable[[torch.Tensor], object]) -> None:
    x = torch.randn(())
    assert_same(compiled(function)(x), function(x))


def test_truth() -> None:
    x = of_ties(torch.int32, 7, 10, 9) > 2
    program = lambda x: (x.max(1), x.min(-1, keepdim=True))  # noqa: E731
    assert_same(compiled(program)(x), program(x))
    (graph,) = report.reports()
    assert not graph.whole and not graph.fallback


def test_gradients_go_to_the_first() -> None:
    x = of_ties(torch.float32, 6, 30).nan_to_num().requires_grad_()
    program = lambda x: (x.max(1).values * torch.arange(6.0)).sum()  # noqa: E731
    expected, found = (torch.autograd.grad(call(x), x)[0] for call in (program, compiled(program)))
    assert_same(found, expected)
