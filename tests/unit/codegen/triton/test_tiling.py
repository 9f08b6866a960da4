"""How the rows of regions are cut, as kernels say it."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from flagos_backend.codegen.triton import RegionKernel, prepare, schedule
from flagos_backend.codegen.triton.tiling import choose
from flagos_backend.importer import import_module
from flagos_backend.loop_ir.flat import flatten
from flagos_backend.loop_ir.region import Region
from programs import hlo_bytes
from support.passes import for_accelerator
from support.triton_compiled import compiled
from support.triton_programs import H100, bf16, f32, s32

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
        pytest.param(lambda x: jax.nn.softmax(x, -1), [f32(8192, 50257)], 8192, id="wide, longer, odd"),
        pytest.param(lambda x: jax.nn.softmax(x, -1), [bf16(4096, 65536)], 16384, id="narrow, much longer"),
        pytest.param(lambda x: jax.nn.softmax(x, -1), [f32(4096, 65536)], 16384, id="wide, much longer"),
        pytest.param(lambda x: jax.nn.logsumexp(x, -1), [bf16(8192, 32000)], 4096, id="narrow, nothing stored"),
        pytest.param(lambda x: jax.nn.logsumexp(x, -1), [bf16(4096, 128256)], 4096, id="two of nothing stored"),
        pytest.param(lambda x: jax.nn.logsumexp(x, -1), [bf16(200, 32000)], 8192, id="few, nothing stored"),
        pytest.param(rms_norm, [bf16(8192, 32000), bf16(32000)], 8192, id="narrow, an array for all rows"),
        pytest.param(softmax_gradient, [bf16(8192, 32000), bf16(8192, 32000)], 8192, id="narrow, two loaded"),
        pytest.param(jax.grad(cross_entropy_of_labels), [bf16(8192, 32000), s32(8192)], AHEAD, id="narrow, labels"),
        pytest.param(jax.value_and_grad(cross_entropy), [bf16(8192, 32000), s32(8192)], 4096, id="narrow, one-hot"),
        pytest.param(lambda x: jax.nn.softmax(x, -1), [f32(8192, 32000)], 32768, id="wide, long"),
        pytest.param(lambda x: jax.nn.softmax(x, -1), [f32(8192, 32769)], 8192, id="wide, too long"),
        pytest.param(rms_norm_of_sum, [f32(8192, 32000), f32(8192, 32000), f32(32000)], 32768, id="one value held"),
        pytest.param(softmax_gradient, [f32(8192, 20480), f32(8192, 20480)], 32768, id="two values held"),
        pytest.param(softmax_gradient, [f32(8192, 24000), f32(8192, 24000)], 8192, id="two values held, too long"),
        pytest.param(jax.value_and_grad(cross_entropy), [f32(8192, 32000), s32(8192)], 4096, id="cross-entropy"),
        pytest.param(lambda x: x.sum(-1), [f32(8192, 32000)], 4096, id="nothing held"),
        pytest.param(lambda x: x.sum(-1), [f32(3, 70000)], "8192, 2 parts", id="few, which fit the cache"),
    ],
)
def test_rows(function: Callable[..., Any], shapes: list[jax.ShapeDtypeStruct], block: int | str) -> None:
    kernel = kernel_of(function, shapes)
    assert f" in blocks of 1x{block}:" in kernel.text, kernel.text


def centred(x: jax.Array) -> jax.Array:
    return x - x.max(-1, keepdims=True)


def kernel_of(function: Callable[..., Any], shapes: list[jax.ShapeDtypeStruct]) -> RegionKernel:
    """That of the only region that reduces rows, or of the only one."""
    flat = flatten(for_accelerator(import_module(hlo_bytes(function, *shapes))).entry)
    regions = [item for item in schedule(flat, H100).items if isinstance(item, Region)]
    (region,) = [r for r in regions if r.reductions and r.rank == 2] or regions
    return prepare(region, H100)


@pytest.mark.parametrize(
    ("rows", "size", "together", "warps"),
    [
        pytest.param(100_000, 64, 16, 1, id="several for a warp"),
        pytest.param(8192, 768, 1, 1, id="one for a warp"),
        pytest.param(300, 64, 1, 1, id="few small ones"),
        pytest.param(32, 1024, 1, 2, id="few"),
        pytest.param(1, 4096, 1, 16, id="only one"),
        pytest.param(1, 8192, 1, 32, id="only a longer one"),
        pytest.param(32, 2048, 1, 4, id="few larger ones"),
        pytest.param(8192, 2048, 1, 2, id="one for two warps"),
        pytest.param(8192, 8192, 1, 8, id="one for eight warps"),
    ],
)
def test_warps_of_rows(rows: int, size: int, together: int, warps: int) -> None:
    kernel = kernel_of(rms_norm, [bf16(rows, size), bf16(size)])
    assert f" in blocks of {together}x" in kernel.text, kernel.text
    assert kernel.launches[0].warps == warps


def test_threads_of_a_program() -> None:
    """At most 1,024, also where a warp has twice as many."""
    flat = flatten(for_accelerator(import_module(hlo_bytes(lambda x: jax.nn.softmax(x, -1), bf16(4096, 65536)))).entry)
    (region,) = schedule(flat, H100).items
    assert isinstance(region, Region)
    for lanes, warps in ((32, 32), (64, 16)):
        assert prepare(region, replace(H100, vendor="amd", warp_size=lanes)).launches[0].warps == warps


@pytest.mark.parametrize(
    ("function", "dims", "first", "wide"),
    [
        pytest.param(lambda x: x.max(), (2_100_000_000,), "part * 8192", False, id="of parts, not near the end"),
        pytest.param(lambda x: x.max(), (2_147_000_000,), "part * 8192", True, id="of parts"),
        pytest.param(centred, (500, 2_147_480_000), "tl.full([], 0, tl.int64)", True, id="of one part"),
    ],
)
def test_counters_that_stop_past_32_bits_are_wide(
    function: Callable[..., Any], dims: tuple[int, ...], first: str, wide: bool
) -> None:
    """A step past the end of a row that itself has fewer elements."""
    kernel = kernel_of(function, [jax.ShapeDtypeStruct(dims, jnp.int8)])
    assert f"range({first}, {dims[-1]}, " in kernel.source
    assert ("tl.int64" in kernel.source) is wide


def gradient_by_statistics(x: jax.Array, gain: jax.Array, scale: jax.Array, g: jax.Array) -> tuple[jax.Array, ...]:
    wide = g.astype(jnp.float32) * gain.astype(jnp.float32)
    found = scale * (wide - x.astype(jnp.float32) * (wide * x.astype(jnp.float32)).mean(-1, keepdims=True))
    return found.astype(x.dtype), (g.astype(jnp.float32) * x.astype(jnp.float32) * scale).sum(0).astype(gain.dtype)


@pytest.mark.parametrize(
    ("rows", "size", "parts", "warps"),
    [
        pytest.param(100_000, 64, 390, 1, id="sixteen blocks each"),
        pytest.param(1_000_000, 64, 1056, 1, id="several for a warp"),
        pytest.param(8192, 768, 512, 1, id="few"),
        pytest.param(65536, 768, 1056, 1, id="one for a warp"),
        pytest.param(65536, 2048, 528, 2, id="one for two warps"),
        pytest.param(16384, 8192, 132, 8, id="one for eight warps"),
    ],
)
def test_rows_that_are_loaded_ahead_while_columns_add_up(rows: int, size: int, parts: int, warps: int) -> None:
    """What a row shares takes no part of the memory that rows ahead are loaded to."""
    shapes = [bf16(rows, size), bf16(size), f32(rows, 1), bf16(rows, size)]
    kernel = kernel_of(gradient_by_statistics, shapes)
    assert f", {parts} parts:" in kernel.text, kernel.text
    assert kernel.launches[0].warps == warps
    assert kernel.tiling.stages == 3


def of_rows(x: jax.Array, shared: jax.Array) -> jax.Array:
    return x * shared


@pytest.mark.parametrize(
    ("shapes", "blocks"),
    [
        pytest.param([bf16(8192, 32000), bf16(8192, 1)], "1x1024", id="rows"),
        pytest.param([bf16(8192, 768), bf16(8192, 1)], "4x256", id="a multiple of less"),
        pytest.param([f32(64, 256, 56, 56), f32(256, 1, 1)], "4x256", id="channels"),
        pytest.param([bf16(8192, 768), bf16(768)], "1024", id="nothing that rows share"),
        pytest.param([bf16(8192, 32001), bf16(8192, 1)], "1024", id="between units of memory"),
        pytest.param([f32(64, 256, 7, 7), f32(256, 1, 1)], "1024", id="short rows"),
        pytest.param([f32(256, 560), f32(256, 1)], "512", id="few"),
        pytest.param([f32(10_000, 516), f32(10_000, 1)], "1024", id="a multiple of little"),
    ],
)
def test_points_of_rows(shapes: list[jax.ShapeDtypeStruct], blocks: str) -> None:
    kernel = kernel_of(of_rows, shapes)
    assert f" in blocks of {blocks}:" in kernel.text, kernel.text
    assert ("//" in kernel.source.split("program // ")[0]) is ("x" not in blocks and shapes[1].shape[-1] == 1)


def of_many(*arrays: jax.Array) -> list[jax.Array]:
    """As optimisers clip gradients: by the norm of all of them."""
    norm = jnp.sqrt(sum(((jnp.sin(p) ** 2).sum() for p in arrays), jnp.float32(0)))
    return [jnp.tanh(p / jnp.maximum(1.0, norm)) for p in arrays]


def items_of(function: Callable[..., Any], shapes: Sequence[jax.ShapeDtypeStruct]) -> list[Region]:
    items = schedule(flatten(for_accelerator(import_module(hlo_bytes(function, *shapes))).entry), H100).items
    return [item for item in items if isinstance(item, Region)]


def test_what_would_keep_one_program_busy_for_long_is_spread() -> None:
    """Each element waits for a sum of everything: in one kernel that is one program."""
    regions = items_of(of_many, [f32(256, 128)] * 12)
    tilings = [choose(region, H100) for region in regions]
    assert len(regions) > 1 and all(tiling.grid > 1 for tiling in tilings)
    # One such array, of so few elements, is over before a second kernel had started.
    assert len(items_of(of_many, [f32(64, 32)])) == 1


@pytest.mark.parametrize(("rows", "size", "is_one"), [(64, 8192, True), (1, 1 << 20, False)])
def test_rows_are_one_kernel_where_that_is_sooner_than_several(rows: int, size: int, is_one: bool) -> None:
    regions = items_of(lambda x: jax.nn.softmax(x, -1), [f32(rows, size)])
    assert (len(regions) == 1) == is_one


def test_sums_of_little_are_not_split() -> None:
    (region,) = items_of(lambda x: x.sum(), [f32(32768)])
    assert choose(region, H100).parts == 1
    (region,) = items_of(lambda x: jnp.cos(jnp.sin(jnp.exp(x))).sum(), [f32(32768 * 2)])
    assert choose(region, H100).parts > 1


def sums(function: Callable[[jax.Array], jax.Array], *arrays: jax.Array) -> jax.Array:
    return functools.reduce(jnp.add, [function(x).sum() for x in arrays])


@pytest.mark.parametrize(
    ("function", "count", "points"),
    [(jnp.sqrt, 12, 16), (jnp.exp, 12, 16), (jnp.sin, 12, 2)],
)
def test_functions_that_are_much_code_have_fewer_points_per_lane(
    function: Callable[[jax.Array], jax.Array], count: int, points: int
) -> None:
    """Compilers write each of them out for each point of a lane: twelve sines of sixteen points took them seconds."""
    kernel = kernel_of(functools.partial(sums, function), [f32(256, 128)] * count)
    blocks = (axis.block for axis in kernel.tiling.axes)
    assert max(blocks) // (32 * kernel.launches[0].warps) == points, kernel.text


@pytest.mark.parametrize("axis", [None, 0, 1])
def test_many_functions_compile_to_little_code(axis: int | None) -> None:
    def function(*arrays: jax.Array) -> jax.Array:
        total = functools.reduce(jnp.add, map(jnp.tan, arrays))
        return total if axis is None else total.sum(axis)

    kernel = kernel_of(function, [f32(4096, 2048)] * 12)
    assert len(compiled(kernel)[0].splitlines()) < 9000
