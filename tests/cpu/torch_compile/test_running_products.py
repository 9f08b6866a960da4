"""Gradients of running products, of products, and of log-sum-exps, whatever zeros rows have. Oracles: each product
without one of its factors, in double; eager PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from flagos_backend.frontends.torch.compile import gradients
from flagos_backend.frontends.torch.compile.backend import flagos
from support.torch_compile import compiled

TOLERANCE = {torch.float16: 2e-2, torch.bfloat16: 1e-1, torch.float32: 1e-4, torch.complex64: 1e-4}
#: How many zeros of a row of some length.
ZEROS: dict[str, Callable[[int], list[int]]] = {
    "none": lambda size: [],
    "first": lambda size: [0],
    "last": lambda size: [size - 1],
    "inner": lambda size: [size // 2],
    "two": lambda size: [size // 3, size - 1],
    "neighbours": lambda size: [size // 2, size // 2 + 1],
    "all": lambda size: list(range(size)),
}


def rows(dtype: torch.dtype, size: int = 9) -> Tensor:
    """A row for each of ZEROS, every other zero negative."""
    x = torch.rand(len(ZEROS), size, dtype=torch.complex128 if dtype.is_complex else torch.float64) + 0.5
    x = torch.where(torch.rand(x.shape) < 0.5, -x, x)
    for number, places in enumerate(ZEROS.values()):
        x[number, places(size)] = torch.tensor(-0.0 if number % 2 else 0.0, dtype=x.dtype)
    return x.to(dtype)


def without_one(x: Tensor, grad: Tensor) -> Tensor:
    """Along the last dimension, by the definition: in double, O(size^3)."""
    wide = torch.complex128 if x.is_complex() else torch.float64
    x, grad, size = x.to(wide).conj(), grad.to(wide), x.shape[-1]
    found = torch.zeros_like(x)
    for i in range(size):
        for k in range(i, size):
            others = [j for j in range(k + 1) if j != i]
            found[..., i] += grad[..., k] * x[..., others].prod(-1)
    return found


def gradient(function: Callable[[Tensor], Tensor], x: Tensor, weights: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """With random weights of the results, which are the second value."""
    x = x.detach().requires_grad_()
    y = function(x)
    if weights is None:
        weights = torch.randn_like(y)
    return torch.autograd.grad(y, x, weights)[0], weights


@pytest.mark.parametrize("dtype", [*TOLERANCE, torch.float64, torch.complex128], ids=str)
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_gradient(dtype: torch.dtype, dim: int) -> None:
    x = rows(dtype) if dim else rows(dtype).T.contiguous()
    ours, weights = gradient(compiled(lambda x: x.cumprod(dim)), x)
    expected = without_one(x.movedim(dim, -1), weights.movedim(dim, -1)).movedim(-1, dim)
    tolerance = TOLERANCE.get(dtype, 1e-12)
    assert ours.dtype is dtype
    torch.testing.assert_close(ours.to(expected.dtype), expected, rtol=tolerance, atol=tolerance)
    eager, _ = gradient(lambda x: x.cumprod(dim), x, weights)
    torch.testing.assert_close(ours, eager, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128], ids=str)
@pytest.mark.parametrize("size", [2, 3, 8, 11])
def test_gradient_of_the_gradient(dtype: torch.dtype, size: int) -> None:
    """It is a polynomial, at zeros too."""
    x = rows(dtype, max(size, 3))[:, :size]
    grad = torch.randn_like(x)

    def formula(grad: Tensor, x: Tensor) -> Tensor:
        return gradients.cumprod_backward(grad, x, 1, x.cumprod(1))

    torch.testing.assert_close(formula(grad, x), without_one(x, grad))
    inputs = [t.detach().requires_grad_() for t in (grad, x)]
    assert torch.autograd.gradcheck(formula, inputs)
    assert torch.autograd.gradgradcheck(formula, inputs)


def test_derivatives_of_functions() -> None:
    """torch.func differentiates what it differentiated, and maps over rows."""
    x = rows(torch.float64, 6)

    def loss(row: Tensor) -> Tensor:
        return (row.cumprod(0) * torch.arange(1.0, 7, dtype=row.dtype)).sin().sum()

    mapped = torch.func.vmap(torch.func.grad(loss))
    torch.testing.assert_close(compiled(mapped)(x), mapped(x))
    row = x[3].clone()  # of a view PyTorch traces no second derivative, with its own formula neither
    torch.testing.assert_close(compiled(torch.func.hessian(loss))(row), torch.func.hessian(loss)(row))


def test_nan_and_infinities() -> None:
    x = rows(torch.float32)
    x[0, 3], x[1, 4], x[2, 2], x[3, 7] = torch.nan, torch.nan, torch.inf, -torch.inf
    ours, weights = gradient(compiled(lambda x: x.cumprod(1)), x)
    eager, _ = gradient(lambda x: x.cumprod(1), x, weights)
    torch.testing.assert_close(ours, eager, rtol=1e-4, atol=1e-4, equal_nan=True)


FORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "function": lambda x: torch.cumprod(x, 1),
    "in place": lambda x: (x * 1).cumprod_(1),
    "overload": lambda x: torch.ops.aten.cumprod(x, 1),
    "of several": lambda x: x.cumprod(0).cumprod(1),
    "of a view": lambda x: x.T[::2].cumprod(0),
    "wider": lambda x: x.cumprod(1, dtype=torch.float64),
    "of one": lambda x: x[:, :1].cumprod(1),
    "of none": lambda x: x[:, :0].cumprod(1),
    "of no rows": lambda x: x[:0].cumprod(1),
    "scalar": lambda x: x[0, 0].cumprod(0),
    "powers": lambda x: torch.linalg.vander(x, N=4),
    "checkpoint": lambda x: torch.utils.checkpoint.checkpoint(lambda y: y.sin().cumprod(1), x, use_reentrant=False),
    "product": lambda x: x.prod(1),
    "whole product": lambda x: x[4].prod() * x[0].prod(),
    "kept product": lambda x: x.prod(0, keepdim=True),
    "product of one": lambda x: x[3, 0].prod(),
    "log-sum-exp": lambda x: x.logcumsumexp(1),
    "greatest": lambda x: x.cummax(1).values * x.cummin(0).values,
}


@pytest.mark.parametrize("form", FORMS)
def test_forms(form: str, place: str) -> None:
    x = (torch.randn(7, 9) if form in ("log-sum-exp", "greatest") else rows(torch.float32)).to(place)
    ours, weights = gradient(compiled(FORMS[form]), x)
    eager, _ = gradient(FORMS[form], x.cpu().double(), weights.cpu().double())
    assert ours.dtype is torch.float32
    torch.testing.assert_close(ours.cpu(), eager.float(), rtol=1e-4, atol=1e-4)


def test_integers_have_none() -> None:
    x, y = torch.randint(-2, 3, (4, 6)), torch.randn(4, 6)
    function = lambda y: x.cumprod(1, dtype=torch.float32) * y  # noqa: E731
    ours, weights = gradient(compiled(function), y)
    torch.testing.assert_close(ours, gradient(function, y, weights)[0])


def traced(function: Callable[[Tensor], Tensor], x: Tensor, backend: Any = flagos) -> list[str]:
    """The operators of the backward pass, as AOTAutograd gives them to a compiler."""
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    found: list[str] = []

    def note(graph: torch.fx.GraphModule, _: Any) -> Any:
        found.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return make_boxed_func(graph.forward)

    def run(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        with gradients.own_gradients() if backend is flagos else torch.enable_grad():
            return aot_autograd(fw_compiler=lambda g, _: make_boxed_func(g.forward), bw_compiler=note)(graph, inputs)

    torch.compiler.reset()
    gradient(torch.compile(function, backend=run), x)
    return found


def test_as_many_operators_for_long_rows() -> None:
    for function in (FORMS["function"], FORMS["product"]):
        short, long = (traced(function, torch.randn(3, size)) for size in (8, 64))
        assert short == long
    assert traced(FORMS["function"], torch.randn(3, 8)).count("aten.cumprod.default") == 1


def test_other_compilers_keep_theirs() -> None:
    before = traced(FORMS["function"], torch.randn(3, 8), None)
    assert traced(FORMS["function"], torch.randn(3, 8)) != before
    assert traced(FORMS["function"], torch.randn(3, 8), None) == before


def test_sizes_that_change() -> None:
    run = torch.compile(FORMS["function"], backend=flagos, fullgraph=True, dynamic=True)
    for size in (9, 5, 12, 2):
        x = rows(torch.float32, max(size, 3))[:, :size]
        ours, weights = gradient(run, x)
        torch.testing.assert_close(ours, gradient(FORMS["function"], x, weights)[0], rtol=1e-4, atol=1e-4)
