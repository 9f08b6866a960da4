"""Operators that are taken apart to be fused: as eager PyTorch has them, and whole only in types that the loops of the
host do not compute in."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from flagos_backend.frontends.torch.compile import report
from support.torch_compile import compiled

Case = tuple[Callable[..., Tensor], Sequence[tuple[int, ...]]]
_X = (5, 7, 33)
CASES: dict[str, Case] = {
    "softmax": (lambda x: x.softmax(-1), [_X]),
    "softmax of columns": (lambda x: x.softmax(1), [_X]),
    "log_softmax": (lambda x: x.log_softmax(-1), [_X]),
    "log_softmax of a number": (lambda x: x.log_softmax(0), [()]),
    "softmax of nothing": (lambda x: x.softmax(-1), [(3, 0)]),
    "layer norm": (lambda x, w, b: functional.layer_norm(x, (33,), w, b), [_X, (33,), (33,)]),
    "layer norm of two dimensions": (lambda x, w: functional.layer_norm(x, (7, 33), w), [_X, (7, 33)]),
    "layer norm without parameters": (lambda x: functional.layer_norm(x, (33,), eps=0.1), [_X]),
    "layer norm of no rows": (lambda x, w, b: functional.layer_norm(x, (33,), w, b), [(0, 33), (33,), (33,)]),
    "layer norm of columns in another view": (
        lambda x, w: functional.layer_norm(x.permute(2, 0, 1), (7,), w).view(-1),
        [_X, (7,)],
    ),
    "RMS norm": (lambda x, w: functional.rms_norm(x, (33,), w), [_X, (33,)]),
    "gelu": (lambda x: functional.gelu(x), [_X]),
    "gelu by tanh": (lambda x: functional.gelu(x, approximate="tanh"), [_X]),
    "silu": (lambda x, y: functional.silu(x) * y, [_X, _X]),
    "tanh": (torch.tanh, [_X]),
    "squared error": (lambda x, y: functional.mse_loss(x, y), [_X, _X]),
    "squared errors": (lambda x, y: functional.mse_loss(x, y, reduction="none"), [_X, _X]),
}
TYPES = {torch.float32: 2e-6, torch.float64: 1e-14, torch.bfloat16: 2e-2}


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients(name: str, dtype: torch.dtype) -> None:
    function, shapes = CASES[name]
    inputs = [torch.randn(shape).to(dtype).requires_grad_() for shape in shapes]
    results = []
    for run in (compiled(function), function):
        result = run(*inputs)
        gradient = torch.linspace(-1, 2, result.numel(), dtype=dtype).reshape(result.shape)
        results.append([result, *torch.autograd.grad(result, inputs, gradient)])
    for ours, eager in zip(*results, strict=True):
        # Sums over rows round as often as they add.
        bound = TYPES[dtype] * max(1.0, float(eager.double().abs().max() if eager.numel() else 0.0))
        torch.testing.assert_close(ours, eager, rtol=TYPES[dtype], atol=8 * bound)
    if dtype is not torch.bfloat16:
        assert not any(known.whole for known in report.reports())


@pytest.mark.parametrize("function", [torch.softmax, torch.log_softmax])
def test_rows_with_infinities(function: Callable[..., Tensor]) -> None:
    x = torch.randn(6, 20)
    x[0], x[1, 3], x[2, 4], x[3, 5] = -torch.inf, torch.inf, torch.nan, -torch.inf
    torch.testing.assert_close(compiled(function)(x, -1), function(x, -1), equal_nan=True)


@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("shape", [(9, 13), (13,), (3, 13, 4, 5)], ids=str)
def test_losses_of_classes(shape: tuple[int, ...], weighted: bool, reduction: str) -> None:
    places = [*shape[:1], *shape[2:]] if len(shape) > 1 else []
    target = torch.randint(13, places)
    if places:
        target.view(-1)[1] = -100  # is ignored
    weight = torch.rand(13) if weighted else None
    x = torch.randn(shape, requires_grad=True)

    def loss(x: Tensor) -> Tensor:
        return functional.cross_entropy(x, target, weight, reduction=reduction)

    results = []
    for run in (compiled(loss), loss):
        result = run(x)
        results.append([result, *torch.autograd.grad(result.sum(), x)])
    torch.testing.assert_close(*results)


def test_a_target_that_is_no_class_is_an_error() -> None:
    x, target = torch.randn(3, 5), torch.tensor([0, 5, 1])
    with pytest.raises(IndexError, match="out of bounds"):
        compiled(functional.cross_entropy)(x, target)
