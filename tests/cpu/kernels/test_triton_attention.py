"""Our Triton attention in the interpreter against dense float64 einsums."""

import math
from dataclasses import replace

import pytest
import torch
import triton
import triton.language as tl

from flagos_backend.devices.target import Target
from flagos_backend.ir.custom_calls.attention import BACKWARD, FORWARD, Attention
from flagos_backend.ir.types import ElementType, leaves
from flagos_backend.kernels.choice import implementations_of
from flagos_backend.kernels.implementation import Provider
from flagos_backend.kernels.reference.registry import Run
from flagos_backend.kernels.reference.storage import dtype_of
from flagos_backend.kernels.triton import attention_kernels
from support.attention import (
    BIAS_GRADIENTS,
    CASES,
    assert_close,
    assert_rows_of_infinities_are_zero,
    assert_rows_without_a_key_are_zero,
    oracle,
    problem,
)
from support.memory import far_apart

E = ElementType
SIMULATED = Target("cpu", "simulated")
# Small enough for an interpreter, and no multiple of the blocks.
SIZES = {"b": 1, "c": 2, "h": 1, "g": 2, "t": 40, "s": 52, "d": 16, "e": 24}
PLAIN = CASES["plain"]


def variants(p, target=SIMULATED):
    """The Triton kernels of both calls."""
    found = []
    for operation, call in zip((FORWARD, BACKWARD), p.calls, strict=True):
        (triton,) = (i for i in implementations_of(operation) if i.provider is Provider.TRITON)
        assert not triton.unsupported(call, target)
        found.append(triton.variants(call, target)[0])
    return found


def kernels(p, target=SIMULATED):
    return [variant.kernel for variant in variants(p, target)]


def check(p, element, target=SIMULATED):
    (output, statistics), gradients = oracle(p)
    forward, backward = kernels(p, target)
    ours = p.forward(forward)
    assert_close(ours[0], output, element)
    lowest = -1e30 if math.isfinite(p.attention.fill) else -math.inf
    assert_close(ours[1], statistics.clamp_min(lowest), E.F32)
    for gradient, exact in zip(p.backward(backward, *ours), gradients, strict=True):
        assert_close(gradient, exact, element)


@pytest.mark.parametrize("name", CASES)
def test_cases(name, rng):
    element = E.F16 if len(name) % 2 else E.F32
    check(problem(CASES[name], element, int(rng.integers(1 << 30)), sizes=SIZES), element)


@pytest.mark.parametrize("name", BIAS_GRADIENTS)
def test_gradients_of_biases(name, rng):
    attention, dims = BIAS_GRADIENTS[name]
    element = E.F16 if len(name) % 2 else E.F32
    sizes = {**SIZES, "b": 2, "h": 2} if "c" not in attention.key else {**SIZES, "b": 2}
    check(problem(attention, element, int(rng.integers(1 << 30)), sizes=sizes, of_bias=dims), element)


@pytest.mark.parametrize("name", ["mask, window", "added mask, window", "of keys, mask"])
def test_gradients_of_biases_of_rows_that_see_no_key(name, rng):
    """Where what hides was added also of keys far outside of the band."""
    attention, dims = BIAS_GRADIENTS[name]
    sizes = {**SIZES, "b": 2, "s": 100}
    check(problem(attention, E.F32, int(rng.integers(1 << 30)), sizes=sizes, hide_all=True, of_bias=dims), E.F32)


@pytest.mark.parametrize("multiprocessors", [2, 7, 1000])
@pytest.mark.parametrize("name", ["shared by all", "shared by heads of a group", "of keys, window", "window", "cap"])
def test_gradients_of_biases_divided_among_programs(name, multiprocessors, rng):
    """Each program sums a part of what shares a bias, some of them nothing."""
    attention, dims = BIAS_GRADIENTS[name]
    target = Target("cpu", "simulated", multiprocessors=multiprocessors)
    p = problem(attention, E.F16, int(rng.integers(1 << 30)), sizes={**SIZES, "b": 3, "h": 2}, of_bias=dims)
    check(p, E.F16, target)


@pytest.mark.parametrize("channels", [16, 200])
@pytest.mark.parametrize("name", ["window", "of keys, window"])
def test_gradients_of_biases_in_every_size_of_blocks(name, channels, rng):
    attention, dims = BIAS_GRADIENTS[name]
    sizes = {**SIZES, "t": 70, "s": 100, "d": channels}
    p = problem(attention, E.F16, int(rng.integers(1 << 30)), sizes=sizes, of_bias=dims)
    _, gradients = oracle(p)
    ours = p.forward(kernels(p)[0])
    (triton,) = (i for i in implementations_of(BACKWARD) if i.provider is Provider.TRITON)
    variants = triton.variants(p.calls[1], SIMULATED)
    assert len({variant.name for variant in variants}) == 3
    for variant in variants:
        assert_close(p.backward(variant.kernel, *ours)[-1], gradients[-1], E.F16, variant.name)


@pytest.mark.parametrize("name", BIAS_GRADIENTS)
def test_gradients_of_biases_of_short_sequences(name, rng):
    """Fewer positions than a block has, and a prime number of them."""
    attention, dims = BIAS_GRADIENTS[name]
    sizes = {**SIZES, "b": 2, "t": 13, "s": 11}
    check(problem(attention, E.F32, int(rng.integers(1 << 30)), sizes=sizes, of_bias=dims), E.F32)


def test_biases_that_hide(rng):
    """Entries of -infinity have no gradient, though the row has."""
    attention, dims = BIAS_GRADIENTS["shared by batches"]
    p = problem(attention, E.F32, int(rng.integers(1 << 30)), sizes={**SIZES, "b": 2}, of_bias=dims)
    hidden = torch.rand(p.operands[3].shape, generator=torch.Generator().manual_seed(int(rng.integers(1 << 30)))) < 0.5
    hidden[..., 0] = False
    p.operands[3][hidden] = -torch.inf
    (output, statistics), gradients = oracle(p)
    forward, backward = kernels(p)
    ours = p.forward(forward)
    assert_close(ours[0], output, E.F32)
    assert_close(ours[1], statistics, E.F32)
    found = p.backward(backward, *ours)
    for gradient, exact in zip(found, gradients, strict=True):
        assert exact.isfinite().all()
        assert_close(gradient, exact, E.F32)
    assert found[3][hidden.all(0, keepdim=True)].eq(0).all()


def test_gradients_of_biases_beside_an_infinite_key(rng):
    """Its logits are -infinity; queries that fill up a block are no numbers beside it."""
    attention, dims = BIAS_GRADIENTS["of keys"]
    p = problem(attention, E.F32, int(rng.integers(1 << 30)), sizes={**SIZES, "b": 2}, of_bias=dims)
    p.operands[0][..., 0].abs_().neg_()
    p.operands[1][:, 3, :, 0] = torch.inf
    (output, _), gradients = oracle(p)
    assert output.isfinite().all() and gradients[3].isfinite().all() and gradients[3][3] == 0
    forward, backward = kernels(p)
    assert_close(p.backward(backward, *p.forward(forward))[3], gradients[3], E.F32)


@pytest.mark.parametrize(
    ("dims", "reason"), [("ht", "summed over keys"), ("achits", ""), ("bhjts", "every other dimension")]
)
def test_gradients_of_biases_that_the_kernels_do_not_give(dims, reason):
    attention = Attention("abchijtd", "abchijsd", "abchijse", "abchijte")
    p = problem(attention, E.F32, 0, sizes=dict.fromkeys("abchijtsde", 2), of_bias=dims)
    (triton,) = (i for i in implementations_of(BACKWARD) if i.provider is Provider.TRITON)
    found = triton.unsupported(p.calls[1], SIMULATED)
    assert reason in found and bool(found) is bool(reason)


@pytest.mark.parametrize("name", ["mask, finite", "mask, window", "added mask", "added mask, window"])
def test_rows_that_see_no_key(name, rng):
    check(problem(CASES[name], E.F32, int(rng.integers(1 << 30)), sizes=SIZES, hide_all=True), E.F32)


@pytest.mark.parametrize("keys", [11, 32, 41])
@pytest.mark.parametrize("name", ["mask", "bias, mask, causal", "cap, bias, mask, window", "added mask"])
def test_rows_that_see_no_key_below_infinity(name, keys, rng):
    """They are NaN; the gradients of what is hidden are zero all the same, of queries too."""
    attention = replace(CASES[name], fill=-math.inf)
    p = problem(attention, E.F32, int(rng.integers(1 << 30)), sizes={**SIZES, "b": 2, "s": keys}, hide_all=True)
    (output, _), gradients = oracle(p)
    assert output[0].isnan().all()
    assert gradients[0][0].isnan().all() if attention.added else gradients[0][0].eq(0).all()
    forward, backward = kernels(p)
    ours = p.forward(forward)
    assert_close(ours[0], output, E.F32)
    for gradient, exact in zip(p.backward(backward, *ours), gradients, strict=True):
        assert_close(gradient, exact, E.F32)


@pytest.mark.parametrize("name", ["mask", "bias, mask, causal"])
def test_rows_that_see_no_key_and_have_weights_of_zero(name, rng):
    of_bias = "bhgts" if CASES[name].bias is not None else None  # the first batch's shall be zero
    sizes = {**SIZES, "b": 2}
    p = problem(CASES[name], E.F32, int(rng.integers(1 << 30)), sizes=sizes, hide_all=True, of_bias=of_bias)
    assert_rows_without_a_key_are_zero(p, kernels(p), E.F32)


@pytest.mark.parametrize("name", ["of every batch and head", "causal", "window", "mask", "mask, window", "cap"])
def test_rows_of_infinities_that_have_weights_of_zero(name, rng):
    attention = replace(BIAS_GRADIENTS[name][0], fill=-math.inf)
    p = problem(attention, E.F32, int(rng.integers(1 << 30)), sizes={**SIZES, "b": 2}, of_bias="bhgts")
    assert_rows_of_infinities_are_zero(p, kernels(p), E.F32)


OPERANDS = ["query", "key", "value", "bias", "mask", "sink"]
GRADIENTS = ["of query", "of key", "of value", "of sink", "of bias"]


@pytest.mark.parametrize("array", [*OPERANDS[:5], "output", "gradient", *GRADIENTS])
def test_positions_of_large_arrays(array, rng):
    """Which times a stride take more than 32 bits, within one batch and head."""
    attention = replace(CASES["sink, cap, bias, mask"], upper=5)
    check_far_apart(attention, array, "t" if "t" in dims_of(attention, array) else "s", rng)


@pytest.mark.parametrize("array", ["query", "value", "of key"])
def test_channels_of_large_arrays(array, rng):
    check_far_apart(CASES["window"], array, "e" if array == "value" else "d", rng)


def dims_of(attention, array):
    """The dimensions of an operand or a result."""
    rows = "t" + attention.heads_of_query + attention.outer_batch
    return rows if array == "of sink" else getattr(attention, "output" if array == "gradient" else array.split()[-1])


def check_far_apart(attention, array, letter, rng):
    """The kernels, when elements of ``array`` lie far apart along the dimension ``letter``."""
    p = problem(attention, E.F16, int(rng.integers(1 << 30)), sizes=SIZES)
    (output, _), gradients = oracle(p)

    def placed(name, like):
        return far_apart(like, dims_of(attention, name).index(letter)) if name == array else like

    names = [name for name in OPERANDS if getattr(attention, name)]
    operands = [placed(*pair) for pair in zip(names, p.operands, strict=True)]
    forward, backward = variants(p)
    ours = forward.into(Run(), [placed("output", torch.empty_like(p.gradient)), None], *operands)
    assert_close(ours[0], output, E.F16)
    wanted = [name for name in GRADIENTS if getattr(attention, name.split()[-1])]
    results = [
        placed(name, torch.empty(leaf.dims, dtype=dtype_of(leaf.element_type)))
        for name, leaf in zip(wanted, leaves(p.calls[1].shape), strict=True)
    ]
    upstream = placed("gradient", p.gradient)
    found = backward.into(Run(), results, *operands[:3], *ours, upstream, *operands[3:])
    for gradient, exact in zip(found, gradients, strict=True):
        assert_close(gradient, exact, E.F16)


#: What hides a row is the fourth operand.
FULLY_MASKED = {
    "mask, causal": replace(PLAIN, mask="bts", upper=0),
    "mask of heads, window": replace(PLAIN, mask="bhgts", upper=1, lower=6),
    "mask, lower band": replace(PLAIN, mask="bts", lower=3),
    "mask, window, finite": replace(PLAIN, mask="bhgts", upper=0, lower=17, fill=-1e9),
    "added mask, causal": replace(PLAIN, mask="bts", upper=0, added=True),
    "added mask, window, finite": replace(PLAIN, mask="bts", upper=0, lower=3, fill=-1e9, added=True),
    "bias, causal": replace(PLAIN, bias="gts", upper=0),
    "bias of heads, window": replace(PLAIN, bias="bhgts", upper=1, lower=6),
}


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("name", FULLY_MASKED)
def test_a_row_that_sees_no_key(name, first, rng):
    """One, whose weights, NaN or equal, are those of keys as well whose blocks the band does not lead to it."""
    attention = FULLY_MASKED[name]
    p = problem(attention, E.F32, int(rng.integers(1 << 30)), sizes={**SIZES, "t": 100, "s": 100})
    row = int(rng.integers(20)) if first else int(rng.integers(80, 100))
    if attention.mask is not None:
        p.operands[3].fill_(True)
    p.operands[3].view(-1, 100, 100)[-1, row] = -math.inf if attention.mask is None else False
    nan = oracle(p)[1][2].isnan()
    assert nan.all() if math.isinf(attention.fill) else not nan.any()
    check(p, E.F32)


def test_a_band_and_an_added_mask_that_leave_half_of_the_rows_no_key(rng):
    attention = replace(PLAIN, mask="bts", upper=-50, added=True)
    p = problem(attention, E.F32, int(rng.integers(1 << 30)), sizes={**SIZES, "t": 100, "s": 100})
    assert oracle(p)[1][0][0, :50].isnan().all()
    check(p, E.F32)


def test_no_bfloat16_in_the_interpreter(rng):
    """It multiplies the bits; compiled kernels multiply the numbers."""
    p = problem(CASES["causal"], E.BF16, int(rng.integers(1 << 30)), sizes=SIZES)
    for operation, call in zip((FORWARD, BACKWARD), p.calls, strict=True):
        (ours,) = (i for i in implementations_of(operation) if i.provider is Provider.TRITON)
        assert "the bits of bfloat16" in ours.unsupported(call, SIMULATED)
        assert ours.unsupported(call, Target("cuda", "nvidia")) == ""


@triton.jit
def write_tanh(x, y, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(y + i, attention_kernels._tanh(tl.load(x + i)))


def test_tanh(rng):
    """Also of small numbers, which the exponential of twice such a number has lost."""
    drawn = rng.standard_normal(2036) * 10.0 ** rng.integers(-12, 4, 2036)
    x = torch.tensor(
        [0.0, 0.4, 0.3999999, -0.4, 44.0, -44.0, 3e38, -3e38, 1e-38, torch.inf, -torch.inf, torch.nan, *drawn]
    )
    x = x.to(torch.float32)
    y = torch.empty_like(x)
    write_tanh[(1,)](x, y, N=2048)
    torch.testing.assert_close(y.double(), torch.tanh(x.double()), rtol=1e-6, atol=0, equal_nan=True)


def test_a_cap_of_infinite_products(rng):
    p = problem(CASES["cap, causal"], E.F32, int(rng.integers(1 << 30)), sizes=SIZES)
    p.operands[0][0, 3, 0, 0, 2] = torch.inf
    p.operands[0][0, 9, 0, 1, 5] = torch.nan
    (output, statistics), _ = oracle(p)
    assert output[0, 3].isfinite().all()
    ours = p.forward(kernels(p)[0])
    assert_close(ours[0], output, E.F32)
    assert_close(ours[1], statistics, E.F32)


@pytest.mark.parametrize("name", ["plain", "bias"])
@pytest.mark.parametrize("number", [torch.nan, torch.inf])
@pytest.mark.parametrize("place", [0, 1], ids=["query", "key"])
def test_statistics_tell_weights_that_are_nan(place, number, name, rng):
    """They are finite in all other rows: programs set weights that are NaN to zero by them."""
    p = problem(CASES[name], E.F32, int(rng.integers(1 << 30)), sizes={**SIZES, "b": 2})
    p.operands[place].view(-1)[int(rng.integers(p.operands[place].numel()))] = number
    (output, _), _ = oracle(p)
    _, statistics = p.forward(kernels(p)[0])
    assert output.isnan().any() and not output.isnan().all()
    assert statistics.isfinite().sum() * SIZES["e"] == output.isfinite().sum()


def test_sinks_that_are_no_numbers(rng):
    """-infinity is no sink, +infinity and NaN leave nothing of a row."""
    p = problem(CASES["sink, window"], E.F32, int(rng.integers(1 << 30)), sizes={**SIZES, "h": 4})
    p.operands[3][0] = torch.tensor([-torch.inf, torch.inf, torch.nan, 80])
    (output, statistics), _ = oracle(p)
    assert output[:, :, 1:3].isnan().all() and output[:, :, ::3].isfinite().all()
    ours = p.forward(kernels(p)[0])
    assert_close(ours[0], output, E.F32)
    assert_close(ours[1].unflatten(1, (4, 2))[:, ::3], statistics.unflatten(1, (4, 2))[:, ::3], E.F32)


@pytest.mark.parametrize("hide_all", [False, True])
def test_rows_that_see_the_sink_alone(hide_all, rng):
    """With a fill of -infinity, which without a sink leaves NaN."""
    p = problem(CASES["sink, mask"], E.F32, int(rng.integers(1 << 30)), sizes={**SIZES, "b": 2}, hide_all=hide_all)
    check(p, E.F32)
    assert p.forward(kernels(p)[0])[0][0].eq(0).all() == hide_all


@pytest.mark.parametrize("low", [-1e9, -1e12, float(torch.finfo(torch.float32).min)])
@pytest.mark.parametrize("band", [{}, {"upper": 0}, {"upper": 0, "lower": 9}, {"lower": 9}])
def test_rows_that_a_bias_hides_weigh_their_keys_alike(low, band, rng):
    """As float32 has it, where nothing that is added to such a bias is seen."""
    p = problem(replace(CASES["bias"], **band), E.F32, int(rng.integers(1 << 30)), sizes=SIZES)
    q, k, v = (x.clone().requires_grad_() for x in p.operands[:3])
    p.operands[3][0, 3] = low
    p.operands[3][0, 7, 5:] = low
    bias = p.operands[3].clone().requires_grad_()
    t, s = torch.arange(bias.shape[1])[:, None], torch.arange(bias.shape[2])[None, :]
    hidden = (s > t + band.get("upper", s.max())) | (s < t - band.get("lower", t.max()))
    logits = torch.einsum("bthgd,bshd->bhgts", q, k) * p.attention.scale + bias[:, None]
    weights = torch.softmax(logits.masked_fill(hidden, -torch.inf), -1)
    exact = torch.einsum("bhgts,bshe->bthge", weights, v)
    gradients = torch.autograd.grad(exact, (q, k, v, bias), p.gradient)
    forward, backward = kernels(p)
    ours = p.forward(forward)
    assert_close(ours[0], exact.detach(), E.F32)
    for gradient, expected in zip(p.backward(backward, *ours), gradients, strict=True):
        assert_close(gradient, expected, E.F32)
