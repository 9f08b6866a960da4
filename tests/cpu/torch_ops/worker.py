"""One of two processes among which fusible operations are divided."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch.nn import functional as F

from flagos_backend.frontends.torch import autoload, ops
from support.processes import make_checks

RANK = int(os.environ["RANK"])


def _part(tensor: torch.Tensor, dim: int = 0) -> torch.Tensor:
    return tensor.chunk(2, dim)[RANK].contiguous()


def _divided_layers(sequence: bool, compiled: bool) -> None:
    """Two layers, the first divided by columns, the second by rows, against the whole."""
    torch._dynamo.reset()
    x, w1, w2, grad = torch.randn(6, 4), torch.randn(8, 4), torch.randn(4, 8), torch.randn(6, 4)
    a, b, c = (t.double().requires_grad_() for t in (x, w1, w2))
    expected = F.linear(F.silu(F.linear(a, b)), c)
    expected.backward(grad.double())
    options: dict[str, Any] = {"bias": False, "sequence_parallel": sequence}
    module = ops.Sequential(
        ops.Linear(4, 8, tensor_parallel_mode="column", **options),
        ops.SiLU(),
        ops.Linear(8, 4, tensor_parallel_mode="row", **options),
    )
    first, second = module[0], module[2]
    with torch.no_grad():
        first.weight.copy_(_part(w1))
        second.weight.copy_(_part(w2, 1))
    own = (_part(x) if sequence else x.clone()).requires_grad_()
    run = torch.compile(module, backend="eager", fullgraph=True) if compiled else module
    y = run(own)
    y.backward(_part(grad) if sequence else grad)
    for ours, theirs in (
        (y, _part(expected) if sequence else expected),
        (own.grad, _part(a.grad) if sequence else a.grad),
        (first.weight.grad, _part(b.grad)),
        (second.weight.grad, _part(c.grad, 1)),
    ):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-4, atol=1e-4)


def divided_layers() -> None:
    _divided_layers(sequence=False, compiled=False)
    _divided_layers(sequence=False, compiled=True)


def divided_layers_and_sequences() -> None:
    _divided_layers(sequence=True, compiled=False)
    _divided_layers(sequence=True, compiled=True)


def collectives_alone() -> None:
    whole = torch.arange(8.0).reshape(4, 2)
    mine = _part(whole).requires_grad_()
    gathered = ops.AllGather()(mine)
    torch.testing.assert_close(gathered, whole)
    gathered.backward(torch.full((4, 2), RANK + 1.0))
    torch.testing.assert_close(mine.grad, torch.full((2, 2), 3.0))
    both = (whole * (RANK + 1)).requires_grad_()
    torch.testing.assert_close(ops.AllReduce()(both), whole * 3)
    scattered = ops.ReduceScatter()(both)
    torch.testing.assert_close(scattered, _part(whole * 3))
    scattered.backward(torch.full((2, 2), RANK + 1.0))
    torch.testing.assert_close(both.grad, torch.tensor([1.0, 1, 2, 2])[:, None].expand(4, 2))


def refused_divisions() -> None:
    with pytest.raises(ValueError, match="cannot be scattered"):
        ops.ReduceScatter()(torch.randn(3, 2))
    with pytest.raises(ValueError, match="cannot divide"):
        ops.BasicLinear(4, 5, tensor_parallel_mode="column")


if __name__ == "__main__":
    reason = autoload.enable()
    assert not reason, reason
    torch.manual_seed(int(os.environ["FLAGOS_TEST_SEED"]))  # one and the same in both
    dist.init_process_group("gloo", init_method=os.environ["RENDEZVOUS"], rank=RANK, world_size=2)
    make_checks((divided_layers, divided_layers_and_sequences, collectives_alone, refused_divisions))
