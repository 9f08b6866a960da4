"""Indices that lie outside: programs of the host raise what eager raises, and compute what it computes of those inside,
in one native program without calls of ATen."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.nn import functional as F

from flagos_backend.frontends.torch.compile import report
from support.torch_compile import assert_same, compiled

pytestmark = pytest.mark.usefixtures("device")

Program = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
# Of x [5, 6], indices [4] and values [4, 6]; whether negative indices count from the end, and which types indices have.
BOTH, LONG = (torch.int64, torch.int32), (torch.int64,)
PROGRAMS: dict[str, tuple[Program, bool, tuple[torch.dtype, ...]]] = {
    "index": (lambda x, i, v: x[i] * 2, True, BOTH),
    "index of columns": (lambda x, i, v: x.t()[:, i] * 2, True, LONG),
    "two indices": (lambda x, i, v: x[i, i.abs() % 6] + 1, True, LONG),
    "index apart": (lambda x, i, v: x[None, i, :, None][:, :, torch.tensor([0, 5])], True, LONG),
    "embedding": (lambda x, i, v: F.embedding(i, x) * 2, False, BOTH),
    "index_select": (lambda x, i, v: x.index_select(0, i) * 2, False, BOTH),
    "index_select of columns": (lambda x, i, v: x.t().contiguous().index_select(1, i) * 2, False, LONG),
    "take": (lambda x, i, v: x[:, 0].contiguous().take(i) * 2, True, LONG),
    "gather": (lambda x, i, v: x.gather(0, i[:, None].repeat(1, 3)) * 2, False, LONG),
    "gather of rows": (lambda x, i, v: x.gather(0, i[:, None].expand(-1, 6)) * 2, False, LONG),
    "index_put": (lambda x, i, v: x.index_put((i,), v) * 2, True, BOTH),
    "index_put, added": (lambda x, i, v: x.index_put((i,), v, accumulate=True) * 2, True, LONG),
    "index_put of two": (lambda x, i, v: x.index_put((i, i.abs() % 6), v[:, 0], accumulate=True), True, LONG),
    "index_add": (lambda x, i, v: x.index_add(0, i, v) * 2, False, BOTH),
    "index_add, scaled": (lambda x, i, v: x.index_add(0, i, v, alpha=3) * 2, False, LONG),
    "index_copy": (lambda x, i, v: x.index_copy(0, i, v) * 2, False, LONG),
    "index_fill": (lambda x, i, v: x.index_fill(0, i, 7) * 2, True, LONG),
    "scatter": (lambda x, i, v: x.scatter(0, i[:, None].repeat(1, 3), v) * 2, False, LONG),
    "scatter_add": (lambda x, i, v: x.scatter_add(0, i[:, None].expand(-1, 6), v) * 2, False, LONG),
    "scatter_reduce": (lambda x, i, v: x.scatter_reduce(0, i[:, None].repeat(1, 6), v, "mean"), False, LONG),
    "embedding_bag": (lambda x, i, v: F.embedding_bag(i.reshape(2, 2), x, mode="mean"), False, LONG),
    "vmap": (lambda x, i, v: torch.vmap(lambda row, k: row[k])(x[:4], i), True, LONG),
}


def raised(program: Program, *arguments: torch.Tensor) -> tuple[type[Exception], str]:
    try:
        program(*arguments)
    except Exception as error:
        return type(error), str(error).splitlines()[0]
    raise AssertionError("nothing was raised")


@pytest.mark.parametrize("name", PROGRAMS)
def test_what_lies_outside_is_refused_as_in_eager(name: str) -> None:
    program, wraps, types = PROGRAMS[name]
    x, values = torch.randint(-9, 9, (5, 6)).double(), torch.randint(-9, 9, (4, 6)).double()
    for dtype in types:
        torch.compiler.reset()
        report.clear()
        ours = compiled(program)
        inside = torch.randint(-5 if wraps else 0, 5, (4,)).to(dtype)
        assert_same(ours(x, inside, values), program(x, inside, values), rtol=0, atol=0)
        (graph,) = report.reports()
        assert not graph.whole and not graph.fallback
        for outside in (6, 1 << 30, -7, *(() if wraps else (-1,))):
            index = inside.clone()
            index[torch.randint(0, 4, ())] = outside
            assert raised(ours, x, index, values) == raised(program, x, index, values)
        assert_same(ours(x, inside, values), program(x, inside, values), rtol=0, atol=0)


@pytest.mark.parametrize("index", [torch.zeros(0, dtype=torch.int64), torch.tensor(3), torch.tensor(-1)], ids=str)
def test_no_index_and_one_without_dimensions(index: torch.Tensor) -> None:
    x = torch.randn(5, 6)
    torch.compiler.reset()
    # x[i] of a number would ask the data for it.
    program = lambda x, i: torch.ops.aten.index(x, [i]) * 2  # noqa: E731
    assert_same(compiled(program)(x, index), program(x, index), rtol=0, atol=0)


def test_a_gather_that_is_read_where_it_is_used_checks_all_its_indices() -> None:
    """Of what is gathered only the first row is an output."""

    def program(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        return (x[index] * 2 + 1)[:1]

    x, index = torch.randn(50, 6), torch.randint(0, 50, (3000,))
    torch.compiler.reset()
    ours = compiled(program)
    assert_same(ours(x, index), program(x, index), rtol=1e-6, atol=0)
    index[-1] = 50
    with pytest.raises(IndexError, match="index 50 is out of bounds for dimension 0 with size 50"):
        ours(x, index)


def test_gradients_of_what_is_gathered() -> None:
    def loss(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        return (F.embedding(index, x, padding_idx=2) * x[index]).square().sum()

    x, index = torch.randn(5, 6, dtype=torch.float64), torch.tensor([[0, 2], [2, 4], [4, 4]])
    torch.compiler.reset()
    gradients = []
    for function in (loss, compiled(loss)):
        leaf = x.clone().requires_grad_()
        function(leaf, index).backward()
        gradients.append(leaf.grad)
    assert_same(gradients[1], gradients[0], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("mode", ["sum", "mean"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_bags_that_begin_where_the_data_say(dtype: torch.dtype, mode: str) -> None:
    """Also empty ones. Rows that are twice in a bag count twice."""

    def bags(x: torch.Tensor, index: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        return F.embedding_bag(index, x, offsets, mode=mode) * 2

    x, index = torch.randn(9, 4, dtype=dtype), torch.tensor([0, 8, 3, 3, 1])
    torch.compiler.reset()
    report.clear()
    ours = compiled(bags)
    tolerance = torch.finfo(dtype).eps * 16
    for offsets in (torch.tensor([0, 2, 2, 5]), torch.tensor([0, 0, 1, 4])):
        gradients, results = [], []
        for function in (bags, ours):
            leaf = x.clone().requires_grad_()
            result = function(leaf, index, offsets)
            result.square().sum().backward()
            gradients.append(leaf.grad)
            results.append(result.detach())
        assert_same(results[1], results[0], rtol=tolerance, atol=0)
        assert_same(gradients[1], gradients[0], rtol=tolerance, atol=0)
    assert not any(graph.whole or graph.fallback for graph in report.reports())
    bad = (torch.tensor([0, 9, 3, 3, 1]), torch.tensor([0, 2, 2, 5])), (index, torch.tensor([1, 2, 2, 5]))
    for arguments in (*bad, (index, torch.tensor([0, 2, 2, 6]))):
        assert raised(ours, x, *arguments) == raised(bags, x, *arguments)
