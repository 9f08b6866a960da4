"""What is taken apart for accelerators, against ATen's own kernels on the host."""

from __future__ import annotations

import itertools

import pytest
import torch

from flagos_backend.torch.compile import decompositions

aten = torch.ops.aten
# PyTorch's number of each way to reduce.
EACH, MEAN, SUM = 0, 1, 2
SHAPES = {"one": (7,), "rows": (5, 7), "a single row": (1, 3), "images": (2, 7, 3, 4)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("weighted", [False, True])
def test_negative_log_likelihood(dtype: torch.dtype, shape: tuple[int, ...], weighted: bool) -> None:
    forward, backward = (aten.nll_loss_forward, aten.nll_loss_backward)
    if len(shape) == 4:
        forward, backward = (aten.nll_loss2d_forward, aten.nll_loss2d_backward)
    precision = {torch.bfloat16: 2e-2, torch.float32: 1e-6}.get(dtype, 1e-14)
    for reduction, ignored in itertools.product((EACH, MEAN, SUM), (-100, 1)):
        x, classes = torch.randn(shape, dtype=dtype), shape[min(len(shape) - 1, 1)]
        target = torch.randint(classes, () if len(shape) == 1 else (shape[0], *shape[2:]))
        if target.dim():
            target.view(-1)[0] = ignored  # of a single row that leaves nothing, and a mean of NaN
        weight = torch.rand(classes, dtype=dtype) if weighted else None
        loss, total = forward(x, target, weight, reduction, ignored)
        ours, our_total = decompositions._nll_loss(x, target, weight, reduction, ignored)
        torch.testing.assert_close(ours, loss, equal_nan=True, rtol=precision, atol=precision)
        if reduction != EACH:
            torch.testing.assert_close(our_total, total, rtol=precision, atol=precision)
        gradient = torch.randn_like(loss)
        expected = backward(gradient, x, target, weight, reduction, ignored, total)
        ours = decompositions._nll_loss_backward(gradient, x, target, weight, reduction, ignored, total)
        torch.testing.assert_close(ours, expected, equal_nan=True, rtol=precision, atol=precision)


def test_infinite_scores_of_other_classes_do_not_count() -> None:
    x = torch.tensor([[-torch.inf, -1.0, -torch.inf], [-2.0, torch.nan, -3.0]])
    loss, _ = decompositions._nll_loss(x, torch.tensor([1, 0]), None, SUM, -100)
    assert loss == 3
