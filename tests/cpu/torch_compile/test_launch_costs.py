"""What the host does for a launch does not grow with the number of tensors that its program writes to inputs."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from flagos_backend.frontends.torch.compile import _launcher, device_contexts, executable
from support.torch_compile import compiled


def _steps(count: int) -> Callable[[list[Tensor], list[Tensor]], None]:
    def step(parameters: list[Tensor], gradients: list[Tensor]) -> None:
        for parameter, gradient in zip(parameters[:count], gradients, strict=True):
            parameter.mul_(0.5).add_(gradient)

    return compiled(step)


def _tensors(count: int) -> list[Tensor]:
    return [torch.randn(16) for _ in range(count)]


def _calls(run: Callable[[], Any]) -> int:
    """Calls of functions of ours."""
    calls = 0

    def profile(frame: FrameType, event: str, argument: object) -> None:
        nonlocal calls
        calls += event == "call" and "flagos_backend" in frame.f_code.co_filename

    sys.setprofile(profile)
    try:
        run()
    finally:
        sys.setprofile(None)
    return calls


def test_calls_of_python_do_not_grow_with_what_is_written() -> None:
    counts = []
    for count in (2, 30):
        step, parameters, gradients = _steps(count), _tensors(count), _tensors(count)
        for _ in range(2):
            step(parameters, gradients)
        counts.append(_calls(lambda: step(parameters, gradients)))  # noqa: B023
    assert 0 < counts[0] == counts[1]


@pytest.fixture
def views(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The addresses of which launches made buffers."""
    seen: list[int] = []
    backend = device_contexts.host().context.api
    ffi, table = backend.ffi, backend.backend.api
    counted = ffi.new("FlagosApi*", table[0])

    def buffer_view(arguments: Any) -> Any:
        seen.append(int(ffi.cast("uintptr_t", arguments.data)))
        return table.buffer_view(arguments)

    counted.buffer_view = callback = ffi.callback(ffi.typeof(table.buffer_view), buffer_view)
    kept = [counted, callback]

    def make(handles: tuple[int, ...], *arguments: Any) -> Any:
        launcher = _launcher.Launcher((int(ffi.cast("uintptr_t", kept[0])), *handles[1:]), *arguments)  # type: ignore[arg-type]
        _KEPT.append((kept, launcher))
        return launcher

    monkeypatch.setattr(executable, "_launcher", SimpleNamespace(Launcher=make))
    return seen


_KEPT: list[Any] = []  # launchers call the table as long as they live


def test_what_is_written_where_it_lies_needs_no_new_buffers(views: list[int]) -> None:
    step, parameters, gradients = _steps(5), _tensors(5), _tensors(5)
    eager = [tensor.clone() for tensor in parameters]
    for number in range(4):
        views.clear()
        step(parameters, gradients)
        assert len(views) == (10 if number == 0 else 0)
        eager = [tensor * 0.5 + gradient for tensor, gradient in zip(eager, gradients, strict=True)]
        torch.testing.assert_close(parameters, eager)


def test_a_tensor_elsewhere_is_written_there(views: list[int]) -> None:
    step, gradients = _steps(3), _tensors(3)
    first, second = _tensors(3), _tensors(3)
    for parameters in (first, second, first, second):
        views.clear()
        expected = [t * 0.5 + g for t, g in zip(parameters, gradients, strict=True)]
        step(parameters, gradients)
        torch.testing.assert_close(parameters, expected)
        assert {t.data_ptr() for t in parameters} <= set(views)


def test_a_copy_at_the_address_of_what_was_written_is_not_taken_for_it(views: list[int]) -> None:
    """The program is given a copy of a negated tensor, which often lies where a tensor that is gone did."""
    step, gradients, parameters = _steps(1), _tensors(1), _tensors(1)
    step(parameters, gradients)
    _, launcher = _KEPT[-1]
    for _ in range(10):
        inputs = [torch.randn(16), torch.randn(16)]
        before = [tensor.clone() for tensor in inputs]
        assert launcher.run(list(inputs)) == [None]
        (written,) = [n for n in range(2) if not torch.equal(inputs[n], before[n])]
        base = torch.randn(16)
        inputs[written], kept = base._neg_view(), base.clone()
        (result,) = launcher.run(list(inputs))
        torch.testing.assert_close(result, -kept * 0.5 + inputs[1 - written])
        assert torch.equal(base, kept)
        del base, kept, result, before, inputs


def test_inputs_that_are_one_tensor(views: list[int]) -> None:
    def step(x: Tensor, y: Tensor) -> None:
        x.mul_(2)
        y.add_(1)

    run = compiled(step)
    for _ in range(3):
        x, y = torch.randn(16), torch.randn(16)
        expected = x * 2, y + 1
        run(x, y)
        torch.testing.assert_close((x, y), expected)
        one = x.clone()
        expected_one = x * 2 + 1
        run(one, one)
        torch.testing.assert_close(one, expected_one)
