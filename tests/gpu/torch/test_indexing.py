"""Reading and writing at places that tensors say, compiled for an accelerator: PyTorch's CPU is the oracle, of doubles
where floats are added up. Nothing is left to ATen, and each program is one graph."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional
from torch.utils._pytree import tree_map_only

from flagos_backend.frontends.torch.compile import report
from flagos_backend.frontends.torch.compile.backend import flagos
from support import indexing
from support.indexing import FLOATS, INTEGERS

DTYPES = [*FLOATS, *INTEGERS, torch.bool, torch.complex64, torch.complex128]
NAME = os.environ["FLAGOS_DEVICE"]
DEVICE = torch.device("flagos") if NAME == "simulated" else torch.device(NAME, 0)
# Past the first launches, of which the programs are recorded.
RUNS = 4


@pytest.fixture(autouse=True)
def fresh() -> None:
    torch.compiler.reset()
    report.clear()


def on(device: torch.device, values: Any) -> Any:
    return tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), values)


def check(function: Callable[..., Any], draw: Callable[[], Any], exact: bool = True, **tolerance: float) -> None:
    compiled = torch.compile(function, backend=flagos, fullgraph=True)
    for _ in range(RUNS):
        given = draw()
        found = on(torch.device("cpu"), compiled(*on(DEVICE, given)))
        wide = tree_map_only(torch.Tensor, lambda t: t.double() if t.is_floating_point() and not exact else t, given)
        for ours, theirs in zip(found, function(*wide), strict=True):
            torch.testing.assert_close(ours.to(theirs.dtype), theirs, equal_nan=True, **tolerance)
    for graph in report.reports():
        assert not graph.whole and not graph.fallback and not graph.outside, graph


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_reading(dtype: torch.dtype) -> None:
    draw = lambda: (indexing.of(dtype, 6, 5, 4), *indexing.inputs_of_reading())  # noqa: E731
    check(indexing.read, draw, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_writing(dtype: torch.dtype) -> None:
    draw = lambda: (indexing.of(dtype, 6, 5, 4), *indexing.inputs_of_writing())  # noqa: E731
    check(indexing.written, draw, rtol=0, atol=0)


@pytest.mark.parametrize("function", [indexing.added, indexing.reduced], ids=lambda function: function.__name__)
@pytest.mark.parametrize("dtype", [*INTEGERS, *FLOATS], ids=str)
def test_combining(dtype: torch.dtype, function: Callable[..., Any]) -> None:
    precision = 100 * torch.finfo(dtype).eps if dtype in (torch.float32, torch.float64) else 0.0
    if dtype in FLOATS[:2]:  # rounded once
        precision = torch.finfo(dtype).eps
    draw = lambda: indexing.inputs_of_sums(dtype)  # noqa: E731
    check(function, draw, exact=dtype in INTEGERS, rtol=precision, atol=10 * precision)


@pytest.mark.parametrize(("rows", "size", "k"), [(1, 200_000, 8), (8, 50_257, 64), (300, 3_000, 5), (2, 9_000, 1)])
def test_topk(rows: int, size: int, k: int) -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        values, places = x.topk(k)
        return values, x.gather(1, places)

    check(function, lambda: (torch.randn(rows, size),), rtol=0, atol=0)


@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_bags_and_tables_train(mode: str) -> None:
    table, index = torch.randn(5_000, 32), torch.randint(5_000, (256, 20))

    def loss(table: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        bags = functional.embedding_bag(index, table, mode=mode)
        return (bags * functional.embedding(index[:, 0], table, padding_idx=3)).square().sum()

    def gradient(call: Callable[..., torch.Tensor], table: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        table = table.detach().requires_grad_()
        (found,) = torch.autograd.grad(call(table, index), table)
        return found

    compiled, exact = torch.compile(loss, backend=flagos, fullgraph=True), gradient(loss, table.double(), index)
    for _ in range(RUNS):
        found = gradient(compiled, table.to(DEVICE), index.to(DEVICE)).cpu().double()
        torch.testing.assert_close(found, exact, rtol=1e-4, atol=1e-3)
    for graph in map(dataclasses.asdict, report.reports()):
        assert not graph["whole"] and not graph["fallback"] and not graph["outside"], graph
