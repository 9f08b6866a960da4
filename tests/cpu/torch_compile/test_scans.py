"""Running sums, products and log-sum-exps as programs of accelerators compute them, run on the host, and products of
rows. Eager is the oracle, in double for floats."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from flagos_backend.frontends.torch.compile import report
from flagos_backend.frontends.torch.compile.lowering.emitter import Emitter
from support.torch_compile import compiled

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
INTEGERS = [torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.bool]
FUNCTIONS: dict[str, Callable[..., torch.Tensor]] = {
    "sum": torch.cumsum,
    "product": torch.cumprod,
    "log-sum-exp": torch.logcumsumexp,
    "products": torch.prod,
}


@pytest.fixture(autouse=True)
def as_on_accelerators(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Emitter, "on_host", property(lambda self: False, lambda self, value: None), raising=False)


def left() -> list[Any]:
    """What is no part of a loop or a kernel of our own."""
    return [kinds for graph in report.reports() for kinds in (graph.whole, graph.fallback, graph.outside) if kinds]


def values(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    if not dtype.is_floating_point:
        return torch.randint(0 if dtype in (torch.uint8, torch.bool) else -3, 4, shape).to(dtype)
    return torch.randn(shape).to(dtype)


@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS], ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_types(name: str, dtype: torch.dtype) -> None:
    if name == "log-sum-exp" and not dtype.is_floating_point:
        return
    function, x = FUNCTIONS[name], values(dtype, 4, 7, 3)
    found = compiled(lambda x: [function(x, dim) for dim in (0, 1, -1)])(x)
    assert not left()
    for dim, ours in zip((0, 1, -1), found, strict=True):
        exact = function(x.double() if dtype.is_floating_point else x, dim)
        precision = 8 * torch.finfo(dtype).eps if dtype.is_floating_point else 0.0
        assert ours.dtype is function(x, dim).dtype
        torch.testing.assert_close(ours.to(exact.dtype), exact, rtol=precision, atol=8 * precision)


@pytest.mark.parametrize(
    ("given", "result"),
    [(torch.float32, torch.float64), (torch.float32, torch.float16), (torch.int32, torch.float32)],
    ids=str,
)
def test_other_types(given: torch.dtype, result: torch.dtype) -> None:
    x = values(given, 5, 6)
    functions = (torch.cumsum, torch.cumprod, torch.prod)
    found = compiled(lambda x: [function(x, 1, dtype=result) for function in functions])(x)
    assert not left()
    for function, ours in zip(functions, found, strict=True):
        precision = 8 * torch.finfo(result).eps
        torch.testing.assert_close(ours, function(x, 1, dtype=result), rtol=precision, atol=8 * precision)


def test_from_the_end() -> None:
    """As the gradient of a running sum is made."""
    x = torch.randn(4, 9)
    torch.testing.assert_close(compiled(lambda x: x.flip(1).cumsum(1).flip(1))(x), x.flip(1).cumsum(1).flip(1))
    assert not left()


def test_scalars_and_none() -> None:
    for x in (torch.randn(()), torch.randn(0), torch.randn(3, 0), torch.randn(0, 3), torch.randn(3, 1)):
        torch.compiler.reset()
        function = lambda x: [f(x, -1) for f in (torch.cumsum, torch.cumprod, torch.prod)]  # noqa: E731
        for ours, expected in zip(compiled(function)(x), function(x), strict=True):
            torch.testing.assert_close(ours, expected)


@pytest.mark.parametrize("name", ["sum", "product", "log-sum-exp"])
def test_nan_and_infinities(name: str) -> None:
    x = torch.randn(5, 9)
    x[0, 3], x[1, 2], x[2, [1, 5]], x[3, :], x[4, 0] = torch.nan, torch.inf, torch.inf, -torch.inf, -torch.inf
    x[2, 6] = -torch.inf
    function = FUNCTIONS[name]
    torch.testing.assert_close(compiled(lambda x: function(x, 1))(x), function(x, 1), equal_nan=True)


def test_left_to_aten() -> None:
    for x, dtype in ((torch.randn(4, 3, dtype=torch.complex64), None), (torch.randn(4, 3) * 5, torch.int32)):
        for function in (torch.cumsum, torch.cumprod, torch.prod):
            torch.compiler.reset()
            report.clear()
            found = compiled(lambda x, f=function, dtype=dtype: f(x, 1, dtype=dtype))(x)
            torch.testing.assert_close(found, function(x, 1, dtype=dtype))
            assert left()
