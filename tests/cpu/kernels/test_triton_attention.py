"""Our Triton attention in the interpreter against dense float64 einsums."""

import pytest

from flagos_backend.devices.target import Target
from flagos_backend.ir.types import ElementType
from flagos_backend.kernels.attention import BACKWARD, FORWARD
from flagos_backend.kernels.choice import implementations_of
from flagos_backend.kernels.implementation import Provider
from support.attention import CASES, assert_close, oracle, problem

E = ElementType
SIMULATED = Target("cpu", "simulated")
# Small enough for an interpreter, and no multiple of the blocks.
SIZES = {"b": 1, "c": 2, "h": 1, "g": 2, "t": 40, "s": 52, "d": 16, "e": 24}


def kernels(p):
    """The Triton kernels of both calls."""
    found = []
    for operation, call in zip((FORWARD, BACKWARD), p.calls, strict=True):
        (triton,) = (i for i in implementations_of(operation) if i.provider is Provider.TRITON)
        assert not triton.unsupported(call, SIMULATED)
        found.append(triton.variants(call, SIMULATED)[0].kernel)
    return found


def check(p, element):
    (output, statistics), gradients = oracle(p)
    forward, backward = kernels(p)
    ours = p.forward(forward)
    assert_close(ours[0], output, element)
    assert_close(ours[1], statistics.clamp_min(-1e30), E.F32)
    for gradient, exact in zip(p.backward(backward, *ours), gradients, strict=True):
        assert_close(gradient, exact, element)


@pytest.mark.parametrize("name", CASES)
def test_cases(name, rng):
    element = E.F16 if len(name) % 2 else E.F32
    check(problem(CASES[name], element, int(rng.integers(1 << 30)), sizes=SIZES), element)


@pytest.mark.parametrize("name", ["mask, finite", "mask, window"])
def test_rows_that_see_no_key(name, rng):
    check(problem(CASES[name], E.F32, int(rng.integers(1 << 30)), sizes=SIZES, hide_all=True), E.F32)
