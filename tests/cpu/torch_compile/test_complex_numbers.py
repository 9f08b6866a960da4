"""Rotary embeddings by complex products compile to one fused loop of floats."""

from __future__ import annotations

import pytest
import torch

from flagos_backend.frontends.torch.compile import report
from support.torch_compile import check_function


def _rotary(x: torch.Tensor, frequencies: torch.Tensor) -> torch.Tensor:
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2).contiguous())
    return torch.view_as_real(pairs * frequencies).flatten(-2).to(x.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tokens", [1, 48])
def test_rotary_embeddings_by_complex_products(dtype: torch.dtype, tokens: int) -> None:
    x = torch.randn(tokens, 4, 16).to(dtype)
    angles = torch.rand(tokens, 1, 8) * 6
    report.clear()
    check_function(
        _rotary,
        x,
        torch.polar(torch.ones_like(angles), angles),
        rtol=1e-2 if dtype is torch.bfloat16 else 1e-6,
        atol=1e-6,
    )
    (graph,) = report.reports()
    assert not graph.fallback and not graph.outside and not graph.whole


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128], ids=str)
def test_products_of_complex_numbers(dtype: torch.dtype) -> None:
    x, y = torch.randn(5, 3, dtype=dtype), torch.randn(3, dtype=dtype)
    report.clear()
    check_function(lambda x, y: x * y, x, y)
    check_function(
        lambda x, y: torch.view_as_real(torch.complex(x, y) * torch.complex(y, x)),
        *(torch.randn(2, 7) for _ in range(2)),
    )
    assert not any(graph.fallback for graph in report.reports())


def test_other_arithmetic_of_complex_numbers_is_atens() -> None:
    x = torch.randn(5, dtype=torch.complex64)
    check_function(lambda x: x * 2j + x * x.real, x)
    check_function(lambda x: torch.view_as_real(x.conj() * x), x)
