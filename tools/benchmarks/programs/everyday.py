"""What JAX users write beside models and their kernels: indexing, counting, reductions in all directions, integers,
complex numbers, linear algebra, small scans, stencils, windows. Sizes take a core of a host tenths of a millisecond or
more."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .kernels import F32, normal, normals
from .program import Arguments, Program

_Draw = Callable[[np.random.Generator], Any]


def _array(*shape: int) -> _Draw:
    return lambda random: normal(random, shape, F32)


def _uniform(*shape: int) -> _Draw:
    return lambda random: random.random(shape, np.float32)


def _integers(limit: int, *shape: int, dtype: type[np.integer] = np.int32) -> _Draw:
    return lambda random: random.integers(limit, size=shape, dtype=dtype)


def _complex(*shape: int) -> _Draw:
    return lambda random: (normal(random, shape, F32) + 1j * normal(random, shape, F32)).astype(np.complex64)


def _of(*draws: _Draw) -> Callable[[np.random.Generator], Arguments]:
    return lambda random: tuple(draw(random) for draw in draws)


def _key(random: np.random.Generator) -> Arguments:
    return (random.integers(1 << 32, size=2, dtype=np.uint32),)


def _definite(size: int, *batch: int) -> _Draw:
    """Symmetric matrices whose eigenvalues are positive."""

    def draw(random: np.random.Generator) -> Any:
        root = normal(random, (*batch, size, size), F32)
        return root @ root.swapaxes(-1, -2) / size + np.eye(size, dtype=np.float32)

    return draw


def _indexing() -> list[Program]:
    places, table = _integers(1024, 100_000), _array(1024, 1024)

    def embedding_gradient(table: jax.Array, rows: jax.Array) -> jax.Array:
        return jax.grad(lambda t: (t[rows] ** 2).sum())(table)

    def sums_by_group(values: jax.Array, groups: jax.Array) -> jax.Array:
        return jax.ops.segment_sum(values, groups, 1000)

    def maxima_by_group(values: jax.Array, groups: jax.Array) -> jax.Array:
        return jax.ops.segment_max(values, groups, 1000)

    def message_passing(x: jax.Array, source: jax.Array, target: jax.Array, weights: jax.Array) -> jax.Array:
        return jax.nn.relu(jax.ops.segment_sum(x[source] @ weights, target, 1000))

    grouped = _of(_array(20_000, 32), _integers(1000, 20_000))
    edges = _of(_array(1000, 64), _integers(1000, 10_000), _integers(1000, 10_000), _array(64, 64))
    return [
        Program("rows of a table", lambda t, k: t[k], _of(_array(10_000, 128), _integers(10_000, 4096))),
        Program("elements of a vector", lambda t, k: t[k], _of(_array(100_000), _integers(100_000, 500_000))),
        Program("elements of a matrix", lambda t, a, b: t[a, b], _of(table, places, places)),
        Program("columns of a matrix", lambda t, k: t[:, k], _of(_array(256, 4096), _integers(4096, 1024))),
        Program("take_along_axis", lambda t, k: jnp.take_along_axis(t, k, 1), _of(table, _integers(1024, 1024, 64))),
        Program("rows set", lambda t, k, v: t.at[k].set(v), _of(table, lambda r: r.permutation(64), _array(64, 1024))),
        Program(
            "rows added",
            lambda k, v: jnp.zeros((10_000, 128)).at[k].add(v),
            _of(_integers(10_000, 4096), _array(4096, 128)),
        ),
        Program(
            "elements added", lambda k, v: jnp.zeros(1000).at[k].add(v), _of(_integers(1000, 200_000), _array(200_000))
        ),
        Program("embedding gradient", embedding_gradient, _of(_array(10_000, 128), _integers(10_000, 2048))),
        Program("sums by group", sums_by_group, grouped),
        Program("maxima by group", maxima_by_group, grouped),
        Program("bincount", lambda k: jnp.bincount(k, length=1000), _of(_integers(1000, 200_000)), precision=0.0),
        Program("histogram", lambda x: jnp.histogram(x, bins=50)[0], normals((100_000,))),
        Program("interpolation", lambda x, a, b: jnp.interp(x, jnp.sort(a), b), normals((100_000,), (100,), (100,))),
        Program("message passing", message_passing, edges),
    ]


def _reductions() -> list[Program]:
    def distances(x: jax.Array, y: jax.Array) -> jax.Array:
        return ((x[:, None] - y[None]) ** 2).sum(-1)

    def k_means(x: jax.Array, centers: jax.Array) -> jax.Array:
        nearest = distances(x, centers).argmin(1)
        counts = jax.ops.segment_sum(jnp.ones(len(x)), nearest, len(centers))
        return jax.ops.segment_sum(x, nearest, len(centers)) / jnp.maximum(counts, 1)[:, None]

    def batch_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
        return (x - x.mean((0, 1, 2))) * lax.rsqrt(x.var((0, 1, 2)) + 1e-5) * scale

    def group_norm(x: jax.Array) -> jax.Array:
        groups = x.reshape(*x.shape[:3], 8, -1)
        axes = (1, 2, 4)
        centered = groups - groups.mean(axes, keepdims=True)
        return (centered * lax.rsqrt(groups.var(axes, keepdims=True) + 1e-5)).reshape(x.shape)

    table, images = normals((1024, 1024)), normals((8, 32, 32, 64), (64,))
    rows = normals((65536, 16), (65536, 16))
    return [
        Program("argmax of rows", lambda x: x.argmax(1), table, precision=0.0),
        Program("argmin of columns", lambda x: x.argmin(0), table, precision=0.0),
        Program("sum of columns", lambda x: x.sum(0), table),
        Program("variance of columns", lambda x: x.var(0), table),
        Program("sum over the middle", lambda x: x.sum(1), normals((64, 256, 64))),
        Program("sum over both ends", lambda x: x.sum((0, 2)), normals((64, 256, 64))),
        Program("means of images", lambda x: x.mean((1, 2)), normals((16, 32, 32, 64))),
        Program("norms of rows", lambda x: jnp.linalg.norm(x, axis=1), table),
        Program("norm of an array", jnp.linalg.norm, table),
        Program("inner product", jnp.vdot, normals((1_000_000,), (1_000_000,))),
        Program("inner products of rows", lambda x, y: (x[:, None] @ y[:, :, None])[:, 0, 0], rows),
        Program("batch norm", batch_norm, images),
        Program("batch norm gradient", jax.grad(lambda x, s: (batch_norm(x, s) ** 3).sum()), images),
        Program("group norm", group_norm, normals((4, 32, 32, 64))),
        Program("pairwise distances", distances, normals((256, 32), (256, 32))),
        Program("k-means step", k_means, normals((10_000, 16), (16, 16))),
        Program("cumulative sum", lambda x: jnp.cumsum(x, 1), table),
        Program("trace of a product", lambda a, b: jnp.einsum("ij,ji->", a, b), normals((512, 512), (512, 512))),
    ]


def _scalars() -> list[Program]:
    numbers = _of(_integers(1 << 30, 1024, 1024))

    def mandelbrot(c: jax.Array) -> jax.Array:
        def step(_: int, state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            z, count = state
            inside = jnp.abs(z) < 4
            return jnp.where(inside, z * z + c, z), count + inside

        return lax.fori_loop(0, 50, step, (jnp.zeros_like(c), jnp.zeros(c.shape, jnp.int32)))[1]

    table = normals((1024, 1024))
    return [
        Program("quotients of integers", lambda x: x * 7 + x // 3, numbers, precision=0.0),
        Program("remainders of integers", lambda x: x % 1000, numbers, precision=0.0),
        Program("bits set", lax.population_count, numbers, precision=0.0),
        Program(
            "images of bytes",
            lambda x: x.astype(jnp.float32) / 255 - 0.5,
            _of(_integers(255, 1024, 1024, dtype=np.uint8)),
        ),
        Program("gelu in float16", lambda x: jax.nn.gelu(x.astype(jnp.float16)), table),
        Program("error function", lax.erf, table),
        Program("powers", lambda x: jnp.abs(x) ** 2.7, table),
        Program("product of complex numbers", lambda x: x * x + 1, _of(_complex(512, 1024))),
        Program("absolute values of complex numbers", jnp.abs, _of(_complex(512, 1024))),
        Program("Mandelbrot set", mandelbrot, _of(_complex(256, 256)), precision=1.0),
        Program("one-hot", lambda k: jax.nn.one_hot(k, 1000), _of(_integers(1000, 1024))),
        Program("cross product", jnp.cross, normals((100_000, 3), (100_000, 3))),
        Program("polynomial", jnp.polyval, normals((10,), (200_000,))),
        Program("gamma", lambda k: jax.random.gamma(jax.random.wrap_key_data(k), 2.0, (5000,)), _key),
        Program(
            "permutation", lambda k: jax.random.permutation(jax.random.wrap_key_data(k), 50_000), _key, precision=0.0
        ),
        Program(
            "categorical",
            lambda k: jax.random.categorical(jax.random.wrap_key_data(k), jnp.zeros((256, 4096))),
            _key,
            precision=0.0,
        ),
    ]


def _movement() -> list[Program]:
    def rotary(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
        even, odd = x[..., ::2], x[..., 1::2]
        return jnp.stack([even * cos - odd * sin, even * sin + odd * cos], -1).reshape(x.shape)

    def heat(x: jax.Array) -> jax.Array:
        def step(_: int, x: jax.Array) -> jax.Array:
            around = x[2:, 1:-1] + x[:-2, 1:-1] + x[1:-1, 2:] + x[1:-1, :-2]
            return x.at[1:-1, 1:-1].add(0.1 * (around - 4 * x[1:-1, 1:-1]))

        return lax.fori_loop(0, 20, step, x)

    def game_of_life(x: jax.Array) -> jax.Array:
        shifts = [(a, b) for a in (-1, 0, 1) for b in (-1, 0, 1) if (a, b) != (0, 0)]

        def step(_: int, x: jax.Array) -> jax.Array:
            around = functools.reduce(jnp.add, (jnp.roll(x, shift, (0, 1)) for shift in shifts))
            return ((around == 3) | ((around == 2) & (x > 0))).astype(x.dtype)

        return lax.fori_loop(0, 10, step, x)

    def resize(x: jax.Array) -> jax.Array:
        return jax.image.resize(x, (4, 128, 128, 16), "bilinear")

    table = normals((1024, 1024))
    return [
        Program("transpose", lambda x: x.T, table),
        Program("channels first", lambda x: x.transpose(0, 3, 1, 2), normals((8, 64, 64, 32))),
        Program("heads before positions", lambda x: x.transpose(0, 2, 1, 3), normals((4, 128, 16, 64))),
        Program("reversed rows", lambda x: x[:, ::-1], table),
        Program("every other element", lambda x: x[::2, ::2], table),
        Program("concatenation", lambda x: jnp.concatenate([x, x + 1], 1), table),
        Program("lower triangle", jnp.tril, table),
        Program("rotary positions", rotary, normals((4, 256, 8, 64), (256, 1, 32), (256, 1, 32))),
        Program("heat equation", heat, normals((256, 256))),
        Program("game of life", game_of_life, _of(_integers(2, 256, 256)), precision=0.0),
        Program("bilinear resize", resize, normals((4, 64, 64, 16))),
    ]


def _linear_algebra() -> list[Program]:
    def kalman(measured: jax.Array, motion: jax.Array) -> jax.Array:
        def step(state: tuple[jax.Array, jax.Array], z: jax.Array) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
            x, p = motion @ state[0], motion @ state[1] @ motion.T + 0.1 * jnp.eye(4)
            gain = p @ jnp.linalg.inv(p + jnp.eye(4))
            return (x + gain @ (z - x), (jnp.eye(4) - gain) @ p), x

        return lax.scan(step, (jnp.zeros(4), jnp.eye(4)), measured)[1]

    def convolution(x: jax.Array, kernel: jax.Array, **options: Any) -> jax.Array:
        return lax.conv_general_dilated(
            x, kernel, padding="SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"), **options
        )

    def product_of_bytes(a: jax.Array, b: jax.Array) -> jax.Array:
        return lax.dot(a, b, preferred_element_type=jnp.int32)

    square, bytes_ = _definite(128), _integers(100, 256, 256, dtype=np.int8)
    depthwise = functools.partial(convolution, window_strides=(1, 1), feature_group_count=64)
    return [
        Program("Cholesky", jnp.linalg.cholesky, _of(square)),
        Program("determinant", jnp.linalg.det, _of(square)),
        Program("inverse", jnp.linalg.inv, _of(square)),
        Program("linear system", jnp.linalg.solve, _of(square, _array(128, 16))),
        Program("small linear systems", jnp.linalg.solve, _of(_definite(8, 500), _array(500, 8, 1))),
        Program("QR", lambda x: jnp.abs(jnp.linalg.qr(x)[1]), normals((128, 128))),
        Program("eigenvalues", jnp.linalg.eigvalsh, _of(square)),
        Program("Kalman filter", kalman, _of(_array(100, 4), lambda _: 0.9 * np.eye(4, dtype=np.float32))),
        Program("real Fourier transform", lambda x: jnp.abs(jnp.fft.rfft(x)), normals((64, 1024))),
        Program("product with a vector", jnp.matmul, normals((2048, 2048), (2048,))),
        Program("products of small matrices", jnp.matmul, normals((2000, 16, 16), (2000, 16, 16))),
        Program("product of bytes", product_of_bytes, _of(bytes_, bytes_), precision=0.0),
        Program(
            "convolution",
            functools.partial(convolution, window_strides=(1, 1)),
            normals((4, 32, 32, 64), (3, 3, 64, 64)),
        ),
        Program("depthwise convolution", depthwise, normals((4, 32, 32, 64), (3, 3, 1, 64))),
        Program(
            "convolution, channels first",
            lambda x, k: lax.conv(x, k, (1, 1), "SAME"),
            normals((4, 64, 32, 32), (64, 64, 3, 3)),
        ),
        Program(
            "transposed convolution",
            lambda x, k: lax.conv_transpose(x, k, (2, 2), "SAME"),
            normals((4, 16, 16, 64), (4, 4, 64, 32)),
        ),
    ]


def _loops() -> list[Program]:
    def gru(x: jax.Array, inputs: jax.Array, states: jax.Array, bias: jax.Array) -> jax.Array:
        def step(h: jax.Array, row: jax.Array) -> tuple[jax.Array, jax.Array]:
            update, reset, new = jnp.split(0.1 * (row @ inputs + h @ states) + bias, 3, -1)
            update = jax.nn.sigmoid(update)
            h = (1 - update) * h + update * jnp.tanh(new * jax.nn.sigmoid(reset))
            return h, h

        return lax.scan(step, jnp.zeros((x.shape[1], states.shape[0])), x)[1]

    def viterbi(emitted: jax.Array, transitions: jax.Array) -> jax.Array:
        def step(score: jax.Array, row: jax.Array) -> tuple[jax.Array, jax.Array]:
            reached = score[:, None] + transitions
            return reached.max(0) + row, reached.argmax(0)

        return lax.scan(step, emitted[0], emitted[1:])[1]

    def smoothed(x: jax.Array) -> jax.Array:
        return lax.scan(lambda c, y: (c * 0.9 + y, c * 0.9 + y), jnp.zeros(()), x)[1]

    def bodies(positions: jax.Array, speeds: jax.Array) -> jax.Array:
        def step(_: int, state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            p, v = state
            apart = p[None] - p[:, None]
            v = v + 0.01 * (apart * (jnp.square(apart).sum(-1) + 0.01)[..., None] ** -1.5).sum(1)
            return p + 0.01 * v, v

        return lax.fori_loop(0, 10, step, (positions, speeds))[0]

    def recurrence(factors: jax.Array, addends: jax.Array) -> jax.Array:
        def after(a: tuple[jax.Array, jax.Array], b: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            return a[0] * b[0], a[1] * b[0] + b[1]

        return lax.associative_scan(after, (factors, addends))[1]

    def newton(a: jax.Array) -> jax.Array:
        def step(state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            better = (state[0] + a / state[0]) / 2
            return better, better - state[0]

        return lax.while_loop(lambda state: jnp.abs(state[1]).max() > 1e-5, step, (a, a))[0]

    def mean_of_states(weights: jax.Array, x: jax.Array) -> jax.Array:
        """Whose gradient is a scan over numbers that are all the same."""
        return lax.scan(lambda h, row: (jnp.tanh(h @ weights + row),) * 2, x[0], x)[1].mean()

    def masked(h: jax.Array, weights: jax.Array, mask: jax.Array) -> jax.Array:
        return lax.fori_loop(0, 100, lambda _, h: jnp.tanh(0.05 * (h @ jnp.where(mask > 0, weights, 0))), h)

    def rows_of_computed(table: jax.Array) -> jax.Array:
        return lax.fori_loop(0, 1000, lambda i, c: c * 0.9 + (table * 2 + 1)[i], jnp.zeros(table.shape[1]))

    def kept_where_better(table: jax.Array, scores: jax.Array) -> jax.Array:
        def step(i: int, table: jax.Array) -> jax.Array:
            return lax.cond(scores[i] > 0, lambda t: t.at[i].set(scores[i]), lambda t: t, table)

        return lax.fori_loop(0, 1000, step, table)

    shapes: Sequence[tuple[int, ...]] = ((100, 16, 64), (64, 192), (64, 192), (192,))
    return [
        Program("GRU", gru, normals(*shapes)),
        Program("GRU gradient", jax.grad(lambda *a: (gru(*a) ** 2).mean(), 1), normals(*shapes)),
        Program("Viterbi", viterbi, normals((500, 32), (32, 32)), precision=0.0),
        Program("gradient of a mean of states", jax.grad(mean_of_states), normals((64, 64), (256, 16, 64))),
        Program("masked weights in a loop", masked, normals((4, 256), (256, 256), (256, 256))),
        Program("rows of a computed table", rows_of_computed, normals((4000, 64))),
        Program("rows kept where better", kept_where_better, normals((4000, 64), (1000,))),
        Program("exponential smoothing", smoothed, normals((5000,))),
        Program("n bodies", bodies, normals((256, 3), (256, 3))),
        Program("Newton's method", newton, _of(lambda random: 1 + random.random(10_000, np.float32))),
        Program(
            "linear recurrence",
            recurrence,
            _of(_uniform(1024, 64), _array(1024, 64)),
        ),
    ]


def everyday() -> list[Program]:
    """All of them."""
    return [*_indexing(), *_reductions(), *_scalars(), *_movement(), *_linear_algebra(), *_loops()]
