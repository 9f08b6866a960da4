"""Data movement, indexing, reductions, windows and sorts. Part of the corpus."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from programs.core import program

# Shape and data movement


@program("f32[3,4]", "s32[4]", "f32[]", exact=True)
def broadcasts(x, y, z):
    return (
        lax.broadcast_in_dim(x, (2, 3, 5, 4), (1, 3)),
        lax.broadcast_in_dim(y, (4, 6), (0,)),
        jnp.broadcast_to(z, (2, 2)),
        jnp.broadcast_to(x[:, :1], (3, 7)),
        lax.broadcast_in_dim(y, (0, 4), (1,)),
    )


@program("f32[2,3,4]", exact=True)
def reshapes_and_transposes(x):
    return (
        x.reshape(6, 4),
        x.reshape(-1),
        x.transpose(2, 0, 1),
        x.T.reshape(4, 6),
        x[None, ..., None],
        x[:1, :1, :1].squeeze(),
    )


@program("f32[7,9]", "f32[2,9]", exact=True)
def slices_and_concatenate(x, y):
    return x[1:6:2, 2:], lax.concatenate([x, y, x[3:3]], 0), lax.rev(x, (1,)), lax.rev(x, (0, 1)), x[::-2]


@program("f32[4,5]", "f32[]", exact=True)
def pads(x, value):
    return (
        lax.pad(x, value, [(1, 2, 0), (0, 3, 0)]),
        lax.pad(x, value, [(-1, 0, 1), (2, -2, 2)]),
        lax.pad(x, value, [(0, 0, 3), (-3, -2, 0)]),
    )


@program("f32[6,7]", "s32[]:index7", "s32[]:index7", "f32[2,3]", exact=True)
def dynamic_slices(x, i, j, update):
    return lax.dynamic_slice(x, (i, j), (3, 2)), lax.dynamic_update_slice(x, update, (i - 3, j + 40))


@program(exact=True)
def iotas():
    return (
        lax.iota(np.int32, 5),
        lax.broadcasted_iota(np.float32, (2, 3, 4), 1),
        lax.broadcasted_iota(np.uint8, (300, 2), 0),
        lax.broadcasted_iota(jnp.bfloat16, (3, 3), 1),
        lax.broadcasted_iota(np.complex64, (3,), 0),
        jnp.eye(4),
        jnp.tril(jnp.ones((3, 3))),
    )


@program("f32[0,3]", "s32[4,0]", exact=True)
def zero_size_arrays(x, y):
    return (
        x.sum(0),
        x @ jnp.ones((3, 2)),
        jnp.concatenate([y, y], 1),
        x.T.reshape(0),
        x.max(1, initial=-1.0),
        jnp.sort(x, 0),
    )


# Indexing


@program("f32[6,7]", "s32[5]:index6", exact=True)
def gather_take_modes(x, i):
    return [jnp.take(x, i, axis=0, mode=mode) for mode in ("clip", "wrap", "fill")]


@program("f32[6,7]", "s32[3,2]:index6", "s32[4]:index6", exact=True)
def gather_fancy(x, i, j):
    return x[i[:, 0], i[:, 1]], x[:, j], x[j][:, ::2], x.at[i[:, 0]].get(mode="fill", fill_value=-7), x[i]


@program("f32[3,5,4]", "s32[3,2]:index5", exact=True)
def gather_batched(x, i):
    return jax.vmap(lambda row, index: row[index])(x, i), jnp.take_along_axis(x, i[:, :, None], 1)


@program("f32[3,4,5]", "s64[2,6,2]:index4", x64=True, exact=True)
def gather_general(x, i):
    dnums = lax.GatherDimensionNumbers(offset_dims=(1, 3), collapsed_slice_dims=(1,), start_index_map=(2, 1))
    return lax.gather(x, i, dnums, (2, 1, 3), mode="clip")


@program("f32[6,7]", "s32[4]:index6", "f32[4,7]", "f32[4]")
def scatter_modes(x, i, u, v):
    return (
        x.at[i].add(u),
        x.at[i].set(1.5),
        x.at[i].mul(u),
        x.at[i].min(u),
        x.at[i].max(u, mode="drop"),
        x.at[i, i].add(v, mode="clip"),
        x.at[:, i].set(u.T[:6], unique_indices=True),
    )


@program("f32[3,5,4]", "s32[3,2]:index5", "f32[3,2,4]")
def scatter_batched(x, i, u):
    return jax.vmap(lambda row, index, update: row.at[index].add(update))(x, i, u)


@program("s32[8]", "s32[6]:index8", "s32[6]", exact=True)
def scatter_apply_integer(x, i, u):
    return x.at[i].apply(lambda v: v * 3 + 1), x.at[i].add(u), jnp.zeros(8, np.int32).at[i].max(u)


@program("f32[5,4]", "s32[3,1]:index5", "f32[3,4]")
def scatter_general_window(x, i, u):
    dnums = lax.ScatterDimensionNumbers(
        update_window_dims=(1,), inserted_window_dims=(0,), scatter_dims_to_operand_dims=(0,)
    )
    return lax.scatter_add(x, i, u, dnums, mode="fill"), lax.scatter(x, i, u, dnums, mode="clip")


@program("f32[40]", "s32[40]:small")
def segment_sum_and_bincount(x, i):
    return jax.ops.segment_sum(x, i, 8), jnp.bincount(i, length=8), jnp.histogram(x, bins=5)


# Reductions, windows, sorts


@program("f32[5,6,7]")
def reduces(x):
    return x.sum(1), x.max((0, 2)), x.min(), x.prod(0), x.mean(-1), x.var(1), jax.nn.logsumexp(x, 2)


@program("f32[5,6]:special", "s32[5,6]", exact=True)
def arg_reduces(x, y):
    return jnp.argmax(x, 1), jnp.argmin(y, 0), jnp.argmax(y), jnp.nanargmin(jnp.where(jnp.isnan(x), 3.0, x), 1)


@program("pred[5,6]", "s8[5,6]", "u32[4]", exact=True)
def reduce_logical(p, x, u):
    return p.all(1), p.any(), x.sum(0, dtype=np.int8), jnp.bitwise_xor.reduce(u), jnp.bitwise_and.reduce(x, 1)


@program("f32[4,6]", "s32[4,6]")
def reduce_variadic_custom(x, i):
    def closest(a, b):
        take = jnp.abs(a[0]) <= jnp.abs(b[0])
        return jnp.where(take, a[0], b[0]), jnp.where(take, a[1], b[1])

    return lax.reduce((x, i), (np.float32(np.inf), np.int32(0)), closest, (1,))


@program("f32[4,9]", "f32[2,3,8,8]")
def reduce_windows(x, image):
    return (
        jnp.cumsum(x, 1),
        lax.cummax(x, 0),
        lax.cumprod(x, 1, reverse=True),
        lax.cumlogsumexp(x, 1),
        lax.reduce_window(image, -np.inf, lax.max, (1, 1, 3, 3), (1, 1, 2, 2), "SAME"),
        lax.reduce_window(image, 0.0, lax.add, (1, 1, 2, 2), (1, 1, 2, 2), "VALID"),
        lax.reduce_window(x, 1.0, lax.mul, (2, 3), (1, 2), [(1, 0), (2, 1)], (2, 1), (1, 2)),
    )


@program("f32[2,8,8,3]")
def select_and_scatter(image):
    def pool(v):
        return lax.reduce_window(v, -np.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID").sum()

    def average(v):
        return (lax.reduce_window(v, 0.0, lax.add, (1, 3, 3, 1), (1, 1, 1, 1), "SAME") ** 2).sum()

    return jax.grad(pool)(image), jax.grad(average)(image)


@program("f32[5,8]:special", "s32[5,8]", exact=True)
def sorts(x, y):
    return jnp.sort(x, 1), jnp.argsort(x, 0), lax.sort((y, x), dimension=1, num_keys=1), lax.sort((x, y), num_keys=2)


@program("f32[4,16]", "s32[4,16]", exact=True)
def top_k(x, y):
    return lax.top_k(x, 3), lax.top_k(y, 16), lax.approx_max_k(x, 2)


@program("f32[64]")
def order_statistics(x):
    return jnp.median(x), jnp.quantile(x, 0.3), jnp.unique(jnp.round(x), size=8), jnp.searchsorted(jnp.sort(x), x[:9])


@program("s32[6,5]", "s32[6,5]", exact=True)
def map_scalar_function(x, y):
    return jax.vmap(jax.vmap(lambda a, b: a * b - a))(x, y)
