"""The reference kernels of flagos.attention and flagos.attention_backward against dense float64 einsums."""

import dataclasses
import json
import math

import pytest
import torch

from flagos_backend.devices.target import Target
from flagos_backend.errors import MalformedProgram
from flagos_backend.ir.attributes import CustomCallAttributes
from flagos_backend.ir.builder import Builder
from flagos_backend.ir.custom_calls.attention import BACKWARD, FORWARD, Attention, AttentionBackwardCall, AttentionCall
from flagos_backend.ir.opcode import Opcode
from flagos_backend.ir.types import ArrayShape, ElementType, TupleShape
from flagos_backend.kernels.choice import implementations_of
from flagos_backend.kernels.implementation import Provider
from flagos_backend.kernels.reference import attention, registry
from support.attention import (
    BIAS_GRADIENTS,
    CASES,
    assert_close,
    assert_rows_of_infinities_are_zero,
    assert_rows_without_a_key_are_zero,
    calls_of,
    oracle,
    problem,
)

E = ElementType


def check(p, element):
    (output, statistics), gradients = oracle(p)
    ours = p.forward(registry.prepare(p.calls[0]))
    assert_close(ours[0], output, element)
    assert_close(ours[1], statistics, E.F64 if element is E.F64 else E.F32)
    for gradient, exact in zip(p.backward(registry.prepare(p.calls[1]), *ours), gradients, strict=True):
        assert_close(gradient, exact, element)


@pytest.mark.parametrize("element", [E.F32, E.F64, E.F16, E.BF16], ids=lambda e: e.name)
@pytest.mark.parametrize("name", CASES)
def test_cases(name, element, rng):
    check(problem(CASES[name], element, int(rng.integers(1 << 30))), element)


@pytest.mark.parametrize("element", [E.F32, E.F64, E.F16, E.BF16], ids=lambda e: e.name)
@pytest.mark.parametrize("name", BIAS_GRADIENTS)
def test_gradients_of_biases(name, element, rng):
    attention, dims = BIAS_GRADIENTS[name]
    check(problem(attention, element, int(rng.integers(1 << 30)), of_bias=dims), element)


def test_a_gradient_of_a_bias_that_is_summed_over_keys(rng):
    """It is zero, but beside a sink."""
    attention, _ = BIAS_GRADIENTS["sink"]
    check(problem(attention, E.F64, int(rng.integers(1 << 30)), of_bias="ht"), E.F64)


@pytest.mark.parametrize("name", ["mask, finite", "mask, causal", "mask, window", "added mask", "added mask, window"])
def test_rows_that_see_no_key(name, rng):
    check(problem(CASES[name], E.F32, int(rng.integers(1 << 30)), hide_all=True), E.F32)


@pytest.mark.parametrize("element", [E.F32, E.F64, E.F16, E.BF16], ids=lambda e: e.name)
@pytest.mark.parametrize("name", ["mask", "bias, mask, causal"])
def test_rows_that_see_no_key_and_have_weights_of_zero(name, element, rng):
    of_bias = "bhgts" if CASES[name].bias is not None else None  # the first batch's shall be zero
    p = problem(CASES[name], element, int(rng.integers(1 << 30)), hide_all=True, of_bias=of_bias)
    assert_rows_without_a_key_are_zero(p, tuple(map(registry.prepare, p.calls)), element)


@pytest.mark.parametrize("name", ["of every batch and head", "window", "mask", "cap"])
def test_rows_of_infinities_that_have_weights_of_zero(name, rng):
    p = problem(BIAS_GRADIENTS[name][0], E.F64, int(rng.integers(1 << 30)), of_bias="bhgts")
    assert_rows_of_infinities_are_zero(p, tuple(map(registry.prepare, p.calls)), E.F64)


def test_blocks_of_queries(monkeypatch, rng):
    """More logits than are held at once."""
    monkeypatch.setattr(attention, "_BLOCK_ELEMENTS", 2000)
    for of_bias in ("gts", "bs"):
        check(problem(CASES["bias, mask, causal"], E.F64, int(rng.integers(1 << 30)), of_bias=of_bias), E.F64)


def test_arguments_of_other_strides(rng):
    p = problem(CASES["causal"], E.F32, int(rng.integers(1 << 30)))
    turned = tuple(x.transpose(0, 1).contiguous().transpose(0, 1) for x in p.operands)
    kernel = registry.prepare(p.calls[0])
    torch.testing.assert_close(p.forward(kernel)[0], kernel(registry.Run(), *turned)[0], rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("config", "fact"),
    [
        (b"[", "not JSON"),
        (b"[]", "not a JSON object"),
        (b'{"query": "td", "key": "sd", "value": "se", "output": "te", "colour": 1}', "knows no colour"),
        (b'{"query": "td"}', "missing"),
        (AttentionCall(Attention("btd", "sd", "se", "te"), False).config(), "do not name"),
        (AttentionCall(Attention("td", "sd", "de", "te"), False).config(), "the dimension d is"),
        (AttentionCall(Attention("td", "sd", "se", "te", mask="ts"), False).config(), "3 operands, not 4"),
        (AttentionCall(Attention("td", "sd", "se", "te", sink=""), False).config(), "3 operands, not 4"),
    ],
)
def test_malformed(config, fact):
    with pytest.raises(MalformedProgram, match=fact):
        prepare(FORWARD, config)


def prepare(target, config):
    """The kernel of a call of a query td, a key sd and a value se; the backward call gives the query's gradient."""
    dims = ((4, 8), (6, 8), (6, 5)) if target == FORWARD else ((4, 8), (6, 8), (6, 5), (4, 5), (1, 1, 4), (4, 5))
    builder = Builder("c")
    operands = [builder.parameter(ArrayShape(E.F32, sizes)) for sizes in dims]
    result = ArrayShape(E.F32, (4, 5)) if target == FORWARD else TupleShape((ArrayShape(E.F32, (4, 8)),))
    return registry.prepare(
        builder.add(Opcode.CUSTOM_CALL, operands, CustomCallAttributes(target, config), shape=result)
    )


VALID = {"query": "td", "key": "sd", "value": "se", "output": "te"}
VALID_BACKWARD = {**VALID, "output_gradient": "te", "query_gradient": "td"}
#: What is no dims, no finite number, no integer, no flag: each field refuses those that it is not.
NOT_DIMS = (True, 1, 1.5, ["t", "d"], {}, "tt", "t?", "tdx")
NOT_NUMBERS = (True, "1", [1.0], {}, math.nan, math.inf, 10**400)
NOT_INTEGERS = (True, 0.5, "0", [0], {}, 1 << 63, 10**400)
NOT_FLAGS = (0, 1, "true", [], {}, None)
REFUSED = {
    **dict.fromkeys(("query", "key", "value", "output"), (*NOT_DIMS, None)),
    **dict.fromkeys(("bias", "mask", "sink"), NOT_DIMS),
    "scale": (*NOT_NUMBERS, None),
    **dict.fromkeys(("fill", "cap"), NOT_NUMBERS),
    **dict.fromkeys(("upper", "lower"), NOT_INTEGERS),
    **dict.fromkeys(("added", "tensor_float"), NOT_FLAGS),
}
OWN = {
    FORWARD: dict.fromkeys(("statistics", "tells_nan"), NOT_FLAGS),
    BACKWARD: {
        "output_gradient": (*NOT_DIMS, None),
        **dict.fromkeys(
            ("query_gradient", "key_gradient", "value_gradient", "sink_gradient", "bias_gradient"), NOT_DIMS
        ),
    },
}


@pytest.mark.parametrize(("target", "valid"), [(FORWARD, VALID), (BACKWARD, VALID_BACKWARD)])
def test_every_field_is_of_its_type(target, valid):
    assert prepare(target, json.dumps(valid).encode())
    for name, values in (REFUSED | OWN[target]).items():
        for value in values:
            with pytest.raises(MalformedProgram, match=f"{target} breaks its convention") as refusal:
                prepare(target, json.dumps({**valid, name: value}).encode())
            # Dimensions of the right form that name no array's are refused as those.
            assert name in str(refusal.value) or value == "tdx", (name, value)


def test_no_field_of_a_call_goes_unchecked():
    fields = {
        field.name for kind in (Attention, AttentionCall, AttentionBackwardCall) for field in dataclasses.fields(kind)
    }
    assert fields - {"attention"} == REFUSED.keys() | OWN[FORWARD].keys() | OWN[BACKWARD].keys()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, ""),
        ({"upper": 0}, ""),
        ({"cap": 30.0}, "soft cap"),
        ({"upper": 0, "cap": 30.0}, "soft cap"),
        ({"sink": "hg"}, "a sink"),
        ({"mask": "bs"}, "a bias or a mask"),
        ({"upper": 1}, "no causal mask"),
    ],
    ids=str,
)
def test_what_the_vendors_kernels_lack(changes, reason):
    described = Attention("bthgd", "bshd", "bshe", "bthge", **changes)
    calls = calls_of(described, E.BF16, {"b": 1, "h": 2, "g": 2, "t": 64, "s": 64, "d": 32, "e": 32})
    for operation, call in zip((FORWARD, BACKWARD), calls, strict=True):
        (vendor,) = (i for i in implementations_of(operation) if i.provider is Provider.VENDOR)
        found = vendor.unsupported(call, Target("cuda", vendor="nvidia"))
        assert reason in found and bool(found) is bool(reason)


@pytest.mark.parametrize(("batches", "reason"), [(32767, ""), (32768, "65536 heads")])
def test_heads_that_a_grid_does_not_have(batches, reason):
    sizes = {"b": batches, "h": 1, "g": 2, "t": 64, "s": 64, "d": 32, "e": 32}
    calls = calls_of(Attention("bthgd", "bshd", "bshe", "bthge"), E.BF16, sizes)
    for operation, call in zip((FORWARD, BACKWARD), calls, strict=True):
        (ours,) = (i for i in implementations_of(operation) if i.provider is Provider.TRITON)
        found = ours.unsupported(call, Target("cuda", vendor="nvidia"))
        assert reason in found and bool(found) is bool(reason)


@pytest.mark.parametrize(("tells_nan", "names"), [(False, ["cudnn", "flash"]), (True, ["cudnn"])])
def test_which_of_the_vendors_kernels_tell_nan(tells_nan, names):
    sizes = {"b": 1, "h": 2, "g": 2, "t": 64, "s": 64, "d": 32, "e": 32}
    call, _ = calls_of(Attention("bthgd", "bshd", "bshe", "bthge"), E.BF16, sizes, tells_nan=tells_nan)
    assert AttentionCall.of(call).tells_nan is tells_nan
    (vendor,) = (i for i in implementations_of(FORWARD) if i.provider is Provider.VENDOR)
    assert [variant.name for variant in vendor.variants(call, Target("cuda", vendor="nvidia"))] == names


def test_vendors_kernels_give_no_gradient_of_a_bias():
    """Also where the bias itself has become a band."""
    described, sizes = Attention("bthgd", "bshd", "bshe", "bthge"), {"b": 1, "h": 2, "g": 2, "t": 64, "s": 64}
    _, call = calls_of(described, E.BF16, {**sizes, "d": 32, "e": 32}, "hgts")
    (vendor,) = (i for i in implementations_of(BACKWARD) if i.provider is Provider.VENDOR)
    assert "no gradient of a bias" in vendor.unsupported(call, Target("cuda", vendor="nvidia"))
