"""Trains a small classifier with flax and optax on the device flagos, and checks what it learned.

pip install 'flagos[jax]' flax optax
python train_jax.py
"""

from __future__ import annotations

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

device = jax.devices("flagos")[0]
random = np.random.default_rng(0)


class Classifier(nn.Module):
    """[n, 2] points to [n, 2] logits."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for width in (32, 32):
            x = nn.gelu(nn.LayerNorm()(nn.Dense(width)(x)))
        return nn.Dense(2)(x)


def spirals(count: int) -> tuple[np.ndarray, np.ndarray]:
    """Points of two arms that wind around each other, [count, 2], and which arm each is of."""
    arm = random.integers(0, 2, count)
    along = random.uniform(0.2, 1, count)
    angle = 4 * along + np.pi * arm
    points = np.stack([along * np.cos(angle), along * np.sin(angle)], axis=1)
    return points.astype(np.float32), arm


model, optimizer = Classifier(), optax.adamw(3e-3)


@functools.partial(jax.jit, donate_argnums=(0, 1))
def step(params, state, x, y):
    """One update of the parameters, in place."""

    def loss(params):
        return optax.softmax_cross_entropy_with_integer_labels(model.apply(params, x), y).mean()

    value, gradients = jax.value_and_grad(loss)(params)
    updates, state = optimizer.update(gradients, state, params)
    return optax.apply_updates(params, updates), state, value


with jax.default_device(device):
    params = model.init(jax.random.key(0), jnp.zeros((1, 2)))
    state = optimizer.init(params)
    for number in range(201):
        params, state, value = step(params, state, *spirals(256))
        if number % 50 == 0:
            print(f"step {number:3}: loss {value:.3f} on {value.devices()}")

    x, y = spirals(1000)
    right = float((model.apply(params, x).argmax(axis=1) == y).mean())
print(f"{right:.1%} of new points are classified right")
assert right > 0.95
