"""Numbers of Python's module ``random`` in a compiled function: those of eager mode, drawn from the same generator."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from flagos_backend.frontends.torch.compile.backend import flagos
from support.torch_compile import assert_same


def scaled(x: Tensor) -> Tensor:
    return x * random.uniform(0.9, 1.1) + random.randint(0, 3)


def of_an_own_generator(x: Tensor) -> Tensor:
    return x * random.Random(3).random() + random.Random(4).uniform(1, 2)


def chosen(x: Tensor) -> Tensor:
    return x * 2 if random.uniform(0, 1) < 0.5 else x * 3


def chosen_by_an_own_generator(x: Tensor) -> Tensor:
    return x * 2 if random.Random(3).random() < 0.5 else x * 3


def returned(x: Tensor) -> tuple[Tensor, float]:
    return x * random.uniform(0, 1), random.uniform(0, 1)


PROGRAMS = [scaled, of_an_own_generator, chosen, chosen_by_an_own_generator, returned]


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    state = random.getstate()
    yield
    random.setstate(state)


@pytest.mark.parametrize("device", ["cpu", "flagos"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_as_in_eager_mode(program: Callable[[Tensor], object], dtype: torch.dtype, device: str) -> None:
    x = (torch.rand(4) + 0.5).to(device, dtype)  # no sum cancels: programs round the number itself to a half
    outcomes = []
    for call in (torch.compile(program, backend=flagos), program):
        random.seed(0)
        outcomes.append([[call(x) for _ in range(3)], random.random()])
    assert_same(*outcomes)


@pytest.mark.parametrize("device", ["cpu", "flagos"])
def test_gradients(device: str) -> None:
    gradients = []
    for call in (torch.compile(scaled, backend=flagos), scaled):
        random.seed(0)
        x = torch.ones(4, dtype=torch.float64).to(device).requires_grad_()
        (call(x) + call(x)).square().sum().backward()
        gradients.append(x.grad)
    assert_same(*gradients)
