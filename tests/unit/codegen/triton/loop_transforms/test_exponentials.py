"""Which exponentials are known to be of what lies below a maximum, of which the last bits are rounded away, and which
sums of them go along with the maximum."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from support.triton_programs import H100, NO_DEVICE_LIBRARY, bf16, f32, s32
from support.triton_sources import sources

LONG = (4096, 50000)


def top(x: jax.Array) -> jax.Array:
    return x.max(-1, keepdims=True)


def wide_softmax(x: jax.Array) -> jax.Array:
    return jax.nn.softmax(x.astype(jnp.float32), -1)


def with_labels(x: jax.Array, labels: jax.Array) -> jax.Array:
    return wide_softmax(x) - jax.nn.one_hot(labels, x.shape[-1], dtype=jnp.float32)


BELOW = [
    pytest.param(lambda x: jax.nn.softmax(x, -1), [f32(4096, 1000)], id="softmax"),
    pytest.param(lambda x: jnp.exp(x.astype(jnp.float32) - top(x)), [bf16(4096, 1000)], id="converted"),
    pytest.param(lambda x: jnp.exp(x - jnp.maximum(top(x), 3)).sum(-1), [f32(4096, 1000)], id="more"),
    pytest.param(lambda x: jnp.exp(x * 2 - top(x * 2)), [f32(4096, 1000)], id="computed"),
    pytest.param(lambda x: (x * jnp.exp(x - top(x))).sum(-1), [f32(4096, 1000)], id="a sum of products"),
    pytest.param(lambda x: wide_softmax(x).sum(-1), [bf16(4096, 1000)], id="a sum of quotients"),
    pytest.param(lambda x: (wide_softmax(x) > 0.1).sum(-1), [bf16(4096, 1000)], id="a comparison"),
    pytest.param(
        lambda x: (jnp.exp(x - top(x)) - x).astype(jnp.bfloat16), [f32(4096, 1000)], id="a difference that is rounded"
    ),
    pytest.param(
        lambda x: (jnp.exp(x - top(x)) - 1 / x).astype(jnp.bfloat16),
        [f32(4096, 1000)],
        id="less a quotient",
    ),
    pytest.param(lambda x: jnp.exp(x - top(x)) - 1, [f32(4096, 1000)], id="less a constant"),
    pytest.param(
        lambda x: ((p := wide_softmax(x)).astype(jnp.bfloat16), p), [bf16(4096, 1000)], id="rounded and as it is"
    ),
]
TERMS = [
    pytest.param(lambda x: jnp.exp(x - top(x)).sum(-1), [f32(4096, 1000)], id="a sum"),
    pytest.param(lambda x: jax.nn.logsumexp(x, -1), [f32(4096, 1000)], id="a sum, guarded"),
    pytest.param(lambda x: jnp.exp(x.astype(jnp.float32) - top(x)).sum(-1), [bf16(4096, 1000)], id="converted"),
    pytest.param(lambda x: jax.nn.softmax(x, -1), [bf16(4096, 1000)], id="of 16 bits"),
    pytest.param(lambda x: wide_softmax(x).astype(x.dtype), [bf16(4096, 1000)], id="rounded"),
    pytest.param(lambda x: (-wide_softmax(x) * 3).astype(jnp.float16), [f32(4096, 1000)], id="a product, rounded"),
    pytest.param(
        lambda x, at: (with_labels(x, at) / 64).astype(x.dtype), [bf16(4096, 1000), s32(4096)], id="less one, rounded"
    ),
]


@pytest.mark.parametrize(("function", "shapes"), BELOW)
def test_below_a_maximum(function: Callable[..., Any], shapes: list[jax.ShapeDtypeStruct]) -> None:
    source = sources(function, shapes)
    assert "nv.exp_below(" in source and "nv.exp_term(" not in source and "libdevice.exp(" not in source
    assert "nv.exp" not in sources(function, shapes, NO_DEVICE_LIBRARY)


@pytest.mark.parametrize(("function", "shapes"), TERMS)
def test_terms_and_what_is_rounded(function: Callable[..., Any], shapes: list[jax.ShapeDtypeStruct]) -> None:
    source = sources(function, shapes)
    assert "nv.exp_term(" in source and "nv.exp_below(" not in source and "libdevice.exp(" not in source
    assert "fm.divide_by_sum(" not in source
    assert "nv.exp" not in sources(function, shapes, NO_DEVICE_LIBRARY)


def test_converted_to_what_has_more_digits() -> None:
    with jax.enable_x64(True):
        source = sources(lambda x: jnp.exp(x - top(x)).astype(jnp.float64), [f32(4096, 1000)])
    assert "nv.exp_below(" in source


def test_constants_of_many_operations() -> None:
    """Which a walk of a tree would meet over and over, and one that goes down by calls would not come out of."""

    def function(x: jax.Array) -> jax.Array:
        constant = jnp.where(x > 0, 0.99, 0.5)
        for _ in range(60):
            constant = -(constant * constant)
        return (jnp.exp(x - top(x)) - constant).astype(jnp.bfloat16)

    assert "nv.exp_term(" in sources(function, [f32(4096, 1000)])


def test_a_sum_of_what_is_wanted_itself() -> None:
    """Which is computed twice, as rows are walked twice."""
    source = sources(lambda x: jax.nn.softmax(x, -1), [f32(*LONG)])
    first, second = source.split("for start in tl.range")[1:]
    assert "nv.exp_term(" in first and "nv.exp_below(" not in first
    assert "nv.exp_below(" in second and "nv.exp_term(" not in second


@pytest.mark.parametrize(
    ("function", "shapes"),
    [
        pytest.param(lambda x: jnp.exp(x - x.min(-1, keepdims=True)).sum(-1), [f32(4096, 1000)], id="a minimum"),
        pytest.param(lambda x: jnp.exp(x - jnp.minimum(top(x), 3)).sum(-1), [f32(4096, 1000)], id="less"),
        pytest.param(lambda x: jnp.exp(x * 2 - top(x)).sum(-1), [f32(4096, 1000)], id="of something else"),
        pytest.param(lambda x: jnp.exp(top(x) - x).sum(-1), [f32(4096, 1000)], id="above"),
        pytest.param(
            lambda x: jnp.exp(x - jnp.where(jnp.isfinite(top(x)), top(x), 0)),
            [f32(4096, 1000)],
            id="nothing where it is infinite",
        ),
    ],
)
def test_not_below_a_maximum(function: Callable[..., Any], shapes: list[jax.ShapeDtypeStruct]) -> None:
    source = sources(function, shapes)
    assert "nv.exp" not in source and "libdevice.exp(" in source


@pytest.mark.parametrize(
    ("function", "walks"),
    [
        pytest.param(lambda x: jax.nn.logsumexp(x, -1), 1, id="logsumexp"),
        pytest.param(lambda x: jax.nn.softmax(x, -1), 2, id="softmax"),
        pytest.param(lambda x: jnp.exp(x * 2 - top(x)).sum(-1), 2, id="of something else"),
        pytest.param(lambda x: jnp.exp(x - jnp.maximum(top(x), 3)).sum(-1), 2, id="of more than the maximum"),
        pytest.param(lambda x: (x * jnp.exp(x - top(x))).sum(-1), 2, id="a sum of products"),
    ],
)
@pytest.mark.parametrize("target", [H100, NO_DEVICE_LIBRARY], ids=["library", "plain"])
def test_a_row_is_walked(function: Callable[..., Any], walks: int, target: Any) -> None:
    assert sources(function, [f32(*LONG)], target).count("for start in tl.range") == walks


@pytest.mark.parametrize(
    ("function", "walks"),
    [
        pytest.param(lambda x: jax.nn.softmax(x, -1), {False: 3, True: 2}, id="terms of 16 bits"),
        pytest.param(lambda x: jnp.exp(x - top(x)).astype(jnp.float32).sum(-1), {False: 2, True: 1}, id="their sum"),
        pytest.param(
            lambda x: jnp.exp((x - top(x)).astype(jnp.float32)).sum(-1),
            {False: 2, True: 1},
            id="differences of 16 bits",
        ),
        pytest.param(lambda x: wide_softmax(x).astype(x.dtype), {False: 2, True: 2}, id="terms of 32 bits"),
    ],
)
def test_a_row_of_16_bits_is_walked(function: Callable[..., Any], walks: dict[bool, int]) -> None:
    """What is rounded before it is summed up depends on the maximum of the whole row."""
    for excess, count in walks.items():
        assert sources(function, [bf16(2048, 128256)], excess=excess).count("for start in tl.range") == count


@pytest.mark.parametrize(
    ("function", "division"),
    [
        pytest.param(lambda x: jax.nn.softmax(x, -1), "divide_by_sum", id="softmax"),
        pytest.param(lambda x: x / jnp.exp(x - top(x)).sum(-1, keepdims=True), "divide_corrected", id="any dividend"),
    ],
)
def test_a_sum_that_is_one_at_least(function: Callable[..., Any], division: str) -> None:
    source = sources(function, [f32(4096, 1000)])
    assert f"fm.{division}(" in source and "divisor_scale" not in source
    assert "divisor_scale" not in sources(function, [bf16(4096, 1000)])


@pytest.mark.parametrize(
    "total",
    [
        pytest.param(lambda x: jnp.exp(x - jnp.maximum(top(x), 3)).sum(-1, keepdims=True), id="of less than one"),
        pytest.param(lambda x: jnp.exp(x - top(x)).sum(-1, keepdims=True) - 1, id="less one"),
        pytest.param(
            lambda x: jax.lax.reduce(jnp.exp(x - top(x)), np.float32(-1), jax.lax.add, (1,))[:, None],
            id="from minus one on",
        ),
        pytest.param(
            lambda x: jnp.exp(x - jnp.where(jnp.isfinite(top(x)), top(x), 0)).sum(-1, keepdims=True), id="of no maximum"
        ),
    ],
)
def test_a_sum_that_may_be_less_than_one(total: Callable[..., Any]) -> None:
    source = sources(lambda x: x / total(x), [f32(4096, 1000)])
    assert "fm.divide_corrected(" in source and "divisor_scale" in source
