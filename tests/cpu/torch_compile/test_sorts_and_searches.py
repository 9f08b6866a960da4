"""Sorts, searches in sorted rows, the greatest elements of rows and short running sums, in native programs of the host:
eager is the oracle, also for ties, NaN, infinities and zeros of both signs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from flagos_backend.frontends.torch.compile import report
from support.torch_compile import assert_same, compiled

DTYPES = [
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.int32,
    torch.int64,
    torch.uint8,
    torch.bool,
]
SEARCHED = [torch.float32, torch.float64, torch.int32, torch.int64, torch.uint8]


def of_ties(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    if not dtype.is_floating_point:
        return torch.randint(0, 2 if dtype is torch.bool else 9, shape).to(dtype)
    x = torch.randint(-6, 6, shape).double()
    for value in (float("inf"), float("-inf"), float("nan"), -0.0):
        x[torch.rand(shape) < 0.05] = value
    return torch.where(torch.rand(shape) < 0.3, -x, x).to(dtype)


def check(program: Callable[..., object], *arguments: torch.Tensor, rtol: float = 0) -> None:
    torch.compiler.reset()
    report.clear()
    assert_same(compiled(program)(*arguments), program(*arguments), rtol=rtol, atol=0)
    (graph,) = report.reports()
    assert not graph.whole and not graph.fallback


@pytest.mark.parametrize("descending", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sorts(dtype: torch.dtype, descending: bool) -> None:
    def program(x: torch.Tensor) -> list[object]:
        rows = [x.sort(dim=d, descending=descending, stable=True) for d in (0, 1, -1)]
        return [part for pair in rows for part in pair]

    check(program, of_ties(dtype, 7, 40, 3))


def test_the_order_of_rows_is_in_range() -> None:
    """A gather at such places needs no check, and a gradient goes back by them."""

    def program(x: torch.Tensor) -> torch.Tensor:
        return (x.sort(1).values * x.gather(1, x.argsort(1))).sum()

    x = torch.randn(5, 11, dtype=torch.float64)
    check(lambda x: x.gather(1, x.argsort(1)), x)
    gradients = []
    for function in (program, compiled(program)):
        leaf = x.clone().requires_grad_()
        function(leaf).backward()
        gradients.append(leaf.grad)
    assert_same(gradients[1], gradients[0], rtol=1e-12, atol=0)


@pytest.mark.parametrize("right", [False, True])
@pytest.mark.parametrize("dtype", SEARCHED, ids=str)
def test_searches(dtype: torch.dtype, right: bool) -> None:
    def program(rows: torch.Tensor, values: torch.Tensor) -> list[torch.Tensor]:
        return [
            torch.searchsorted(rows, values, right=right),
            torch.searchsorted(rows[0], values, side="right" if right else "left", out_int32=True),
            torch.bucketize(values, rows[1], right=right),
            torch.bucketize(values[0, 0], rows[2, :1], right=right),
        ]

    check(program, of_ties(dtype, 5, 11).sort(-1).values, of_ties(dtype, 5, 9))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int32, torch.bool], ids=str)
def test_short_running_sums_and_products(dtype: torch.dtype) -> None:
    x = of_ties(dtype, 5, 11) if not dtype.is_floating_point else torch.randn(5, 11).to(dtype)
    rtol = torch.finfo(dtype).eps * 16 if dtype.is_floating_point else 0
    check(lambda x: [x.cumsum(0), x.cumsum(-1), x.cumprod(1)], x, rtol=rtol)


def test_greatest_elements() -> None:
    x = torch.randperm(4 * 30).view(4, 30).float()
    x[0, :3] = float("nan")
    check(lambda x: [x.topk(5).values, x.topk(4, dim=0, largest=False).indices, x[1:].topk(64 % 30).indices], x)


def test_left_to_aten() -> None:
    for program, x in (
        (lambda x: x.sort().values, torch.randn(0)),
        (lambda x: x.sort().values, torch.tensor(2.0)),
        (lambda x: x.cumsum(0), torch.randn(4096)),
        (lambda x: torch.searchsorted(x[:0], x), torch.randn(5)),
    ):
        torch.compiler.reset()
        assert_same(compiled(program)(x), program(x), rtol=1e-5, atol=1e-5)
