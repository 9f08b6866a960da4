"""The statistics that norms return beside their result, on the host and on the device flagos over its memory: those of
eager mode, also where PyTorch traces others."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from support.torch_compile import assert_same, compiled

aten = torch.ops.aten
DEVICES = ["cpu", "flagos"]
HALF_FLOATS = [torch.bfloat16, torch.float16]
MOMENTUM, EPSILON = 0.1, 1e-5
Norm = Callable[..., tuple[Tensor, ...]]


def with_known(x: Tensor, weight: Tensor, mean: Tensor, variance: Tensor) -> tuple[Tensor, ...]:
    return aten.native_batch_norm(x, weight, weight, mean, variance, False, MOMENTUM, EPSILON)


def with_running(x: Tensor, weight: Tensor, mean: Tensor, variance: Tensor) -> tuple[Tensor, ...]:
    return aten._native_batch_norm_legit(x, weight, weight, mean, variance, True, MOMENTUM, EPSILON)


def with_known_legit(x: Tensor, weight: Tensor, mean: Tensor, variance: Tensor) -> tuple[Tensor, ...]:
    return aten._native_batch_norm_legit(x, weight, weight, mean, variance, False, MOMENTUM, EPSILON)


def with_none(x: Tensor, weight: Tensor, mean: Tensor, variance: Tensor) -> tuple[Tensor, ...]:
    return aten._native_batch_norm_legit(x, weight, weight, True, MOMENTUM, EPSILON)


def with_update(x: Tensor, weight: Tensor, mean: Tensor, variance: Tensor) -> tuple[Tensor, ...]:
    return aten._batch_norm_with_update(x, weight, weight, mean, variance, MOMENTUM, EPSILON)


def without_update(x: Tensor, weight: Tensor, mean: Tensor, variance: Tensor) -> tuple[Tensor, ...]:
    return aten._batch_norm_no_update(x, weight, weight, mean, variance, MOMENTUM, EPSILON)


def of_layers(x: Tensor, weight: Tensor, mean: Tensor, variance: Tensor) -> tuple[Tensor, ...]:
    return aten.native_layer_norm(x, [x.shape[-1]], weight, weight, EPSILON)


def of_groups(x: Tensor, weight: Tensor, mean: Tensor, variance: Tensor) -> tuple[Tensor, ...]:
    return aten.native_group_norm(x, weight, weight, x.shape[0], x.shape[1], x.shape[2], 1, EPSILON)


NORMS = [with_known, with_running, with_known_legit, with_none, with_update, without_update, of_layers, of_groups]


def outcome(
    norm: Norm, device: str, dtype: torch.dtype, parameters: torch.dtype, *, dynamic: bool = False
) -> list[Tensor]:
    """What the compiled norm gives, which is what it gives in eager mode, and leaves in the running statistics."""
    x = torch.randn(4, 5, 5).to(device, dtype)
    weight, mean, variance = (torch.rand(3, 5) + 0.5).to(device, parameters)
    results = []
    for function in (compiled(norm, dynamic=dynamic), norm):
        state = [mean.clone(), variance.clone()]
        results.append([t.cpu() for t in (*function(x, weight, *state), *state)])
    for ours, theirs in zip(*results, strict=True):
        assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
        assert_same(ours, theirs)
    return results[0]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("norm", NORMS, ids=lambda norm: norm.__name__)
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_as_in_eager_mode(device: str, norm: Norm, dynamic: bool) -> None:
    for dtype in HALF_FLOATS:
        outcome(norm, device, dtype, dtype, dynamic=dynamic)
        outcome(norm, device, dtype, torch.float32, dynamic=dynamic)
    outcome(norm, device, torch.float32, torch.float32, dynamic=dynamic)


@pytest.mark.parametrize(("device", "parameters"), [("cpu", torch.float32), ("flagos", None)])
@pytest.mark.parametrize("dtype", HALF_FLOATS, ids=str)
def test_what_is_computed_from_them(device: str, parameters: torch.dtype | None, dtype: torch.dtype) -> None:
    def use(*operands: Tensor) -> tuple[Tensor, ...]:
        _, mean, scale = with_running(*operands)
        return mean * 2, (scale - mean).sum(), torch.stack([mean, scale])

    outcome(use, device, dtype, parameters or dtype)


def test_the_dtype_that_a_program_on_the_device_sees() -> None:
    def use(*operands: Tensor) -> tuple[Tensor, ...]:
        _, mean, scale = with_running(*operands)
        _, of_rows, _ = of_layers(*operands)
        return mean.float() * 3, scale if scale.dtype is torch.bfloat16 else scale + 1, of_rows.float() / 3

    assert outcome(use, "flagos", torch.bfloat16, torch.bfloat16)[0].dtype is torch.float32


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("parameters", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(
    "module", [nn.BatchNorm1d(6), nn.BatchNorm1d(6).eval(), nn.LayerNorm(7), nn.GroupNorm(2, 6)], ids=str
)
def test_gradients_of_half_floats_by_parameters_of_either_width(
    device: str, parameters: torch.dtype, module: nn.Module
) -> None:
    """Those of eager mode to a rounding of what the parameters hold: their statistics are not rounded to 16-bit
    floats."""
    module = copy.deepcopy(module).to(device, parameters)
    with torch.no_grad():
        for tensor in module.state_dict().values():
            if tensor.is_floating_point():
                tensor.copy_(torch.rand(tensor.shape) + 0.5)
    x = (torch.randn(16, 6, 7) * 3 + 7).to(device, torch.bfloat16).requires_grad_()
    gradient = torch.randn(16, 6, 7).to(device, torch.bfloat16)
    gradients = []
    for call in (compiled(module), module):
        found = torch.autograd.grad(call(x), [x, *module.parameters()], gradient)
        gradients.append([tensor.cpu() for tensor in found])
    for ours, theirs in zip(*gradients, strict=True):
        precision = 4 * torch.finfo(ours.dtype).eps
        torch.testing.assert_close(ours, theirs, rtol=precision, atol=precision * float(theirs.abs().max()))
