"""torch.compile(backend="flagos") on tensors of the accelerator's own device, against eager PyTorch there."""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from flagos_backend.frontends.torch.compile.backend import flagos
from flagos_backend.runtime.accelerator.graphs import GraphReplay

DEVICE = torch.device(os.environ["FLAGOS_DEVICE"], 0)
MODULE = torch.get_device_module(DEVICE)
# Past the first launches, after which programs are replayed.
RUNS = 5


@pytest.fixture(autouse=True)
def fresh() -> None:
    torch.compiler.reset()


class Block(nn.Module):
    """A transformer block with causal attention."""

    def __init__(self, width: int = 64, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.RMSNorm(width)])
        self.mix, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.feed = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        parts = self.mix(self.norms[0](x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(*parts, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.feed(self.norms[1](x))


def test_training_steps_are_those_of_eager() -> None:
    eager, model = Block().to(DEVICE), Block().to(DEVICE)
    model.load_state_dict(eager.state_dict())
    compiled = torch.compile(model, backend=flagos)
    optimizers = [torch.optim.AdamW(m.parameters(), 1e-3) for m in (eager, model)]
    for _ in range(RUNS):
        x = torch.randn(2, 16, 64, device=DEVICE)
        losses = [m(x).square().mean() for m in (eager, compiled)]
        for loss, optimizer in zip(losses, optimizers, strict=True):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        torch.testing.assert_close(losses[1], losses[0], rtol=1e-4, atol=1e-5)
    for ours, theirs in zip(model.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-3, atol=1e-4)


def test_a_side_stream_sees_its_own_order() -> None:
    compiled = torch.compile(lambda x, y: (x @ y).softmax(-1) + 1, backend=flagos)
    stream = MODULE.Stream(device=DEVICE)
    for _ in range(RUNS):
        with MODULE.stream(stream):
            x = torch.randn(512, 512, device=DEVICE)
            ours, theirs = compiled(x, x), (x @ x).softmax(-1) + 1
            x.zero_()
        stream.synchronize()
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_what_the_host_has_is_brought_along() -> None:
    compiled = torch.compile(lambda x, factor: ((x * factor).cpu(), x + factor), backend=flagos)
    x, factor = torch.randn(33, device=DEVICE), torch.tensor(2.5)
    for _ in range(RUNS):
        on_host, there = compiled(x, factor)
        torch.testing.assert_close(on_host, (x * factor).cpu())
        torch.testing.assert_close(there, x + factor)


def test_random_numbers_follow_the_seed_and_change() -> None:
    compiled = torch.compile(lambda x: functional.dropout(x, 0.5), backend=flagos)
    x = torch.ones(1000, device=DEVICE)
    draws = []
    for _ in range(2):
        MODULE.manual_seed(3)
        draws.append([compiled(x) for _ in range(RUNS)])
    for first, second in zip(*draws, strict=True):
        torch.testing.assert_close(first, second)
    assert not torch.equal(draws[0][3], draws[0][4])


def test_the_second_device_runs_its_own_programs() -> None:
    if MODULE.device_count() < 2:
        pytest.skip(f"one {DEVICE.type} device here, and this needs two")
    other = torch.device(DEVICE.type, 1)
    compiled = torch.compile(lambda x: x.exp().sum(1), backend=flagos)
    for device in (DEVICE, other):
        x = torch.randn(8, 9, device=device)
        for _ in range(RUNS):
            result = compiled(x)
            assert result.device == device
            torch.testing.assert_close(result, x.exp().sum(1))


def test_dropout_is_drawn_anew_between_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    launched = []
    launch = GraphReplay.launch

    def counted(self: GraphReplay, arrays: Sequence[Any]) -> None:
        launched.append(len(arrays))
        launch(self, arrays)

    monkeypatch.setattr(GraphReplay, "launch", counted)

    def program(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        for _ in range(4):
            x = (x @ x.T).softmax(-1) @ x + 1
        dropped = functional.dropout(x, 0.5)
        y = dropped
        for _ in range(4):
            y = (y @ y.T).softmax(-1) @ y
        return dropped, y

    compiled = torch.compile(program, backend=flagos)
    masks = []
    for number in range(RUNS):
        x, before = torch.randn(64, 32, device=DEVICE), len(launched)
        dropped, y = compiled(x)
        kept = dropped != 0
        for _ in range(4):
            x = (x @ x.T).softmax(-1) @ x + 1
        torch.testing.assert_close(dropped, torch.where(kept, 2 * x, 0), rtol=1e-3, atol=1e-3)
        for _ in range(4):
            dropped = (dropped @ dropped.T).softmax(-1) @ dropped
        torch.testing.assert_close(y, dropped, rtol=1e-3, atol=1e-3)
        assert 0.4 < kept.float().mean() < 0.6
        masks.append(kept)
        if number >= 2:
            assert len(launched) - before >= 2
    assert not any(torch.equal(a, b) for a, b in itertools.pairwise(masks))


def test_tensors_made_on_a_device_without_a_number() -> None:
    """Of a program that is given none."""

    def made() -> torch.Tensor:
        numbers = torch.arange(6.0, device=DEVICE.type)
        return numbers + torch.linspace(0, 1, 6, device=DEVICE.type) + torch.eye(6, device=DEVICE.type)

    found = torch.compile(made, backend=flagos)()
    assert found.device == DEVICE
    torch.testing.assert_close(found, made())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_groups_of_any_number_of_channels(dtype: torch.dtype) -> None:
    """FlagGems' kernels mix those whose number is no power of two."""
    x = torch.randn(2, 60, 7, 9, device=DEVICE, dtype=dtype)
    weight, bias = (torch.randn(60, device=DEVICE, dtype=dtype) for _ in range(2))
    for groups in (1, 2, 6, 15, 60):

        def norm(x: torch.Tensor, groups: int = groups) -> torch.Tensor:
            return functional.group_norm(x, groups, weight, bias)

        expected = functional.group_norm(x.double(), groups, weight.double(), bias.double())
        found = torch.compile(norm, backend=flagos)(x)
        torch.testing.assert_close(found.double(), expected, rtol=1e-2, atol=1e-2)


def test_pools_whose_windows_end_past_the_padding() -> None:
    x = torch.randn(2, 3, 9, device=DEVICE)

    def pool(x: torch.Tensor) -> torch.Tensor:
        return functional.avg_pool1d(x, 7, stride=3, padding=3, ceil_mode=True)

    torch.testing.assert_close(torch.compile(pool, backend=flagos)(x).cpu(), pool(x.cpu()))


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_embedding_bags(mode: str) -> None:
    indices, offsets = torch.tensor([1, 2, 4, 5, 4], device=DEVICE), torch.tensor([0, 3], device=DEVICE)
    dtype = torch.float32 if mode == "max" else torch.bfloat16  # PyTorch has no derivative of that
    weight = torch.randn(6, 4, device=DEVICE, dtype=dtype, requires_grad=True)

    def bags(weight: torch.Tensor) -> torch.Tensor:
        return functional.embedding_bag(indices, weight, offsets, mode=mode)

    gradients = [torch.autograd.grad(f(weight).sum(), weight) for f in (torch.compile(bags, backend=flagos), bags)]
    torch.testing.assert_close(*gradients)
