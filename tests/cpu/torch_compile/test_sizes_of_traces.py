"""Functions of rows, with their gradients: as AOTAutograd traces them, they are as many operators for long rows as for
short ones. PyTorch's formulas that write some for each element of a row are replaced by compile/gradients.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from functorch.compile import aot_function, make_boxed_func
from torch.nn import functional
from torch.utils._pytree import tree_leaves

from flagos_backend.frontends.torch.compile.gradients import own_gradients

_NAMES = """cumsum cumprod logcumsumexp cummax cummin prod sum mean var std median nanmedian mode sort argsort logsumexp
nansum amax amin diff softmax log_softmax"""
FUNCTIONS: dict[str, Callable[[torch.Tensor], Any]] = {
    **{name: lambda x, name=name: getattr(torch, name)(x, dim=1) for name in _NAMES.split()},
    "whole product": torch.prod,
    "k-th": lambda x: x.kthvalue(2, 1),
    "top k": lambda x: x.topk(2, 1),
    "trapezoids": lambda x: torch.cumulative_trapezoid(x, dim=1),
    "differences": lambda x: torch.gradient(x, dim=1),
    "quantile": lambda x: x.quantile(0.3, 1),
    "powers": lambda x: torch.linalg.vander(x, N=5),
    "norm": lambda x: torch.linalg.vector_norm(x, 3, 1),
    "renormalised": lambda x: x.renorm(2, 1, 1.0),
    "masked running product": lambda x: torch.masked.cumprod(x, 1, mask=x > 0),
    "masked product": lambda x: torch.masked.prod(x, 1, mask=x > 0),
    "scattered product": lambda x: x[:, :2].scatter_reduce(1, torch.zeros(x.shape, dtype=torch.long), x, "prod"),
    "windows": lambda x: x.unfold(1, 3, 1),
    "resized": lambda x: functional.interpolate(x[None], scale_factor=2.0, mode="linear"),
    "reflected": lambda x: functional.pad(x, (2, 2), "reflect"),
    "transform": torch.fft.fft,
    "decomposition": lambda x: torch.linalg.qr(x.T),
    "determinant": lambda x: torch.linalg.det(x.T @ x),
}


def lengths(function: Callable[[torch.Tensor], Any], size: int) -> list[int]:
    """Of the forward and the backward graph."""
    found: list[int] = []

    def note(graph: torch.fx.GraphModule, _: Any) -> Any:
        found.append(len(graph.graph.nodes))
        return make_boxed_func(graph.forward)

    x = torch.randn(3, size, requires_grad=True)
    with own_gradients():
        results = tree_leaves(aot_function(function, fw_compiler=note, bw_compiler=note)(x))
        results = [y for y in results if y.requires_grad]
        if results:
            torch.autograd.grad(results, x, [torch.ones_like(y) for y in results])
    return found


@pytest.mark.parametrize("name", FUNCTIONS)
def test_as_long_for_long_rows(name: str) -> None:
    assert lengths(FUNCTIONS[name], 8) == lengths(FUNCTIONS[name], 64)


def test_reflectors_are_applied_one_by_one() -> None:
    """The one that is known to grow: of a product of reflectors PyTorch's eager gradient is a loop over them, too."""

    def product(x: torch.Tensor) -> torch.Tensor:
        return torch.linalg.householder_product(x[:1].T @ x[:1], x[0])

    assert lengths(product, 4)[1] < lengths(product, 8)[1]
