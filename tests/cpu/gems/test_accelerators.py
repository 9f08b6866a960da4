"""The path of PyTorch's own accelerators, whose tensors FlagGems takes as they are, with the host in the place of one:
FlagGems' own calls of ATen come to the kernels that were patched."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from flagos_backend.devices.target import SIMULATED
from flagos_backend.gems import patching
from flagos_backend.gems.patching import Patch, Place
from flagos_backend.kernels.flaggems import loading
from flagos_backend.kernels.own_calls import OwnCalls, are_own
from flagos_backend.kernels.policy import Policy


@pytest.fixture
def patch(monkeypatch: pytest.MonkeyPatch) -> Iterator[Patch]:
    monkeypatch.setattr(patching, "_target", lambda device_type: SIMULATED)
    found = Patch(Place("cpu", "CPU"), Policy())
    loading.load()
    found.install()
    yield found
    found.remove()


@pytest.fixture
def x(rng: np.random.Generator) -> torch.Tensor:
    return torch.from_numpy(rng.standard_normal((4, 6))).float()


def test_programs_and_their_gradients(patch: Patch, x: torch.Tensor) -> None:
    w = x.t().clone().requires_grad_()
    torch.softmax((x @ w).tanh(), -1).square().sum().backward()
    for name in ("mm", "tanh", "_softmax", "tanh_backward"):
        assert patch.reports[name].flaggems, name
    with OwnCalls():
        exact = x.double().t().clone().requires_grad_()
        torch.softmax((x.double() @ exact).tanh(), -1).square().sum().backward()
        assert w.grad is not None and exact.grad is not None
        torch.testing.assert_close(w.grad.double(), exact.grad, rtol=1e-4, atol=1e-5)


def test_calls_of_flaggems_are_its_own(patch: Patch, x: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    inside: list[bool] = []

    def exp(tensor: torch.Tensor) -> torch.Tensor:
        inside.append(are_own())
        return torch.exp(tensor)  # PyTorch's: else it would not end

    monkeypatch.setitem(loading.functions(), "exp", exp)
    found = torch.exp(x)
    assert inside == [True] and not are_own() and patch.reports["exp"].flaggems == 1
    with OwnCalls():
        assert torch.equal(found, torch.exp(x)) and inside == [True]


def test_after_an_error_calls_are_the_programs_again(
    patch: Patch, x: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(loading.functions(), "sin", lambda tensor: 1 / 0)
    torch.sin(x)
    assert not are_own()
    torch.exp(x)
    assert patch.reports["exp"].flaggems == 1


def test_other_layouts_and_modes(patch: Patch, x: torch.Tensor) -> None:
    """Sparse tensors, lazily negated ones, inference mode and functional transforms come out as without it."""
    sparse = x.relu().to_sparse()
    with torch.inference_mode():
        exponential = torch.exp(x)
    negative = torch._neg_view(x).exp()
    mapped = torch.func.vmap(torch.exp)(x)
    gradient = torch.func.grad(lambda t: torch.exp(t).sum())(x)
    assert patch.reports["exp"].flaggems >= 3
    with OwnCalls():
        assert torch.equal(sparse.to_dense(), x.relu())
        for found, expected in ((exponential, x), (negative, -x), (mapped, x), (gradient, x)):
            torch.testing.assert_close(found, expected.exp(), rtol=1e-5, atol=1e-6)


NUMBERS = (True, 3, 2.1, float("inf"), 1.5 + 2j)
DTYPES = (torch.bool, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64)


CALLS = (lambda t, n: t * n, lambda t, n: n + t, lambda t, n: t / n, lambda t, n: torch.where(t == 1, t, n))


@pytest.mark.parametrize("dims", [(4, 6), ()], ids=str)
@pytest.mark.parametrize("dtype", [*DTYPES, torch.complex64], ids=str)
def test_numbers_beside_tensors(
    patch: Patch, rng: np.random.Generator, dtype: torch.dtype, dims: tuple[int, ...]
) -> None:
    """FlagGems or PyTorch: types and values are those of PyTorch."""
    x = torch.from_numpy(np.asarray(rng.standard_normal(dims) * 3)).to(dtype)
    tolerance = 5e-3 if dtype is torch.float16 else 1e-5  # FlagGems rounds the number to the type first
    for number in NUMBERS:
        if dtype is torch.float16 and isinstance(number, complex):
            continue  # the host divides no complex32
        for call in CALLS:
            found = call(x, number)
            with OwnCalls():
                expected = call(x, number)
                assert found.dtype == expected.dtype, number
                torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance, equal_nan=True)


def test_the_type_beside_numbers_is_pytorchs() -> None:
    """Of what the kernels before get, against the dispatcher without FlagGems."""
    for dtype in (*DTYPES, torch.complex64):
        for dims in ((3,), ()):
            x = torch.ones(dims, dtype=dtype)
            for number in NUMBERS:
                made = patching._tensor_of(number, [x])
                assert (x * made).dtype == (x * number).dtype == torch.result_type(x, number)
                assert made.item() == number or made.dtype in (dtype, torch.float32, torch.complex64)
