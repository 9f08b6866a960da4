"""How the rows of regions are cut, as kernels say it."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from flagos_backend.codegen.triton import prepare, schedule
from flagos_backend.fusion.flat import flatten
from flagos_backend.fusion.region import Region
from flagos_backend.importer import import_module
from flagos_backend.passes.pipeline import optimize
from programs import hlo_bytes
from unit.codegen.triton.test_sources import H100, bf16, f32, s32

# One block for each row, walked by as many programs as there are multiprocessors.
AHEAD = "32768, 132 parts"


def softmax_gradient(x: jax.Array, y: jax.Array) -> Any:
    return jax.vjp(lambda x: jax.nn.softmax(x, -1), x)[1](y)


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    log_weights = jax.nn.log_softmax(logits.astype(jnp.float32), -1)
    return -(jax.nn.one_hot(labels, logits.shape[-1]) * log_weights).sum(-1).mean()


def cross_entropy_of_labels(logits: jax.Array, labels: jax.Array) -> jax.Array:
    log_weights = jax.nn.log_softmax(logits.astype(jnp.float32), -1)
    return -jnp.take_along_axis(log_weights, labels[:, None], -1).mean()


def rms_norm(x: jax.Array, gain: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    return (wide * jax.lax.rsqrt((wide * wide).mean(-1, keepdims=True) + 1e-6) * gain).astype(x.dtype)


def rms_norm_of_sum(x: jax.Array, y: jax.Array, gain: jax.Array) -> tuple[jax.Array, jax.Array]:
    total = x + y
    return total * jax.lax.rsqrt((total * total).mean(-1, keepdims=True) + 1e-6) * gain, total


@pytest.mark.parametrize(
    ("function", "shapes", "block"),
    [
        pytest.param(lambda x: jax.nn.softmax(x, -1), [bf16(8192, 16384)], 16384, id="narrow"),
        pytest.param(lambda x: jax.nn.softmax(x, -1), [bf16(8192, 32000)], AHEAD, id="narrow, long"),
        pytest.param(lambda x: jax.nn.softmax(x, -1), [bf16(200, 32000)], 8192, id="narrow, long, few"),
        pytest.param(lambda x: jax.nn.softmax(x, -1), [bf16(8192, 50256)], 8192, id="narrow, longer"),
        pytest.param(lambda x: jax.nn.softmax(x, -1), [bf16(8192, 50257)], 8192, id="narrow, longer, odd"),
        pytest.param(lambda x: jax.nn.softmax(x, -1), [f32(8192, 50257)], 16384, id="wide, longer, odd"),
        pytest.param(lambda x: jax.nn.softmax(x, -1), [bf16(4096, 128256)], 16384, id="two do not fit the cache"),
        pytest.param(lambda x: jax.nn.softmax(x, -1), [f32(4096, 128256)], 8192, id="one does not fit the cache"),
        pytest.param(lambda x: jax.nn.logsumexp(x, -1), [bf16(8192, 32000)], 8192, id="narrow, nothing stored"),
        pytest.param(lambda x: jax.nn.logsumexp(x, -1), [bf16(4096, 128256)], 8192, id="two of nothing stored"),
        pytest.param(rms_norm, [bf16(8192, 32000), bf16(32000)], 8192, id="narrow, an array for all rows"),
        pytest.param(softmax_gradient, [bf16(8192, 32000), bf16(8192, 32000)], 8192, id="narrow, two loaded"),
        pytest.param(jax.grad(cross_entropy_of_labels), [bf16(8192, 32000), s32(8192)], AHEAD, id="narrow, labels"),
        pytest.param(jax.value_and_grad(cross_entropy), [bf16(8192, 32000), s32(8192)], 8192, id="narrow, one-hot"),
        pytest.param(lambda x: jax.nn.softmax(x, -1), [f32(8192, 32000)], 32768, id="wide, long"),
        pytest.param(lambda x: jax.nn.softmax(x, -1), [f32(8192, 32769)], 8192, id="wide, too long"),
        pytest.param(rms_norm_of_sum, [f32(8192, 32000), f32(8192, 32000), f32(32000)], 32768, id="one value held"),
        pytest.param(softmax_gradient, [f32(8192, 20480), f32(8192, 20480)], 32768, id="two values held"),
        pytest.param(softmax_gradient, [f32(8192, 24000), f32(8192, 24000)], 16384, id="two values held, too long"),
        pytest.param(jax.value_and_grad(cross_entropy), [f32(8192, 32000), s32(8192)], 8192, id="cross-entropy"),
        pytest.param(lambda x: x.sum(-1), [f32(8192, 32000)], 8192, id="nothing held"),
        pytest.param(lambda x: x.sum(-1), [f32(3, 70000)], "8192, 2 parts", id="few, which fit the cache"),
    ],
)
def test_rows(function: Callable[..., Any], shapes: list[jax.ShapeDtypeStruct], block: int | str) -> None:
    flat = flatten(optimize(import_module(hlo_bytes(function, *shapes))).entry)
    regions = [item for item in schedule(flat, H100).items if isinstance(item, Region)]
    (region,) = (region for region in regions if region.folds and region.rank == 2)
    kernel = prepare(region, H100)
    assert f" in blocks of 1x{block}:" in kernel.text, kernel.text
