"""A small GPT-2 in flax, its training step and its text: what the demo trains and the benchmarks compile.

Shape suffixes: B batch, T time, D model width, V vocabulary.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

MODULES = ("argparse", "ast", "calendar", "dataclasses", "doctest", "inspect", "pathlib", "subprocess", "typing")
"""Standard-library modules whose source is the text: prose and code, present in every Python."""


@dataclass(frozen=True)
class Config:
    """Sizes. The vocabulary is the 256 byte values."""

    vocabulary: int = 256
    context: int = 64
    layers: int = 2
    heads: int = 4
    width: int = 64
    batch: int = 8
    learning_rate: float = 3e-3
    warmup: int = 10


class Block(nn.Module):
    """Pre-norm attention and MLP with residuals, as in GPT-2."""

    config: Config

    @nn.compact
    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        causal = nn.make_causal_mask(x_BTD[..., 0])
        attention = nn.MultiHeadDotProductAttention(num_heads=self.config.heads)
        x_BTD = x_BTD + attention(nn.LayerNorm()(x_BTD), mask=causal)
        hidden = nn.gelu(nn.Dense(4 * self.config.width)(nn.LayerNorm()(x_BTD)), approximate=True)
        return x_BTD + nn.Dense(self.config.width)(hidden)


class GPT2(nn.Module):
    """Decoder-only transformer with learned positions and an output tied to the token embedding."""

    config: Config

    @nn.compact
    def __call__(self, tokens_BT: jax.Array) -> jax.Array:
        config = self.config
        embed = nn.Embed(config.vocabulary, config.width)
        positions = nn.Embed(config.context, config.width)(jnp.arange(tokens_BT.shape[1]))
        x_BTD = embed(tokens_BT) + positions
        for _ in range(config.layers):
            x_BTD = Block(config)(x_BTD)
        return embed.attend(nn.LayerNorm()(x_BTD))


class State(NamedTuple):
    """What training changes."""

    parameters: Any
    optimizer: Any


def text() -> np.ndarray:
    """The text as bytes, uint8[length]."""
    library = Path(sysconfig.get_path("stdlib"))
    found = [library / f"{name}.py" for name in MODULES]
    sources = [path if path.is_file() else path.with_suffix("") / "__init__.py" for path in found]
    return np.frombuffer(b"\n".join(path.read_bytes() for path in sources), dtype=np.uint8)


def batches(config: Config, steps: int, seed: int = 0) -> list[np.ndarray]:
    """Random windows of the text, int32[batch, context + 1] for each step: inputs, and targets one further."""
    data, rng = text(), np.random.default_rng(seed)
    starts = rng.integers(0, len(data) - config.context - 1, size=(steps, config.batch, 1))
    return list(data[starts + np.arange(config.context + 1)].astype(np.int32))


def training(config: Config) -> tuple[Callable[[], State], Callable[[State, jax.Array], tuple[State, jax.Array]]]:
    """Functions that make the initial state, and that take one step and return the loss; neither is jitted."""
    model = GPT2(config)
    schedule = optax.linear_schedule(0.0, config.learning_rate, config.warmup)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, weight_decay=0.01))

    def initialize() -> State:
        parameters = model.init(jax.random.key(0), jnp.zeros((1, config.context), jnp.int32))
        return State(parameters, optimizer.init(parameters))

    def loss_of(parameters: Any, tokens_BT: jax.Array) -> jax.Array:
        logits_BTV = model.apply(parameters, tokens_BT[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits_BTV, tokens_BT[:, 1:]).mean()

    def step(state: State, tokens_BT: jax.Array) -> tuple[State, jax.Array]:
        loss, gradients = jax.value_and_grad(loss_of)(state.parameters, tokens_BT)
        updates, optimizer_state = optimizer.update(gradients, state.optimizer, state.parameters)
        return State(optax.apply_updates(state.parameters, updates), optimizer_state), loss

    return initialize, step
