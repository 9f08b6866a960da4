"""Every provider's attention on the accelerator against dense float64 einsums."""

import math
from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from flagos_backend.devices.accelerator import TorchAccelerator
from flagos_backend.ir.custom_calls.attention import BACKWARD, FORWARD
from flagos_backend.ir.types import ElementType, leaves
from flagos_backend.kernels.choice import implementations_of
from flagos_backend.kernels.implementation import Provider
from flagos_backend.kernels.reference.storage import dtype_of
from support.attention import (
    BIAS_GRADIENTS,
    CASES,
    SIZES,
    assert_close,
    assert_rows_of_infinities_are_zero,
    oracle,
    problem,
)

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


def filled(shape):
    return [
        torch.full(leaf.dims, torch.nan, dtype=dtype_of(leaf.element_type), device=DEVICE) for leaf in leaves(shape)
    ]


@pytest.mark.parametrize("name", ["plain", "causal"])
def test_results_are_made_where_they_are_wanted(name, target, rng):
    """By the vendor's kernels too, whose operators take no arrays for them."""
    p = problem(CASES[name], E.BF16, int(rng.integers(1 << 30)), DEVICE.type, SQUARE)
    (output, statistics), gradients = oracle(p)
    ran = []
    for implementation in implementations_of(FORWARD):
        if not implementation.unsupported(p.calls[0], target):
            for variant in implementation.variants(p.calls[0], target):
                if variant.into is None:
                    continue
                places = filled(p.calls[0].shape)
                with torch.inference_mode():
                    made = p.forward(lambda run, *operands: variant.into(run, places, *operands))  # noqa: B023
                assert all(one is place for one, place in zip(made, places, strict=True))
                assert_close(places[0], output, E.BF16, variant.name)
                assert_close(places[1], statistics.clamp_min(-1e30), E.F32, variant.name)
                ran.append((variant.name, [place.clone() for place in places]))
    forward = dict(ran)["cudnn"]
    for implementation in implementations_of(BACKWARD):
        if not implementation.unsupported(p.calls[1], target):
            for variant in implementation.variants(p.calls[1], target):
                if variant.into is None:
                    continue
                places = filled(p.calls[1].shape)
                with torch.inference_mode():
                    made = p.backward(lambda run, *operands: variant.into(run, places, *operands), *forward)  # noqa: B023
                assert all(one is place for one, place in zip(made, places, strict=True))
                for place, exact in zip(places, gradients, strict=True):
                    assert_close(place, exact, E.BF16, variant.name)


class _Copies(TorchDispatchMode):
    """How often an array is copied into another while it is entered."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten.copy_.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ["plain", "causal"])
def test_no_result_of_cudnn_is_copied(name, target, rng):
    p = problem(CASES[name], E.BF16, int(rng.integers(1 << 30)), DEVICE.type, SQUARE)
    forward, backward = (
        next(v for i in implementations_of(o) if i.provider is Provider.VENDOR for v in i.variants(call, target))
        for o, call in zip((FORWARD, BACKWARD), p.calls, strict=True)
    )
    assert (forward.name, backward.name) == ("cudnn", "cudnn")
    with torch.inference_mode(), _Copies() as copies:
        made = p.forward(lambda run, *operands: forward.into(run, filled(p.calls[0].shape), *operands))
        p.backward(lambda run, *operands: backward.into(run, filled(p.calls[1].shape), *operands), *made)
    assert not copies.count


def test_rows_that_see_no_key(target, rng):
    p = problem(CASES["mask, causal"], E.F16, int(rng.integers(1 << 30)), DEVICE.type, LONGER, hide_all=True)
    assert Provider.TRITON in check(p, target, E.F16)


@pytest.mark.parametrize("number", [torch.nan, torch.inf])
@pytest.mark.parametrize("place", [0, 1], ids=["query", "key"])
def test_statistics_tell_weights_that_are_nan(place, number, target, rng):
    """Of every provider: programs set weights that are NaN to zero by them."""
    p = problem(CASES["plain"], E.BF16, int(rng.integers(1 << 30)), DEVICE.type, SQUARE, tells_nan=True)
    p.operands[place].view(-1)[int(rng.integers(p.operands[place].numel()))] = number
    (output, _), _ = oracle(p)
    ran = set()
    for implementation in implementations_of(FORWARD):
        if implementation.unsupported(p.calls[0], target):
            continue
        for variant in implementation.variants(p.calls[0], target):
            with torch.inference_mode():
                _, statistics = p.forward(variant.kernel)
            assert statistics.isfinite().sum() * SQUARE["e"] == output.isfinite().sum(), variant.name
            ran.add(implementation.provider)
    assert {Provider.TRITON, Provider.VENDOR} <= ran


@pytest.mark.parametrize("element", [*HALF, E.F32], ids=lambda e: e.name)
@pytest.mark.parametrize("name", ["of every batch and head", "window", "mask", "mask, window", "cap"])
def test_rows_of_infinities_that_have_weights_of_zero(name, element, target, rng):
    attention = replace(BIAS_GRADIENTS[name][0], fill=-math.inf)
    p = problem(attention, element, int(rng.integers(1 << 30)), DEVICE.type, LONGER, of_bias="bhgts")
    (forward,) = (i for i in implementations_of(FORWARD) if i.provider is Provider.TRITON)
    (backward,) = (i for i in implementations_of(BACKWARD) if i.provider is Provider.TRITON)
    pair = (forward.variants(p.calls[0], target)[0].kernel, backward.variants(p.calls[1], target)[0].kernel)
    assert_rows_of_infinities_are_zero(p, pair, element)
