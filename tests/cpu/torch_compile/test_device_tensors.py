"""Tensors on the device flagos: what goes in comes out there, over the same memory, and eager flagos is the oracle."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils._pytree import tree_leaves, tree_map

from flagos_backend.frontends.torch.compile import report
from support.torch_compile import assert_same, compiled


def check(function: Callable[..., Any], *inputs: torch.Tensor) -> None:
    outcomes = []
    for call in (compiled(function), function):
        outcome = call(*(x.clone() for x in inputs))
        assert {tensor.device.type for tensor in tree_leaves(outcome)} == {"flagos"}
        outcomes.append(tree_map(torch.Tensor.cpu, outcome))
    assert_same(*outcomes)


def test_values_strides_and_new_tensors() -> None:
    x = torch.randn(4, 6, device="flagos")
    check(lambda x: (x.t() + 1, x.sum(0), x[:, ::2] * 2, x + torch.arange(6, device="flagos")), x)
    check(lambda x: (x.cpu() + 1).to("flagos"), x)


def test_memory_is_the_callers() -> None:
    run, x = compiled(lambda x: x + 1), torch.zeros(64, device="flagos")
    run(x)
    x.fill_(5)
    assert run(x).cpu().eq(6).all()


def test_training() -> None:
    module = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 3)).to("flagos")
    twin = copy.deepcopy(module)
    run = compiled(twin)
    for _ in range(2):
        x, target = torch.randn(5, 6, device="flagos"), torch.randint(3, (5,), device="flagos")
        losses = [functional.cross_entropy(call(x), target) for call in (module, run)]
        for loss in losses:
            loss.backward()
        torch.testing.assert_close(losses[1].cpu(), losses[0].cpu())
        for own, other in zip(module.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(other.grad.cpu(), own.grad.cpu(), rtol=1e-4, atol=1e-6)


def test_attention_and_norm_stay_whole() -> None:
    q, k, v = (torch.randn(1, 2, 8, 4, device="flagos", requires_grad=True) for _ in range(3))
    weight = torch.randn(4, device="flagos")

    def block(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(functional.scaled_dot_product_attention(q, k, v, is_causal=True), (4,), weight)

    gradients = []
    for call in (compiled(block), block):
        gradients.append([g.cpu() for g in torch.autograd.grad(call(q, k, v).square().sum(), (q, k, v))])
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-4, atol=1e-5)
    whole = [name for known in report.reports() for name in known.whole]
    assert "aten._scaled_dot_product_flash_attention_for_cpu.default" in whole
    assert "aten._scaled_dot_product_flash_attention_for_cpu_backward.default" in whole


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("affine", [True, False])
def test_batch_norm(dtype: torch.dtype, training: bool, affine: bool) -> None:
    """PyTorch would trace its statistics as an accelerator's: of float32, and known ones handed on."""
    module = nn.BatchNorm2d(5, affine=affine, dtype=dtype, device="flagos").train(training)
    with torch.no_grad():
        for tensor in module.state_dict().values():
            if tensor.is_floating_point():
                tensor.copy_(torch.rand(5) + 0.5)
    twin = copy.deepcopy(module)
    x = torch.randn(4, 5, 3, 2, dtype=dtype, device="flagos")
    grad = torch.randn_like(x)
    outcomes = []
    for call, owner in ((compiled(twin), twin), (module, module)):
        taken = x.clone().requires_grad_()
        y = call(taken)
        y.backward(grad)
        gradients = [taken.grad, *(p.grad for p in owner.parameters())]
        outcomes.append([t.detach().cpu() for t in (y, *gradients, *owner.buffers()) if t is not None])
    torch.testing.assert_close(*outcomes)


def test_random_numbers_are_the_devices() -> None:
    drop, x = compiled(lambda x: functional.dropout(x, 0.5)), torch.ones(1000, device="flagos")
    host = torch.get_rng_state()
    torch.flagos.manual_seed(5)
    first, second = drop(x).cpu(), drop(x).cpu()
    torch.flagos.manual_seed(5)
    assert torch.equal(drop(x).cpu(), first) and not torch.equal(first, second)
    assert torch.equal(torch.get_rng_state(), host)


def test_custom_operators_and_conditionals_see_the_device() -> None:
    seen = []

    @torch.library.custom_op("flagos_tests::where_it_is", mutates_args=())
    def where_it_is(x: torch.Tensor) -> torch.Tensor:
        seen.append(x.device.type)
        return x * 2

    where_it_is.register_fake(torch.empty_like)

    def program(x: torch.Tensor) -> torch.Tensor:
        chosen = torch.cond(x.sum() > 0, lambda x: x + torch.ones(3, device="flagos"), lambda x: x.cos(), (x,))
        return where_it_is(chosen) + 1

    check(program, torch.ones(3, device="flagos"))
    assert set(seen) == {"flagos"}


def test_tensors_on_two_devices_are_refused_as_in_eager() -> None:
    with pytest.raises(Exception, match=r"same device|two devices|two different devices"):
        compiled(lambda x, y: x + y)(torch.ones(3, device="flagos"), torch.ones(3))
