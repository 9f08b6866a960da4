"""Of wild.py: graphs, experts, recurrent and state-space models, images, audio, detection, serving."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax, random

_Arrays = tuple[jax.Array, ...]


# ---- Graphs, experts, sparse work


def message_passing(x: jax.Array, w1: jax.Array, w2: jax.Array, edges: jax.Array) -> Any:
    def loss(w: _Arrays) -> jax.Array:
        h = x
        for weight in w:
            h = jax.nn.relu(jax.ops.segment_sum((h @ weight)[edges[0]], edges[1], len(x)) + h)
        return (h**2).mean()

    return jax.value_and_grad(loss)((w1, w2))


def attention_on_edges(x: jax.Array, w: jax.Array, a: jax.Array, edges: jax.Array) -> Any:
    def loss(w: jax.Array) -> jax.Array:
        h = x @ w
        e = jax.nn.leaky_relu((h @ a[0])[edges[0]] + (h @ a[1])[edges[1]], 0.2)
        top = jax.ops.segment_max(e, edges[1], len(x))
        e = jnp.exp(e - lax.stop_gradient(top)[edges[1]])
        share = e / jax.ops.segment_sum(e, edges[1], len(x))[edges[1]]
        return (jax.ops.segment_sum(h[edges[0]] * share[:, None], edges[1], len(x)) ** 2).mean()

    return jax.value_and_grad(loss)(w)


def page_rank(x: jax.Array, edges: jax.Array) -> jax.Array:
    degree = jax.ops.segment_sum(jnp.ones(edges.shape[1]), edges[0], len(x)) + 1

    def step(_: int, rank: jax.Array) -> jax.Array:
        return 0.15 / len(x) + 0.85 * jax.ops.segment_sum((rank / degree)[edges[0]], edges[1], len(x))

    return lax.fori_loop(0, 20, step, jax.nn.softmax(x))


def experts_by_capacity(x: jax.Array, router: jax.Array, up: jax.Array, down: jax.Array) -> Any:
    count, capacity = up.shape[0], 2 * len(x) // up.shape[0]

    def loss(w: _Arrays) -> jax.Array:
        share = jax.nn.softmax(x @ w[0])
        expert = jnp.argmax(share, -1)
        chosen = jax.nn.one_hot(expert, count, dtype=jnp.int32)
        place = (jnp.cumsum(chosen, 0) * chosen).max(-1) - 1
        taken = jnp.zeros((count, capacity, x.shape[1])).at[expert, place].set(x, mode="drop")
        made = jnp.einsum("ecf,efd->ecd", jax.nn.relu(jnp.einsum("ecd,edf->ecf", taken, w[1])), w[2])
        back = made.at[expert, place].get(mode="fill", fill_value=0.0)
        return ((back * jnp.take_along_axis(share, expert[:, None], -1)) ** 2).mean()

    return jax.value_and_grad(loss)((router, up, down))


def experts_by_masks(x: jax.Array, router: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
    """Dispatch and return by products with one-hot arrays."""
    count, capacity = up.shape[0], 2 * len(x) // up.shape[0]
    share, expert = lax.top_k(jax.nn.softmax(x @ router), 1)
    chosen = jax.nn.one_hot(expert[:, 0], count)
    place = ((jnp.cumsum(chosen, 0) - 1) * chosen).sum(-1)
    where = chosen[:, :, None] * jax.nn.one_hot(place.astype(jnp.int32), capacity)[:, None]
    taken = jnp.einsum("nec,nd->ecd", where, x)
    made = jnp.einsum("ecf,efd->ecd", jax.nn.silu(jnp.einsum("ecd,edf->ecf", taken, up)), down)
    return jnp.einsum("nec,ecd->nd", where * share[:, :, None], made)


def hashed_histogram(x: jax.Array) -> jax.Array:
    for factor in (0x85EBCA6B, 0xC2B2AE35, 0x27D4EB2D):
        x = (x ^ (x >> jnp.uint32(16))) * jnp.uint32(factor)
    return jnp.bincount(x % jnp.uint32(1024), length=1024)


# ---- Recurrent and state-space models


def lstm_gradient(w: jax.Array, xs: jax.Array) -> Any:
    def loss(w: jax.Array) -> jax.Array:
        def step(state: _Arrays, x: jax.Array) -> tuple[_Arrays, jax.Array]:
            h, c = state
            i, f, g, o = jnp.split(jnp.concatenate([x, h], -1) @ w, 4, -1)
            c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
            h = jax.nn.sigmoid(o) * jnp.tanh(c)
            return (h, c), h

        start = (jnp.zeros(xs.shape[1:]),) * 2
        return (lax.scan(step, start, xs)[1] ** 2).mean()

    return jax.value_and_grad(loss)(w)


def selective_scan(x: jax.Array, dt: jax.Array, a: jax.Array, b: jax.Array, c: jax.Array) -> jax.Array:
    dt = jax.nn.softplus(dt)
    decay = jnp.exp(dt[..., None] * -jnp.abs(a))
    fed = (dt * x)[..., None] * b[:, None]

    def combine(left: _Arrays, right: _Arrays) -> _Arrays:
        return left[0] * right[0], right[0] * left[1] + right[1]

    return (lax.associative_scan(combine, (decay, fed))[1] * c[:, None]).sum(-1)


def linear_attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    def step(state: jax.Array, now: _Arrays) -> tuple[jax.Array, jax.Array]:
        q, k, v = now
        state = 0.98 * state + k[:, :, None] * v[:, None]
        return state, jnp.einsum("hd,hde->he", q, state)

    return lax.scan(step, jnp.zeros((*q.shape[1:], v.shape[-1])), (jax.nn.elu(q) + 1, jax.nn.elu(k) + 1, v))[1]


# ---- Images, audio, detection


def unet_gradient(x: jax.Array, *w: jax.Array) -> Any:
    def convolve(x: jax.Array, w: jax.Array, stride: int = 1) -> jax.Array:
        numbers = ("NHWC", "HWIO", "NHWC")
        return lax.conv_general_dilated(x, w, (stride, stride), "SAME", dimension_numbers=numbers)

    def normalise(x: jax.Array) -> jax.Array:
        groups = x.reshape(*x.shape[:3], 8, -1)
        mean, variance = groups.mean((1, 2, 4), keepdims=True), groups.var((1, 2, 4), keepdims=True)
        return jax.nn.silu(((groups - mean) * lax.rsqrt(variance + 1e-5)).reshape(x.shape))

    def loss(w: Sequence[jax.Array]) -> jax.Array:
        first = convolve(x, w[0])
        first = first + convolve(normalise(first), w[1])
        low = convolve(normalise(first), w[2], 2)
        low = low + convolve(normalise(low), w[3])
        high = jax.image.resize(convolve(normalise(low), w[4]), first.shape, "nearest")
        return (convolve(normalise(jnp.concatenate([high, first], -1)), w[5]) ** 2).mean()

    return jax.value_and_grad(loss)(list(w))


def log_mel(x: jax.Array, filters: jax.Array) -> jax.Array:
    frames = jnp.arange(0, x.shape[1] - 512, 160)[:, None] + jnp.arange(512)
    power = jnp.abs(jnp.fft.rfft(x[:, frames] * jnp.hanning(512).astype(x.dtype))) ** 2
    return jnp.log(power @ jnp.abs(filters) + 1e-6)


def suppressed_boxes(boxes: jax.Array, scores: jax.Array) -> jax.Array:
    boxes = jnp.abs(boxes)
    boxes = boxes.at[:, 2:].add(boxes[:, :2])[jnp.argsort(-scores)]
    low = jnp.maximum(boxes[:, None, :2], boxes[None, :, :2])
    size = jnp.clip(jnp.minimum(boxes[:, None, 2:], boxes[None, :, 2:]) - low, 0)
    shared = size[..., 0] * size[..., 1]
    area = (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])
    overlap = shared / (area[:, None] + area - shared)
    later = jnp.arange(len(boxes))

    def step(k: int, kept: jax.Array) -> jax.Array:
        return jnp.where(kept[k] & (later > k), kept & (overlap[k] < 0.5), kept)

    return lax.fori_loop(0, len(boxes), step, jnp.ones(len(boxes), bool))


def augmented(images: jax.Array, key: jax.Array) -> jax.Array:
    def one(key: jax.Array, x: jax.Array) -> jax.Array:
        where, turn, light = random.split(key, 3)
        corner = random.randint(where, (2,), 0, 8)
        x = lax.dynamic_slice(jnp.pad(x, ((4, 4), (4, 4), (0, 0))), (corner[0], corner[1], 0), x.shape)
        x = jnp.where(random.bernoulli(turn), x[:, ::-1], x)
        return jnp.clip(x * random.uniform(light, (), minval=0.8, maxval=1.2), 0, 1)

    return jax.vmap(one)(random.split(random.wrap_key_data(key), len(images)), images)


def bilinear_warp(image: jax.Array, flow: jax.Array) -> jax.Array:
    height, width = image.shape[:2]
    y, x = jnp.meshgrid(jnp.arange(height), jnp.arange(width), indexing="ij")
    places = jnp.stack([y + flow[..., 0], x + flow[..., 1]])
    one = lambda channel: jax.scipy.ndimage.map_coordinates(channel, list(places), 1, mode="nearest")  # noqa: E731
    return jax.vmap(one, -1, -1)(image)


# ---- Serving


def decode_step(x: jax.Array, qkv: jax.Array, out: jax.Array, up: jax.Array, down: jax.Array, cache: jax.Array) -> Any:
    """A token through four layers in bfloat16, with a cache of 1,024 positions of which 700 are filled."""
    heads, positions, place = cache.shape[3], cache.shape[2], 700

    def normalise(x: jax.Array) -> jax.Array:
        return (x * lax.rsqrt((x.astype(jnp.float32) ** 2).mean(-1, keepdims=True) + 1e-6)).astype(x.dtype)

    def layer(x: jax.Array, part: _Arrays) -> tuple[jax.Array, jax.Array]:
        qkv, out, up, down, cache = part
        q, k, v = (a.reshape(1, 1, heads, -1) for a in jnp.split(normalise(x) @ qkv, 3, -1))
        cache = lax.dynamic_update_slice(cache, jnp.concatenate([k, v]), (0, place, 0, 0))
        logits = jnp.einsum("bqhd,bkhd->bhqk", q, cache[:1]).astype(jnp.float32) * q.shape[-1] ** -0.5
        share = jax.nn.softmax(jnp.where(jnp.arange(positions) <= place, logits, -1e9)).astype(x.dtype)
        x = x + jnp.einsum("bhqk,bkhd->bqhd", share, cache[1:]).reshape(x.shape) @ out
        gate, value = jnp.split(normalise(x) @ up, 2, -1)
        return x + (jax.nn.silu(gate) * value) @ down, cache

    return lax.scan(layer, x, (qkv, out, up, down, cache))


def sampled_token(logits: jax.Array, key: jax.Array) -> jax.Array:
    values, tokens = lax.top_k(logits / 0.8, 50)
    share = jax.nn.softmax(values)
    values = jnp.where(jnp.cumsum(share, -1) - share < 0.9, values, -jnp.inf)
    chosen = random.categorical(random.wrap_key_data(key), values)
    return jnp.take_along_axis(tokens, chosen[:, None], -1)


def quantised_layers(x: jax.Array, w1: jax.Array, w2: jax.Array) -> jax.Array:
    for w in (w1, w2):
        step = jnp.max(jnp.abs(x), -1, keepdims=True) / 127
        q = jnp.round(x / step).astype(jnp.int8)
        x = jax.nn.gelu(lax.dot(q, w, preferred_element_type=jnp.int32) * step * 1e-3)
    return x


def low_rank_gradient(x: jax.Array, w: jax.Array, a: jax.Array, b: jax.Array) -> Any:
    def loss(ab: _Arrays) -> jax.Array:
        h = x
        for _ in range(3):
            h = jax.nn.gelu(h @ w + (h @ ab[0]) @ ab[1] * 2)
        return (h**2).mean()

    return jax.value_and_grad(loss)((a, b))


def beam_step(scores: jax.Array, logits: jax.Array) -> Any:
    total = scores[:, :, None] + jax.nn.log_softmax(logits)
    best, flat = lax.top_k(total.reshape(len(total), -1), scores.shape[1])
    return best, flat // logits.shape[-1], flat % logits.shape[-1]


def edit_distance(a: jax.Array, b: jax.Array) -> jax.Array:
    """By the rows of the table, a scan within a scan."""

    def row(above: jax.Array, letter: jax.Array) -> tuple[jax.Array, None]:
        kept = jnp.minimum(above[1:] + 1, above[:-1] + (b != letter))

        def cell(left: jax.Array, best: jax.Array) -> tuple[jax.Array, jax.Array]:
            left = jnp.minimum(left + 1, best)
            return left, left

        first = above[0] + 1
        return jnp.concatenate([first[None], lax.scan(cell, first, kept)[1]]), None

    return lax.scan(row, jnp.arange(len(b) + 1), a)[0][-1]
