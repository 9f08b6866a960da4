"""Runs a module eager and compiled on the same inputs and random numbers, and compares values and gradients."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from flagos_backend.frontends.torch.compile.backend import flagos


def compiled(function: Callable[..., Any], **arguments: Any) -> Callable[..., Any]:
    return torch.compile(function, backend=flagos, fullgraph=True, **arguments)


def assert_same(actual: Any, expected: Any, **tolerance: float) -> None:
    """Values, dtypes, sizes and strides."""
    got, want = tree_leaves(actual), tree_leaves(expected)
    assert len(got) == len(want)
    for a, b in zip(got, want, strict=True):
        if not isinstance(b, torch.Tensor):
            assert a == b
            continue
        torch.testing.assert_close(a, b, equal_nan=True, check_stride=True, **tolerance)


def check_function(function: Callable[..., Any], *inputs: Any, **tolerance: float) -> Any:
    """Forward only."""
    seed = int(torch.randint(2**31, ()))
    torch.manual_seed(seed)
    expected = function(*inputs)
    torch.manual_seed(seed)
    actual = compiled(function)(*inputs)
    assert_same(actual, expected, **tolerance)
    return actual


def check_training(module: torch.nn.Module, inputs: Sequence[Any], steps: int = 2, **tolerance: float) -> None:
    """Loss, buffers and every gradient over a few steps of SGD, each on the same random numbers."""
    twin = copy.deepcopy(module)
    run = compiled(twin)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.05) for m in (module, twin)]
    for _ in range(steps):
        seed = int(torch.randint(2**31, ()))
        losses = []
        for call, optimizer in zip((module, run), optimizers, strict=True):
            fresh = tree_map_only(torch.Tensor, lambda t: t.clone(), list(inputs))
            torch.manual_seed(seed)
            optimizer.zero_grad()
            losses.append(call(*fresh))
            losses[-1].backward()
        assert_same(losses[1].detach(), losses[0].detach(), **tolerance)
        for (name, own), other in zip(module.named_parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(other.grad, own.grad, msg=lambda m, name=name: f"{name}: {m}", **tolerance)
        assert_same(list(twin.buffers()), list(module.buffers()), **tolerance)
        for optimizer in optimizers:
            optimizer.step()
