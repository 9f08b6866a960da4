"""What is taken apart for accelerators, against ATen's own kernels on the host."""

from __future__ import annotations

import itertools

import pytest
import torch

from flagos_backend.frontends.torch.compile import decompositions

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
        # ATen adds 16-bit floats in 16-bit floats
        wide, wide_weight = x.double(), None if weight is None else weight.double()
        loss, total = forward(wide, target, wide_weight, reduction, ignored)
        ours, our_total = decompositions._nll_loss(x, target, weight, reduction, ignored)
        assert ours.dtype == our_total.dtype == dtype
        torch.testing.assert_close(ours.double(), loss, equal_nan=True, rtol=precision, atol=precision)
        if reduction != EACH:
            torch.testing.assert_close(our_total.double(), total, rtol=precision, atol=precision)
        gradient = torch.randn_like(loss).to(dtype)
        expected = backward(gradient.double(), wide, target, wide_weight, reduction, ignored, total)
        ours = decompositions._nll_loss_backward(gradient, x, target, weight, reduction, ignored, total.to(dtype))
        assert ours.dtype == dtype
        torch.testing.assert_close(ours.double(), expected, equal_nan=True, rtol=precision, atol=precision)


def test_infinite_scores_of_other_classes_do_not_count() -> None:
    x = torch.tensor([[-torch.inf, -1.0, -torch.inf], [-2.0, torch.nan, -3.0]])
    loss, _ = decompositions._nll_loss(x, torch.tensor([1, 0]), None, SUM, -100)
    assert loss == 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("affine", [False, True])
def test_batch_norm_hands_known_statistics_on_as_accelerators_do(
    dtype: torch.dtype, affine: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, parameters = torch.randn(4, 5, 3, dtype=dtype), (torch.rand(4, 5) + 0.5).to(dtype)
    weight, bias = parameters[:2] if affine else (None, None)
    mean, variance = parameters[2:]
    call = aten._native_batch_norm_legit_no_training, decompositions._batch_norm_of_accelerators
    expected, simulated = (norm(x, weight, bias, mean, variance, 0.1, 1e-3) for norm in call)
    monkeypatch.setattr(decompositions, "computes_on_host", lambda _: False)
    ours, known, inverse = call[1](x, weight, bias, mean, variance, 0.1, 1e-3)
    torch.testing.assert_close(ours, expected[0])
    torch.testing.assert_close(simulated, expected)
    assert known.dtype is inverse.dtype is torch.float32
    assert known.data_ptr() != mean.data_ptr()
    torch.testing.assert_close(known.double(), mean.double(), rtol=0, atol=0)
    torch.testing.assert_close(inverse.double(), (variance.double() + 1e-3).rsqrt(), rtol=1e-6, atol=0)


_SPECIAL = (torch.nan, torch.inf, -torch.inf, 0.0, -0.0, 1.5, -3e4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("numbers", [{}, {"nan": 2.5}, {"posinf": 7.0, "neginf": -1.0}, {"nan": -1.0, "posinf": 1e9}])
def test_nan_to_num(dtype: torch.dtype, numbers: dict[str, float]) -> None:
    x = torch.cat([torch.tensor(_SPECIAL, dtype=dtype), torch.randn(50, dtype=dtype)])
    ours = decompositions._nan_to_num(x, **numbers)
    assert ours.dtype is dtype
    torch.testing.assert_close(ours, torch.nan_to_num(x, **numbers), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("least", [0, 0.1, -torch.inf, torch.inf, torch.nan])
def test_clamp_min(dtype: torch.dtype, least: float) -> None:
    x = torch.cat([torch.tensor(_SPECIAL, dtype=dtype), torch.randn(50, dtype=dtype)])
    ours = decompositions._lower_bound(x, least)
    assert ours.dtype is dtype
    torch.testing.assert_close(ours, torch.clamp_min(x, least), rtol=0, atol=0, equal_nan=True)


def test_integers_stay_whole() -> None:
    x = torch.arange(5)
    assert decompositions._lower_bound(x, 2) is NotImplemented and decompositions._nan_to_num(x) is NotImplemented
