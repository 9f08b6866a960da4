"""The k greatest or least of rows, as programs of accelerators find them, run on the host; eager is the oracle. Which
of equal elements is taken is open: each place has the value that is said, and no place comes twice."""

from __future__ import annotations

import pytest
import torch

from flagos_backend.frontends.torch.compile import report
from flagos_backend.frontends.torch.compile.lowering.emitter import Emitter
from support.torch_compile import compiled

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.int8, torch.int16, torch.int32, torch.uint8]


@pytest.fixture(autouse=True)
def as_on_accelerators(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Emitter, "on_host", property(lambda self: False, lambda self, value: None), raising=False)


def of_ties(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Many equal elements, both zeros, infinities, and NaN of both signs."""
    x = torch.randint(0 if dtype is torch.uint8 else -6, 6, shape)
    if not dtype.is_floating_point:
        return x.to(dtype)
    x = x.double()
    for value in (float("inf"), float("-inf"), float("nan"), -0.0):
        x[torch.rand(shape) < 0.05] = value
    return torch.where(torch.rand(shape) < 0.3, -x, x).to(dtype)


@pytest.mark.parametrize("largest", [True, False])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_topk(dtype: torch.dtype, largest: bool) -> None:
    x = of_ties(dtype, 5, 12, 7)
    cases = ((1, -1, True), (3, 1, True), (7, 2, False), (5, 0, True))
    function = lambda x: [torch.topk(x, k, dim, largest, ordered) for k, dim, ordered in cases]  # noqa: E731
    found = compiled(function)(x)
    assert not any(graph.whole or graph.fallback or graph.outside for graph in report.reports())
    for (k, dim, _), (values, places) in zip(cases, found, strict=True):
        expected = torch.topk(x, k, dim, largest, True).values
        torch.testing.assert_close(values, expected, rtol=0, atol=0, equal_nan=True)
        torch.testing.assert_close(x.gather(dim, places), values, rtol=0, atol=0, equal_nan=True)
        assert places.dtype is torch.int64
        assert places.sort(dim).values.diff(dim=dim).ne(0).all()


def test_left_to_aten() -> None:
    for x, k in ((torch.randn(4, 90), 80), (torch.randn(4, 9).double(), 2), (torch.randn(4, 9), 0)):
        torch.compiler.reset()
        torch.testing.assert_close(compiled(lambda x, k=k: torch.topk(x, k))(x), torch.topk(x, k))
