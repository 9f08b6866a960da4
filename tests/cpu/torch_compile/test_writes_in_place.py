"""Graphs without a backward pass that change their inputs: programs write where these lie, and eager is the oracle."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor

from flagos_backend.frontends.torch.compile import executable, specialization
from flagos_backend.frontends.torch.compile.executable import Launch
from flagos_backend.frontends.torch.compile.program import BuiltProgram
from support.torch_compile import compiled


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[list[Tensor | None]]:
    """What launches return: None for what they wrote to an input."""
    seen: list[list[Tensor | None]] = []

    def launcher_of(program: BuiltProgram, producers: Mapping[int, str] | None = None) -> Launch:
        launch = executable.launcher_of(program, producers)

        def run(inputs: list[Any]) -> list[Tensor]:
            seen.append([*(outputs := launch(inputs))])
            return outputs

        return run

    monkeypatch.setattr(specialization, "launcher_of", launcher_of)
    return seen


def _step(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    before = x.clone()
    after = x * 2 + y
    x.copy_(after)
    return after, before, x.t(), x.sum()


LAYOUTS: dict[str, Callable[[], Tensor]] = {
    "row-major": lambda: torch.randn(4, 6),
    "transposed": lambda: torch.randn(6, 4).t(),
    "with gaps": lambda: torch.randn(4, 12)[:, ::2],
    "expanded": lambda: torch.randn(1, 6).expand(4, 6).clone(),
    "not aligned": lambda: torch.randn(25)[1:].view(4, 6),
}


@pytest.mark.parametrize("device", ["cpu", "flagos"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_changed_input_is_written_where_it_lies(name: str, device: str, launches: list[list[Tensor | None]]) -> None:
    x, y = LAYOUTS[name]().to(device), torch.randn(4, 6).to(device)
    expected, place, version = x * 2 + y, x.data_ptr(), x._version
    step = compiled(lambda x, y: x.mul_(2).add_(y))
    step(torch.empty_strided(x.shape, x.stride(), device=device).fill_(1), y)
    assert step(x, y) is x
    torch.testing.assert_close(x, expected)
    assert (x.data_ptr(), x._version > version) == (place, True)
    assert launches[-1].count(None) == (name not in ("with gaps", "not aligned") or launches[-1][0] is None)


@pytest.mark.parametrize("device", ["cpu", "flagos"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_what_was_there_before_is_returned_as_it_was(name: str, device: str) -> None:
    x, y = LAYOUTS[name]().to(device), torch.randn(4, 6).to(device)
    eager_x = x.clone()
    expected = _step(eager_x, y)
    outputs = compiled(_step)(x, y)
    for ours, eager in zip((*outputs, x), (*expected, eager_x), strict=True):
        torch.testing.assert_close(ours, eager)
    assert outputs[2].data_ptr() == x.data_ptr()
    assert x.data_ptr() not in (outputs[0].data_ptr(), outputs[1].data_ptr())


def test_optimizers_write_to_parameters_and_states(launches: list[list[Tensor | None]]) -> None:
    parameters = [torch.nn.Parameter(torch.randn(64, 33)) for _ in range(3)]
    optimizer = torch.optim.AdamW(parameters)
    for p in parameters:
        p.grad = torch.randn_like(p)
    step = torch.compile(optimizer.step, backend="flagos")
    step()
    assert launches[-1].count(None) == 12  # parameters, two moments and counters


def test_a_failing_call_leaves_the_program_usable() -> None:
    """The input of a call that fails is as far as the program came, as in eager mode."""

    @torch.library.custom_op("flagos_test::refuses_negative", mutates_args=())
    def refuses(x: Tensor) -> Tensor:
        if (x < 0).any():
            raise ValueError("negative")
        return x.sqrt()

    @refuses.register_fake
    def _(x: Tensor) -> Tensor:
        return torch.empty_like(x)

    def function(x: Tensor, y: Tensor) -> Tensor:
        x.add_(y)
        return refuses(x)

    run = compiled(function)
    good = torch.ones(5)
    assert torch.equal(run(good, torch.full((5,), 3.0)), torch.full((5,), 2.0))
    with pytest.raises(ValueError, match="negative"):
        run(torch.ones(5), torch.full((5,), -3.0))
    assert torch.equal(run(good, torch.full((5,), 5.0)), torch.full((5,), 3.0))


def _swap(x: Tensor, y: Tensor) -> Tensor:
    before = x.clone()
    x.copy_(y)
    y.copy_(before)
    return x + y


def _through_views(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    x[1].mul_(3)
    y.t().add_(x)
    return x[1], y


def _hidden_from_autograd(x: Tensor, y: Tensor) -> Tensor:
    x.detach().mul_(2)
    x.data.add_(1)
    return y.add_(x)


@pytest.mark.parametrize("function", [_swap, _through_views, _hidden_from_autograd])
def test_versions_count_as_in_eager_mode(function: Callable[..., Any]) -> None:
    run = compiled(function)
    for _ in range(2):
        given = [torch.randn(4, 4) for _ in range(2)]
        eager = [tensor.clone() for tensor in given]
        torch.testing.assert_close(run(*given), function(*eager))
        torch.testing.assert_close(given, eager)
        assert [t._version > 0 for t in given] == [t._version > 0 for t in eager]


def test_gradients_within_no_grad_are_found() -> None:
    """What looks like a graph without a backward pass may have one."""

    def function(weight: Tensor, x: Tensor) -> Tensor:
        with torch.no_grad():
            x.add_(1)
            with torch.enable_grad():
                return (weight * x).sum()

    weight, x = torch.randn(4, requires_grad=True), torch.randn(4)
    before = x.clone()
    with torch.no_grad():
        loss = compiled(function)(weight, x)
    loss.backward()
    torch.testing.assert_close(x, before + 1)
    torch.testing.assert_close(weight.grad, x)


def test_a_step_copies_nothing_that_was_written() -> None:
    """A call of copy_ for each parameter and moment costs the host more than the rest of a small step."""
    parameters = [torch.nn.Parameter(torch.randn(5, 3)) for _ in range(7)]
    optimizer = torch.optim.AdamW(parameters)
    for p in parameters:
        p.grad = torch.randn_like(p)
    step = torch.compile(optimizer.step, backend="flagos")
    step()
    called: Counter[str] = Counter()

    def count(frame: FrameType, event: str, argument: Any) -> None:
        if event == "c_call":
            called[argument.__name__] += 1

    sys.setprofile(count)
    try:
        step()
    finally:
        sys.setprofile(None)
    assert called["run"] == 1
    assert (called["copy_"], called["detach"]) == (0, 0)
