"""Inputs that are not dense (slices, expanded, windows) are read where they stand. PyTorch eager is the oracle."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional
from torch.testing import assert_close

from flagos_backend.frontends.torch.compile import executable
from flagos_backend.frontends.torch.compile.options import read_options
from flagos_backend.frontends.torch.compile.specialization import compile_graph
from support.torch_compile import check_function

DEVICES = ["cpu", "flagos"]
VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "columns": lambda x: x[:, 3:19],
    "steps": lambda x: x[::2, 1::3],
    "transposed columns": lambda x: x[:, 3:19].t(),
    "diagonal": lambda x: x.diagonal(),
    "row, expanded": lambda x: x[2].expand(5, 24),
    "column, expanded": lambda x: x[:, 2:3].expand(12, 7),
    "scalar, expanded": lambda x: x[0, 0].expand(3, 4),
    "windows": lambda x: x.reshape(-1).unfold(0, 10, 3),
    "permuted": lambda x: x.reshape(3, 4, 24).permute(2, 0, 1),
    "permuted slice": lambda x: x.reshape(3, 4, 24)[:, 1:3].permute(2, 0, 1),
    "empty": lambda x: x[:, 5:5],
}
PROGRAMS: dict[str, Callable[[Tensor], Any]] = {
    "elementwise": lambda x: x * 2 + 1,
    "copy": lambda x: x.clone(),
    "fold": lambda x: x.sin().sum(-1),
    "whole operator": lambda x: torch.cumsum(x, 0),
    "loops and a whole operator": lambda x: (torch.cumsum(x, 0), x.exp() + 1, x.cos().sum(0), (x * 3).sum()),
    "product": lambda x: x @ torch.ones(x.shape[-1], 3, dtype=x.dtype, device=x.device),
    "view of the view": lambda x: x.unsqueeze(0)[..., 1:].sum(0) * 2,
}


@pytest.fixture(autouse=True)
def copied(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of inputs that were copied before a launch."""
    copies: list[int] = []
    original = executable._laid_out

    def laid_out(specs: Any, origins: Any, device_context: Any, number: int, tensor: Tensor) -> Tensor:
        copies.append(number)
        return original(specs, origins, device_context, number, tensor)

    monkeypatch.setattr(executable, "_laid_out", laid_out)
    return copies


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    made: Callable[..., Any] = torch.compile(function, backend="flagos", dynamic=False)
    return made


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("view", VIEWS)
def test_views_are_read_where_they_stand(view: str, program: str, device: str, copied: list[int]) -> None:
    x = VIEWS[view](torch.randn(12, 24, dtype=torch.float64).to(device))
    assert_close(compiled(PROGRAMS[program])(x), PROGRAMS[program](x))
    assert copied == []


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.int8, torch.bfloat16, torch.int64, torch.complex64, torch.complex128]
)
def test_of_every_width(dtype: torch.dtype, copied: list[int]) -> None:
    x = torch.randn(6, 8).to(dtype)[:, 1:6].t()
    assert_close(compiled(lambda t: (t.clone(), t == t.flip(0)))(x), (x.clone(), x == x.flip(0)))
    assert copied == []


@pytest.mark.parametrize("lhs", ["columns", "transposed", "expanded rows", "expanded batch"])
@pytest.mark.parametrize("rhs", ["columns", "transposed", "expanded rows", "expanded batch"])
def test_products_of_views(lhs: str, rhs: str, copied: list[int]) -> None:
    def operand(kind: str, rows: int, columns: int) -> Tensor:
        return {
            "columns": torch.randn(3, rows, columns + 5)[:, :, 2 : 2 + columns],
            "transposed": torch.randn(3, columns, rows + 4)[:, :, 1 : 1 + rows].mT,
            "expanded rows": torch.randn(3, 1, columns).expand(3, rows, columns),
            "expanded batch": torch.randn(rows, columns).expand(3, rows, columns),
        }[kind]

    x, y = operand(lhs, 4, 6), operand(rhs, 6, 5)
    assert_close(compiled(lambda a, b: (a @ b).relu() * 2)(x, y), (x @ y).relu() * 2)
    assert copied == []


def test_one_element(copied: list[int]) -> None:
    x = torch.randn(3, 4)[2, 3]
    assert_close(compiled(lambda t: t * 2)(x), x * 2)
    assert copied == []


def test_gradients_through_views(copied: list[int]) -> None:
    base = torch.randn(8, 12)
    results = []
    for function in (lambda x, w: (x @ w).tanh().sum(), compiled(lambda x, w: (x @ w).tanh().sum())):
        leaf, weight = base.clone().requires_grad_(), torch.ones(6, 3).requires_grad_()
        function(leaf[:, 2:8], weight).backward()
        results.append((leaf.grad, weight.grad))
    assert_close(results[1], results[0])
    assert copied == []


def test_the_bounds_of_memory_are_kept() -> None:
    """The last row of a slice ends before a whole row would: what lies behind it is another's."""
    base = torch.full((4, 8), float("nan"))
    x = base[:, 5:]
    x.copy_(torch.randn(4, 3))
    assert_close(compiled(lambda t: t.cumsum(1) * 2)(x), x.cumsum(1) * 2)


def test_other_strides_than_traced_are_compiled_for_copies() -> None:
    """What a program was traced for as one repeated row may come with rows that differ; as gradients do."""
    traced = torch.randn(1, 4).expand(3, 4)
    graph = make_fx(lambda x: [x * 2], tracing_mode="fake")(traced)
    run = compile_graph(graph, "inference", read_options(None, None))
    for x in (traced, torch.randn(3, 4), traced, torch.randn(4, 3).t()):
        assert_close(run([x]), [x * 2])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("place", [((2, 2), (1, 2), 1), ((2, 3), (3, 1), 0), ((3,), (2,), 4)], ids=str)
def test_gradients_of_what_is_read_by_strides(place: tuple[tuple[int, ...], tuple[int, ...], int], device: str) -> None:
    """Their derivative writes a view that begins inside of its storage."""
    sizes, strides, offset = place

    def copy(x: Tensor, _: Tensor) -> Tensor:
        return torch.as_strided_copy(x, sizes, strides, offset)

    def scatter(x: Tensor, y: Tensor) -> Tensor:
        return torch.as_strided_scatter(x, y, sizes, strides, offset) + y.sum()

    x, y = torch.randn(3, 3), torch.randn(sizes)
    for function in (copy, scatter):
        results = []
        for call, where in ((function, "cpu"), (compiled(function), device)):
            leaves = [t.to(where).requires_grad_() for t in (x, y)]
            result = call(*leaves)
            gradients = torch.autograd.grad(result.sin().sum(), leaves, materialize_grads=True)
            results.append([t.detach().cpu() for t in (result, *gradients)])
        assert_close(results[1], results[0])


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_operators_that_insist_on_contiguous_memory_get_it(mode: str) -> None:
    weight, indices = torch.randn(10, 5), torch.randint(10, (10,))[1::2]
    assert not indices.is_contiguous()
    check_function(lambda w, i: functional.embedding_bag(i, w, torch.tensor([0, 3]), mode=mode), weight, indices)
    x = torch.randn(2, 4, 3, 6).permute(0, 2, 1, 3)[..., ::2]
    check_function(lambda x: functional.group_norm(x, 3), x)
    check_function(lambda q: functional.scaled_dot_product_attention(q.contiguous(), x.contiguous(), q), x)
