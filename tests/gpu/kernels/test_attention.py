"""Every provider's attention on the accelerator against dense float64 einsums."""

from dataclasses import replace

import pytest
import torch

from flagos_backend.devices.accelerator import TorchAccelerator
from flagos_backend.ir.types import ElementType
from flagos_backend.kernels.attention import BACKWARD, FORWARD
from flagos_backend.kernels.choice import implementations_of
from flagos_backend.kernels.implementation import Provider
from support.attention import BIAS_GRADIENTS, CASES, SIZES, assert_close, oracle, problem

E = ElementType
DEVICE = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
LONGER = {**SIZES, "t": 200, "s": 333, "d": 64, "e": 128}
SQUARE = {**SIZES, "t": 333, "s": 333, "d": 64, "e": 64}
HALF = [E.BF16, E.F16]


@pytest.fixture(scope="module")
def target():
    return TorchAccelerator(DEVICE.type, 0).target


def check(p, target, element):
    """Every variant of every provider that supports the problem; the backward takes each forward's statistics."""
    (output, statistics), gradients = oracle(p)
    results = []
    for implementation in implementations_of(FORWARD):
        if not implementation.unsupported(p.calls[0], target):
            for variant in implementation.variants(p.calls[0], target):
                who = f"{implementation.identifier} ({variant.name})"
                ours = p.forward(variant.kernel)
                assert_close(ours[0], output, element, who)
                assert_close(ours[1], statistics.clamp_min(-1e30), E.F32, who)
                results.append((implementation.provider, ours))
                if implementation.provider is Provider.TRITON:
                    break  # its variants differ in the sizes of blocks only, which the tables measure
    ran = {provider for provider, _ in results}
    for implementation in implementations_of(BACKWARD):
        if not implementation.unsupported(p.calls[1], target):
            variants = implementation.variants(p.calls[1], target)
            for variant in variants[:1] if implementation.provider is Provider.TRITON else variants:
                for _, forward in results[:2]:
                    for ours, exact in zip(p.backward(variant.kernel, *forward), gradients, strict=True):
                        assert_close(ours, exact, element, f"{implementation.identifier} ({variant.name})")
    return ran


@pytest.mark.parametrize("name", CASES)
def test_small(name, target, rng):
    p = problem(CASES[name], E.BF16, int(rng.integers(1 << 30)), DEVICE.type)
    assert Provider.TRITON in check(p, target, E.BF16)


@pytest.mark.parametrize("name", ["plain", "causal", "mask, window", "bias, mask, causal"])
def test_longer(name, target, rng):
    p = problem(CASES[name], E.F16, int(rng.integers(1 << 30)), DEVICE.type, LONGER)
    assert Provider.TRITON in check(p, target, E.F16)


@pytest.mark.parametrize("element", [*HALF, E.F32], ids=lambda e: e.name)
@pytest.mark.parametrize("name", BIAS_GRADIENTS)
def test_gradients_of_biases(name, element, target, rng):
    attention, dims = BIAS_GRADIENTS[name]
    p = problem(attention, element, int(rng.integers(1 << 30)), DEVICE.type, of_bias=dims)
    assert Provider.TRITON in check(p, target, element)


@pytest.mark.parametrize(
    "name", ["shared by batches", "shared by all", "causal", "window", "added mask, window", "of keys"]
)
def test_longer_gradients_of_biases(name, target, rng):
    """In every size of blocks, and the same in every run."""
    attention, dims = BIAS_GRADIENTS[name]
    p = problem(attention, E.BF16, int(rng.integers(1 << 30)), DEVICE.type, LONGER, of_bias=dims)
    _, gradients = oracle(p)
    (forward,) = (i for i in implementations_of(FORWARD) if i.provider is Provider.TRITON)
    (backward,) = (i for i in implementations_of(BACKWARD) if i.provider is Provider.TRITON)
    ours = p.forward(forward.variants(p.calls[0], target)[0].kernel)
    for variant in backward.variants(p.calls[1], target):
        first, second = (p.backward(variant.kernel, *ours)[-1] for _ in range(2))
        assert_close(first, gradients[-1], E.BF16, variant.name)
        assert torch.equal(first, second)


def test_gradients_of_biases_of_rows_that_see_no_key(target, rng):
    attention, dims = BIAS_GRADIENTS["added mask, window"]
    p = problem(attention, E.F16, int(rng.integers(1 << 30)), DEVICE.type, LONGER, hide_all=True, of_bias=dims)
    assert Provider.TRITON in check(p, target, E.F16)


def test_f32(target, rng):
    p = problem(CASES["causal"], E.F32, int(rng.integers(1 << 30)), DEVICE.type, LONGER)
    assert Provider.TRITON in check(p, target, E.F32)


def test_f32_rounded_to_tf32(target, rng):
    """TF32 has the significand of f16."""
    attention = replace(CASES["causal"], tensor_float=True)
    (output, _), gradients = oracle(p := problem(attention, E.F32, int(rng.integers(1 << 30)), DEVICE.type, LONGER))
    (forward,) = (i for i in implementations_of(FORWARD) if i.provider is Provider.TRITON)
    (backward,) = (i for i in implementations_of(BACKWARD) if i.provider is Provider.TRITON)
    for variant in forward.variants(p.calls[0], target):
        ours = p.forward(variant.kernel)
        assert_close(ours[0], output, E.F16)
    for variant in backward.variants(p.calls[1], target):
        for gradient, exact in zip(p.backward(variant.kernel, *ours), gradients, strict=True):
            assert_close(gradient, exact, E.F16)


@pytest.mark.parametrize("element", HALF, ids=lambda e: e.name)
@pytest.mark.parametrize("name", ["plain", "causal"])
def test_square(name, element, target, rng):
    p = problem(CASES[name], element, int(rng.integers(1 << 30)), DEVICE.type, SQUARE)
    assert {Provider.TRITON, Provider.VENDOR} <= check(p, target, element)


def test_rows_that_see_no_key(target, rng):
    p = problem(CASES["mask, causal"], E.F16, int(rng.integers(1 << 30)), DEVICE.type, LONGER, hide_all=True)
    assert Provider.TRITON in check(p, target, E.F16)
