"""Losses and norms that are native on the host, with gradients, against eager; targets that are no class."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from flagos_backend.frontends.torch.compile import report
from support.torch_compile import assert_same, compiled


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("weighted", [False, True])
def test_cross_entropy(reduction: str, weighted: bool) -> None:
    def loss(x: torch.Tensor, target: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(x, target, weight if weighted else None, ignore_index=-7, reduction=reduction)

    x, weight = torch.randn(8, 5, dtype=torch.float64), torch.rand(5, dtype=torch.float64)
    target = torch.tensor([0, 4, -7, 2, 2, -7, 1, 3])
    torch.compiler.reset()
    report.clear()
    ours = compiled(loss)
    gradients, results = [], []
    for function in (loss, ours):
        leaf = x.clone().requires_grad_()
        result = function(leaf, target, weight)
        (result * 2).sum().backward()
        gradients.append(leaf.grad)
        results.append(result.detach())
    assert_same(results[1], results[0], rtol=1e-12, atol=1e-12)
    assert_same(gradients[1], gradients[0], rtol=1e-12, atol=1e-12)
    assert not any(graph.whole or graph.fallback for graph in report.reports())
    for bad in (5, -1, 1 << 40):
        wrong = target.clone()
        wrong[3] = bad
        with pytest.raises(IndexError, match=f"Target {bad} is out of bounds."):
            loss(x, wrong, weight)
        with pytest.raises(IndexError, match=f"Target {bad} is out of bounds."):
            ours(x, wrong, weight)
    nothing_counts = torch.full((8,), -7)
    assert_same(ours(x, nothing_counts, weight), loss(x, nothing_counts, weight), rtol=1e-12, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_functions_of_few_operators(dtype: torch.dtype) -> None:
    def program(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        parts = [
            F.binary_cross_entropy_with_logits(x, y.sigmoid(), pos_weight=torch.full((9,), 2.0, dtype=dtype)),
            F.smooth_l1_loss(x, y, beta=0.5),
            F.logsigmoid(x).sum(),
            x.logsumexp(-1).sum(),
            torch.linalg.vector_norm(x, 3, dim=-1).sum() + x.norm(),
            (F.pad(x[None], (3, 2), mode="reflect") * F.pad(y[None], (3, 2), mode="replicate")).sum(),
            (F.pad(x[None], (1, 2, 3, 0), mode="reflect") * 2).sum(),
        ]
        return torch.stack(parts)

    x, y = torch.randn(6, 9, dtype=dtype), torch.randn(6, 9, dtype=dtype)
    torch.compiler.reset()
    report.clear()
    gradients, results = [], []
    for function in (program, compiled(program)):
        leaves = [x.clone().requires_grad_(), y.clone().requires_grad_()]
        result = function(*leaves)
        (result * torch.arange(1, 8)).sum().backward()
        gradients += [leaf.grad for leaf in leaves]
        results.append(result.detach())
    tolerance = torch.finfo(dtype).eps * 64
    assert_same(results[1], results[0], rtol=tolerance, atol=tolerance)
    for ours, theirs in zip(gradients[2:], gradients[:2], strict=True):
        assert_same(ours, theirs, rtol=tolerance, atol=tolerance)
    whole = {name for graph in report.reports() for name in (*graph.whole, *graph.fallback)}
    assert whole <= {"aten.replication_pad1d_backward.default"}
