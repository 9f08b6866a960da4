"""Conversions to float8_e4m3fn, which quantized products begin with, are part of the loop that makes the numbers."""

from __future__ import annotations

import pytest
import torch

from flagos_backend.frontends.torch.compile import report
from support.torch_compile import compiled


def _same_bits(ours: torch.Tensor, expected: torch.Tensor) -> None:
    assert ours.dtype is expected.dtype is torch.float8_e4m3fn
    numbers = ~expected.float().isnan()
    assert torch.equal(ours.float().isnan(), ~numbers)
    assert torch.equal(ours.view(torch.uint8)[numbers], expected.view(torch.uint8)[numbers])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_half_as_e4m3(dtype: torch.dtype) -> None:
    x = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    _same_bits(compiled(lambda x: x.to(torch.float8_e4m3fn))(x), x.to(torch.float8_e4m3fn))


def test_floats_and_their_ties_as_e4m3() -> None:
    exact = torch.arange(128, dtype=torch.uint8).view(torch.float8_e4m3fn).float()[:-1]
    ties = (exact[1:] + exact[:-1]) / 2
    near = torch.cat([ties, ties.nextafter(torch.tensor(0.0)), ties.nextafter(torch.tensor(1e9)), exact])
    edges = torch.tensor([464.0, 463.99, 464.01, 480.0, 1e30, torch.inf, torch.nan, 2.0**-10, 2.0**-11, 1e-40])
    drawn = torch.randn(10_000) * torch.exp(torch.randn(10_000) * 4)
    x = torch.cat([near, edges, drawn])
    x = torch.cat([x, -x])
    report.clear()
    _same_bits(compiled(lambda x: (x * 1.0).to(torch.float8_e4m3fn))(x), x.to(torch.float8_e4m3fn))
    (graph,) = report.reports()
    assert not graph.fallback
