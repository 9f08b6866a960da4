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


def softmax_gradient(x: jax.Array, y: jax.Array) -> Any:
    return jax.vjp(lambda x: jax.nn.softmax(x, -1), x)[1](y)


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    log_weights = jax.nn.log_softmax(logits.astype(jnp.float32), -1)
    return -(jax.nn.one_hot(labels, logits.shape[-1]) * log_weights).sum(-1).mean()


def rms_norm_of_sum(x: jax.Array, y: jax.Array, gain: jax.Array) -> tuple[jax.Array, jax.Array]:
    total = x + y
    return total * jax.lax.rsqrt((total * total).mean(-1, keepdims=True) + 1e-6) * gain, total


@pytest.mark.parametrize(
    ("function", "shapes", "block"),
    [
        pytest.param(lambda x: jax.nn.softmax(x, -1), [bf16(8192, 16384)], 16384, id="narrow"),
        pytest.param(lambda x: jax.nn.softmax(x, -1), [bf16(8192, 32000)], 8192, id="narrow, long"),
        pytest.param(lambda x: jax.nn.softmax(x, -1), [f32(8192, 32000)], 32768, id="wide, long"),
        pytest.param(lambda x: jax.nn.softmax(x, -1), [f32(8192, 32769)], 8192, id="wide, too long"),
        pytest.param(rms_norm_of_sum, [f32(8192, 32000), f32(8192, 32000), f32(32000)], 32768, id="one value held"),
        pytest.param(softmax_gradient, [f32(8192, 20480), f32(8192, 20480)], 32768, id="two values held"),
        pytest.param(softmax_gradient, [f32(8192, 32000), f32(8192, 32000)], 8192, id="two values held, too long"),
        pytest.param(jax.value_and_grad(cross_entropy), [f32(8192, 32000), s32(8192)], 8192, id="cross-entropy"),
        pytest.param(lambda x: x.sum(-1), [f32(8192, 32000)], 8192, id="nothing held"),
    ],
)
def test_rows(function: Callable[..., Any], shapes: list[jax.ShapeDtypeStruct], block: int) -> None:
    flat = flatten(optimize(import_module(hlo_bytes(function, *shapes))).entry)
    regions = [item for item in schedule(flat, H100).items if isinstance(item, Region)]
    (region,) = (region for region in regions if region.folds and region.rank == 2)
    text = prepare(region, H100).text
    assert f"in blocks of 1x{block}:" in text, text
