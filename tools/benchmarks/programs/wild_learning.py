"""Of wild.py: attention variants, experts by sorting, recommenders, diffusion, losses, optimizers, sequence models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax, random

_Arrays = tuple[jax.Array, ...]


def _rms(x: jax.Array) -> jax.Array:
    return x * lax.rsqrt((x**2).mean(-1, keepdims=True) + 1e-6)


def _rotated(x: jax.Array) -> jax.Array:
    """Rotary positions of [S, H, D], halves apart."""
    half = x.shape[-1] // 2
    angles = jnp.arange(len(x))[:, None] * 10000.0 ** (-jnp.arange(half) / half)
    cos, sin = jnp.cos(angles)[:, None], jnp.sin(angles)[:, None]
    left, right = x[..., :half], x[..., half:]
    return jnp.concatenate([left * cos - right * sin, right * cos + left * sin], -1)


# ---- Attention


def sliding_window_attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Grouped heads; each position sees the 64 before it."""
    q, k = _rotated(q), _rotated(k)
    q = q.reshape(len(q), k.shape[1], -1, q.shape[-1])
    logits = jnp.einsum("qgrd,kgd->grqk", q, k) * q.shape[-1] ** -0.5
    behind = jnp.arange(len(q))[:, None] - jnp.arange(len(k))
    share = jax.nn.softmax(jnp.where((behind >= 0) & (behind < 64), logits, -1e30), -1)
    return jnp.einsum("grqk,kgd->qgrd", share, v).reshape(len(q), -1)


def linear_bias_attention_gradient(x: jax.Array, qkv: jax.Array, out: jax.Array) -> Any:
    """ALiBi: a slope for each of eight heads."""

    def loss(w: _Arrays) -> jax.Array:
        q, k, v = jnp.split((_rms(x) @ w[0]).reshape(len(x), 8, -1), 3, -1)
        distance = jnp.arange(len(x)) - jnp.arange(len(x))[:, None]
        bias = 2.0 ** -jnp.arange(1, 9)[:, None, None] * distance
        logits = jnp.einsum("qhd,khd->hqk", q, k) / jnp.sqrt(q.shape[-1]) + bias
        share = jax.nn.softmax(jnp.where(distance <= 0, logits, -jnp.inf))
        return ((x + jnp.einsum("hqk,khd->qhd", share, v).reshape(len(x), -1) @ w[1]) ** 2).mean()

    return jax.value_and_grad(loss)((qkv, out))


def latent_decode(x: jax.Array, down: jax.Array, up_k: jax.Array, up_v: jax.Array, cache: jax.Array) -> jax.Array:
    """A query of eight heads over a cache of what keys and values are projected from."""
    cache = lax.dynamic_update_slice(cache, _rms(x @ down)[None], (500, 0))
    absorbed = jnp.einsum("hd,hdc->hc", x.reshape(8, -1), up_k)
    logits = jnp.where(jnp.arange(len(cache)) <= 500, absorbed @ cache.T, -jnp.inf)
    return jnp.einsum("hc,hcd->hd", jax.nn.softmax(logits) @ cache, up_v).reshape(-1)


def vision_transformer(images: jax.Array, patch: jax.Array, blocks: _Arrays, head: jax.Array) -> jax.Array:
    """Patches of 8 x 8, blocks scanned."""
    n, size, _, channels = images.shape
    side = size // 8
    x = images.reshape(n, side, 8, side, 8, channels).transpose(0, 1, 3, 2, 4, 5).reshape(n, side * side, -1) @ patch

    def block(x: jax.Array, w: _Arrays) -> tuple[jax.Array, None]:
        q, k, v = jnp.split((_rms(x) @ w[0]).reshape(n, side * side, 4, -1), 3, -1)
        x = x + jax.nn.dot_product_attention(q, k, v).reshape(x.shape) @ w[1]
        return x + jax.nn.gelu(_rms(x) @ w[2]) @ w[3], None

    return jax.nn.log_softmax(lax.scan(block, x, blocks)[0].mean(1) @ head)


# ---- Experts and recommenders


def experts_by_sorting(x: jax.Array, router: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
    """Two experts a token: sorted by expert, multiplied in ragged groups, summed where they came from."""
    share, expert = lax.top_k(jax.nn.softmax(x @ router), 2)
    order = jnp.argsort(expert.reshape(-1))
    sizes = jnp.bincount(expert.reshape(-1), length=len(up))
    hidden = jax.nn.silu(lax.ragged_dot(x[order // 2], up, sizes))
    made = lax.ragged_dot(hidden, down, sizes) * share.reshape(-1)[order][:, None]
    return jnp.zeros_like(x).at[order // 2].add(made)


def recommender_gradient(tables: jax.Array, bottom: jax.Array, top: jax.Array, dense: jax.Array, ids: jax.Array) -> Any:
    """Bags of four of each of eight tables, products of all pairs, clicks."""

    def loss(w: _Arrays) -> jax.Array:
        tables, bottom, top = w
        bags = jax.vmap(lambda table, bag: table[bag].sum(1))(tables, ids)
        features = jnp.concatenate([jax.nn.relu(dense @ bottom)[None], bags]).transpose(1, 0, 2)
        rows, columns = jnp.triu_indices(features.shape[1], 1)
        pairs = jnp.einsum("bid,bjd->bij", features, features)[:, rows, columns]
        logit = jnp.concatenate([features[:, 0], pairs], -1) @ top
        return jnp.logaddexp(0, logit * jnp.where(dense[:, 0] > 0, -1, 1)).mean()

    return jax.value_and_grad(loss)((tables, bottom, top))


def matrix_factorisation_epoch(users: jax.Array, items: jax.Array, seen: jax.Array, ratings: jax.Array) -> Any:
    """Stochastic gradient steps over batches of rows that are read and written by index."""

    def step(factors: _Arrays, batch: _Arrays) -> tuple[_Arrays, jax.Array]:
        users, items = factors
        (u, i), rating = batch
        error = rating - (users[u] * items[i]).sum(-1)
        users_step, items_step = error[:, None] * items[i], error[:, None] * users[u]
        return (users.at[u].add(0.01 * users_step), items.at[i].add(0.01 * items_step)), (error**2).mean()

    return lax.scan(step, (users, items), (seen, ratings))


# ---- Diffusion, losses, optimizers


def diffusion_sampler(x: jax.Array, w1: jax.Array, w2: jax.Array, key: jax.Array) -> jax.Array:
    """Fifty steps back from noise, a small network a step."""
    betas = jnp.linspace(1e-4, 0.02, 50)
    kept = jnp.cumprod(1 - betas)

    def step(state: _Arrays, t: jax.Array) -> tuple[_Arrays, None]:
        x, key = state
        key, now = random.split(key)
        time = jnp.concatenate([jnp.sin(t * 2.0 ** jnp.arange(8)), jnp.cos(t * 2.0 ** jnp.arange(8))])
        noise = jax.nn.silu(jnp.concatenate([x, jnp.broadcast_to(time, (len(x), 16))], -1) @ w1) @ w2
        mean = (x - betas[t] / jnp.sqrt(1 - kept[t]) * noise) / jnp.sqrt(1 - betas[t])
        return (mean + jnp.where(t > 0, jnp.sqrt(betas[t]), 0) * random.normal(now, x.shape), key), None

    return lax.scan(step, (x, random.wrap_key_data(key)), jnp.arange(50)[::-1])[0][0]


def contrastive_gradient(images: jax.Array, texts: jax.Array, scale: jax.Array) -> Any:
    def loss(images: jax.Array, texts: jax.Array, scale: jax.Array) -> jax.Array:
        a, b = (x / jnp.linalg.norm(x, axis=-1, keepdims=True) for x in (images, texts))
        logits = a @ b.T * jnp.exp(scale)
        same = jnp.arange(len(a))
        rows, columns = jax.nn.log_softmax(logits, 0), jax.nn.log_softmax(logits, 1)
        return -(rows[same, same] + columns[same, same]).mean() / 2

    return jax.value_and_grad(loss, (0, 1, 2))(images, texts, scale[0])


def policy_update(w: jax.Array, seen: jax.Array, actions: jax.Array, old: jax.Array, gains: jax.Array) -> Any:
    """Clipped ratios over four epochs of shuffled quarters, with a momentum of gradients."""
    gains = (gains - gains.mean()) / (gains.std() + 1e-8)

    def loss(w: jax.Array, part: jax.Array) -> jax.Array:
        logits = jax.nn.log_softmax(jnp.tanh(seen[part]) @ w)
        chosen = jnp.take_along_axis(logits, actions[part][:, None], 1)[:, 0]
        ratio = jnp.exp(chosen - old[part])
        clipped = jnp.clip(ratio, 0.8, 1.2) * gains[part]
        return -jnp.minimum(ratio * gains[part], clipped).mean() + 0.01 * (jnp.exp(logits) * logits).sum(-1).mean()

    def epoch(state: _Arrays, key: jax.Array) -> tuple[_Arrays, jax.Array]:
        def part(state: _Arrays, index: jax.Array) -> tuple[_Arrays, jax.Array]:
            w, momentum = state
            value, gradient = jax.value_and_grad(loss)(w, index)
            momentum = 0.9 * momentum + gradient
            return (w - 0.01 * momentum, momentum), value

        return lax.scan(part, state, random.permutation(key, len(seen)).reshape(4, -1))

    return lax.scan(epoch, (w, jnp.zeros_like(w)), random.split(random.key(0), 4))


def factored_optimizer(grads: Sequence[jax.Array]) -> list[jax.Array]:
    """Second moments as rows and columns, updates clipped by their root mean square."""

    def one(g: jax.Array) -> jax.Array:
        square = g**2 + 1e-30
        rows, columns = square.mean(1), square.mean(0)
        update = g * lax.rsqrt(rows / rows.mean())[:, None] * lax.rsqrt(columns)
        return update / jnp.maximum(1.0, jnp.sqrt((update**2).mean()))

    return [one(g) for g in grads]


def focal_detection_loss(logits: jax.Array, boxes: jax.Array, truth: jax.Array) -> Any:
    """Anchors matched to boxes by overlap."""

    def loss(logits: jax.Array, boxes: jax.Array) -> jax.Array:
        target = jnp.sort(jnp.abs(truth).reshape(-1, 2, 2), 1).reshape(-1, 4)
        mine = jnp.sort(jnp.abs(boxes).reshape(-1, 2, 2), 1).reshape(-1, 4)
        low, high = jnp.maximum(mine[:, None, :2], target[:, :2]), jnp.minimum(mine[:, None, 2:], target[:, 2:])
        shared = jnp.prod(jnp.clip(high - low, 0), -1)
        area = jnp.prod(mine[:, 2:] - mine[:, :2], -1)[:, None] + jnp.prod(target[:, 2:] - target[:, :2], -1)
        overlap = lax.stop_gradient(shared / (area - shared + 1e-6))
        positive, match = overlap.max(1) > 0.3, overlap.argmax(1)
        p = jax.nn.sigmoid(logits)
        focal = jnp.where(positive, -((1 - p) ** 2) * jnp.log(p + 1e-7), -(p**2) * jnp.log1p(-p + 1e-7))
        apart = jnp.abs(mine - target[match])
        smooth = jnp.where(apart < 1, 0.5 * apart**2, apart - 0.5).sum(-1)
        return focal.mean() + (smooth * positive).sum() / jnp.maximum(positive.sum(), 1)

    return jax.value_and_grad(loss, (0, 1))(logits, boxes)


# ---- Sequences


def gated_units(xs: jax.Array, w: jax.Array, u: jax.Array) -> jax.Array:
    """A GRU, both ways."""

    def step(h: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        a, b = x @ w, h @ u
        (ra, za, na), (rb, zb, nb) = jnp.split(a, 3, -1), jnp.split(b, 3, -1)
        z = jax.nn.sigmoid(za + zb)
        h = (1 - z) * jnp.tanh(na + jax.nn.sigmoid(ra + rb) * nb) + z * h
        return h, h

    start = jnp.zeros((xs.shape[1], u.shape[0]))
    forth, back = lax.scan(step, start, xs)[1], lax.scan(step, start, xs, reverse=True)[1]
    return jnp.concatenate([forth, back], -1)


def time_mixing(r: jax.Array, k: jax.Array, v: jax.Array, decay: jax.Array) -> jax.Array:
    """The numerically stable recurrence of RWKV-4."""
    decay = -jnp.exp(decay)

    def step(state: _Arrays, now: _Arrays) -> tuple[_Arrays, jax.Array]:
        top, below, largest = state
        k, v = now
        new = jnp.maximum(largest, k)
        old, fresh = jnp.exp(largest - new), jnp.exp(k - new)
        out = (top * old + fresh * v) / (below * old + fresh)
        new = jnp.maximum(largest + decay, k)
        old, fresh = jnp.exp(largest + decay - new), jnp.exp(k - new)
        return (top * old + fresh * v, below * old + fresh, new), out

    zeros = jnp.zeros_like(decay)
    return jax.nn.sigmoid(r) * lax.scan(step, (zeros, zeros, zeros - 1e30), (k, v))[1]


def long_convolution(x: jax.Array, poles: jax.Array, c: jax.Array) -> jax.Array:
    """A diagonal state-space layer as a convolution by FFT."""
    steps = jnp.arange(len(x))
    kernel = jnp.einsum("dn,dnl->ld", c, jnp.exp(-jnp.abs(poles)[..., None] * steps * 0.01))
    spectrum = jnp.fft.rfft(x, 2 * len(x), axis=0) * jnp.fft.rfft(kernel, 2 * len(x), axis=0)
    return jax.nn.gelu(jnp.fft.irfft(spectrum, 2 * len(x), axis=0)[: len(x)] + x)


def dilated_convolutions(x: jax.Array, w: jax.Array, mix: jax.Array) -> jax.Array:
    """WaveNet's: gates, residuals, dilations that double."""
    skipped = jnp.zeros_like(x)
    for layer in range(len(w)):
        padded = jnp.pad(x, ((0, 0), (2**layer, 0), (0, 0)))
        both = lax.conv_general_dilated(
            padded, w[layer], (1,), "VALID", rhs_dilation=(2**layer,), dimension_numbers=("NWC", "WIO", "NWC")
        )
        a, b = jnp.split(both, 2, -1)
        made = (jnp.tanh(a) * jax.nn.sigmoid(b)) @ mix[layer]
        x, skipped = x + made, skipped + made
    return jax.nn.relu(skipped)


def alignment_loss_gradient(logits: jax.Array, labels: jax.Array) -> Any:
    """Connectionist temporal classification: forward variables in log space, labels between blanks."""

    def loss(logits: jax.Array) -> jax.Array:
        scores = jax.nn.log_softmax(logits)
        blanked = jnp.zeros((labels.shape[0], 2 * labels.shape[1] + 1), jnp.int32).at[:, 1::2].set(labels)
        skips = jnp.pad((blanked[:, 2:] != blanked[:, :-2]) & (blanked[:, 2:] != 0), ((0, 0), (2, 0)))
        emitted = jnp.take_along_axis(scores, blanked[:, None].repeat(scores.shape[1], 1), -1)
        low = -1e30
        start = jnp.full(blanked.shape, low).at[:, :2].set(emitted[:, 0, :2])

        def step(alpha: jax.Array, now: jax.Array) -> tuple[jax.Array, None]:
            one = jnp.pad(alpha, ((0, 0), (1, 0)), constant_values=low)[:, :-1]
            two = jnp.where(skips, jnp.pad(alpha, ((0, 0), (2, 0)), constant_values=low)[:, :-2], low)
            return jnp.logaddexp(jnp.logaddexp(alpha, one), two) + now, None

        alpha = lax.scan(step, start, emitted[:, 1:].transpose(1, 0, 2))[0]
        return -jnp.logaddexp(alpha[:, -1], alpha[:, -2]).mean()

    return jax.value_and_grad(loss)(logits)


def best_path(emitted: jax.Array, moves: jax.Array) -> jax.Array:
    """Viterbi's, with the way back."""

    def forth(score: jax.Array, now: jax.Array) -> tuple[jax.Array, jax.Array]:
        candidates = score[:, None] + moves
        return candidates.max(0) + now, candidates.argmax(0)

    score, came = lax.scan(forth, emitted[0], emitted[1:])

    def back(state: jax.Array, came: jax.Array) -> tuple[jax.Array, jax.Array]:
        return came[state], state

    last, path = lax.scan(back, score.argmax(), came, reverse=True)
    return jnp.concatenate([last[None], path])


def speculative_acceptance(draft: jax.Array, target: jax.Array, tokens: jax.Array, key: jax.Array) -> Any:
    """How many of the drafted tokens stay, and the next one from what is left of the target's distribution."""
    p, q = jax.nn.softmax(target), jax.nn.softmax(draft)
    ratio = jnp.take_along_axis(p / q, tokens[..., None], -1)[..., 0]
    accept, choose = random.split(random.wrap_key_data(key))
    count = jnp.cumprod(random.uniform(accept, ratio.shape) < ratio, -1).sum(-1)
    place = jnp.minimum(count, tokens.shape[1] - 1)[:, None, None]
    left = jnp.clip(jnp.take_along_axis(p - q, place, 1)[:, 0], 0)
    return count, random.categorical(choose, jnp.log(left / left.sum(-1, keepdims=True) + 1e-20))
