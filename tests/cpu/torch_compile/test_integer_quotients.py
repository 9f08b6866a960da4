"""Quotients, remainders and shifts of integers: by numbers on the host too, by tensors on accelerators, whose rules are
run on the host here; Python's integers are the oracle beside eager."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from flagos_backend.frontends.torch.compile import report
from flagos_backend.frontends.torch.compile.lowering.emitter import Emitter
from support.torch_compile import assert_same, compiled

DTYPES = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
QUOTIENTS: dict[str, Callable[..., torch.Tensor]] = {
    "floor": lambda x, y: x // y,
    "remainder": lambda x, y: x % y,
    "fmod": torch.fmod,
    "towards zero": lambda x, y: torch.div(x, y, rounding_mode="trunc"),
    "down": lambda x, y: torch.div(x, y, rounding_mode="floor"),
}


def of_all(dtype: torch.dtype) -> torch.Tensor:
    """Numbers of both signs, small and at the ends of the range."""
    limits = torch.iinfo(dtype)
    ends = [limits.min, limits.min + 1, limits.max - 1, limits.max]
    drawn = torch.randint(limits.min // 2, limits.max // 2, (20,), dtype=dtype)
    low = -7 if limits.min else 0
    return torch.cat([torch.tensor(ends, dtype=dtype), drawn, torch.arange(low, 8, dtype=dtype)])


def left() -> set[str]:
    return {name for known in report.reports() for name in (*known.whole, *known.fallback, *known.outside)}


@pytest.mark.parametrize("name", QUOTIENTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_by_a_number(dtype: torch.dtype, name: str) -> None:
    x = of_all(dtype)
    divisors = (1, 2, 3, 7, 100) if dtype is torch.uint8 else (1, 2, 3, 7, 100, -2, -3, -7)
    function = lambda x: [QUOTIENTS[name](x, y) for y in divisors]  # noqa: E731
    assert_same(compiled(function)(x), function(x))
    assert not left()


@pytest.mark.parametrize("name", QUOTIENTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_by_a_tensor_on_accelerators(dtype: torch.dtype, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the quotient has another sign, and where it is none: the host would end the process there."""
    monkeypatch.setattr(Emitter, "on_host", property(lambda self: False, lambda self, value: None), raising=False)
    x = of_all(dtype)
    y = x[x != 0][torch.randint(int((x != 0).sum()), (9,))]
    if dtype.is_signed:
        y = torch.cat([y, torch.tensor([1, -1, 2, -3], dtype=dtype)])
    x, y = (t.reshape(-1) for t in torch.broadcast_tensors(x[:, None], y))
    found = compiled(QUOTIENTS[name])(x, y)
    assert not left()
    assert found.dtype is dtype
    span = 1 << torch.iinfo(dtype).bits
    for a, b, ours in zip(x.tolist(), y.tolist(), found.tolist(), strict=True):
        down, towards_zero = a // b, abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)
        exact = {
            "floor": down,
            "down": down,
            "remainder": a - down * b,
            "towards zero": towards_zero,
            "fmod": a - towards_zero * b,
        }[name]
        assert (ours - exact) % span == 0, (a, b, ours, exact)


def test_by_zero_is_an_error_of_the_host() -> None:
    run = compiled(lambda x, y: x // y)
    with pytest.raises(Exception, match="ZeroDivisionError"):
        run(torch.arange(4), torch.tensor([1, 0, 2, 3]))


def test_numbers_that_are_no_quotients() -> None:
    """Integers by floats are floats."""
    x = torch.arange(-5, 6)
    for function in (lambda x: x // 2.5, lambda x: x % -2.5, lambda x: torch.fmod(x, 1.5), lambda x: x / 3):
        torch.compiler.reset()
        torch.testing.assert_close(compiled(function)(x), function(x))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_shifts(dtype: torch.dtype) -> None:
    """Also by as many bits as a number has, and more."""
    x, bits = of_all(dtype), torch.iinfo(dtype).bits
    amounts = torch.randint(0, bits + 3, x.shape, dtype=dtype)

    def function(x: torch.Tensor, amounts: torch.Tensor) -> list[torch.Tensor]:
        by_numbers = [shifted for k in (0, 1, 5, bits - 1, bits) for shifted in (x << k, x >> k)]
        return [*by_numbers, x << amounts, x >> amounts, torch.bitwise_right_shift(x, 2)]

    assert_same(compiled(function)(x, amounts), function(x, amounts))
    assert not left()
