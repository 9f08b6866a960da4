"""Models as JAX users write them: a Llama-like decoder, the demo's GPT-2, a ResNet, an LSTM; inference and training.

Shape suffixes: B batch, T positions, S positions of the cache, N heads, H width of a head, D width of the model,
F width of the hidden layer, V vocabulary.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import gpt2

from .kernels import BF16, F32, attention, cross_entropy, normal, rms_norm
from .program import Arguments, Program

Tree = dict[str, Any]


@dataclass(frozen=True)
class Llama:
    """Sizes of a decoder with rotary positions, RMS norms and a gated hidden layer."""

    width: int
    heads: int
    hidden: int
    layers: int
    vocabulary: int
    dtype: np.dtype

    def block(self, random: np.random.Generator) -> Tree:
        """Weights of one block."""
        d, f = self.width, self.hidden
        shapes = {"q": (d, d), "k": (d, d), "v": (d, d), "o": (d, d), "gate": (d, f), "up": (d, f), "down": (f, d)}
        weights = {name: _weights(random, shape, self.dtype) for name, shape in shapes.items()}
        return weights | {name: np.ones(d, self.dtype) for name in ("norm", "hidden_norm")}

    def model(self, random: np.random.Generator) -> Tree:
        """Weights of all blocks, of the embedding, which is the output layer too, and of the last norm."""
        blocks = [self.block(random) for _ in range(self.layers)]
        embedding = _weights(random, (self.vocabulary, self.width), self.dtype)
        return {"blocks": blocks, "embedding": embedding, "norm": np.ones(self.width, self.dtype)}


def _weights(random: np.random.Generator, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    fan_in = int(np.prod(shape[:-1]))
    return (random.standard_normal(shape, np.float32) * fan_in**-0.5).astype(dtype)


def rope(x_BTNH: jax.Array, positions_T: jax.Array) -> jax.Array:
    """Rotary positions, halves rotated, in float32."""
    half = x_BTNH.shape[-1] // 2
    angles = positions_T[:, None].astype(jnp.float32) * 10000.0 ** (-jnp.arange(half, dtype=jnp.float32) / half)
    cos, sin = (f(angles)[None, :, None, :] for f in (jnp.cos, jnp.sin))
    a, b = jnp.split(x_BTNH.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate((a * cos - b * sin, b * cos + a * sin), axis=-1).astype(x_BTNH.dtype)


def _project(x_BTD: jax.Array, weights: Tree, heads: int, positions_T: jax.Array) -> tuple[jax.Array, ...]:
    normed = rms_norm(x_BTD, weights["norm"])
    q, k, v = ((normed @ weights[name]).reshape(*x_BTD.shape[:2], heads, -1) for name in "qkv")
    return rope(q, positions_T), rope(k, positions_T), v


def _hidden(x_BTD: jax.Array, weights: Tree) -> jax.Array:
    normed = rms_norm(x_BTD, weights["hidden_norm"])
    return x_BTD + (jax.nn.silu(normed @ weights["gate"]) * (normed @ weights["up"])) @ weights["down"]


def llama_block(x_BTD: jax.Array, weights: Tree, heads: int) -> jax.Array:
    """One block over whole sequences."""
    q, k, v = _project(x_BTD, weights, heads, jnp.arange(x_BTD.shape[1]))
    x_BTD = x_BTD + attention(q, k, v).reshape(x_BTD.shape) @ weights["o"]
    return _hidden(x_BTD, weights)


def llama_decode(
    x_BTD: jax.Array, weights: Tree, k_BSNH: jax.Array, v_BSNH: jax.Array, position: jax.Array, heads: int
) -> tuple[jax.Array, ...]:
    """One block on one new position, with a cache of keys and values that it updates."""
    q, k, v = _project(x_BTD, weights, heads, position[None])
    start = (0, position, 0, 0)
    k_BSNH, v_BSNH = (jax.lax.dynamic_update_slice(a, b, start) for a, b in ((k_BSNH, k), (v_BSNH, v)))
    scores = jnp.einsum("BTNH,BSNH->BNTS", q, k_BSNH).astype(jnp.float32) * q.shape[-1] ** -0.5
    seen = jnp.arange(k_BSNH.shape[1]) <= position
    weights_BNTS = jax.nn.softmax(jnp.where(seen, scores, -1e30), axis=-1).astype(x_BTD.dtype)
    mixed = jnp.einsum("BNTS,BSNH->BTNH", weights_BNTS, v_BSNH)
    return _hidden(x_BTD + mixed.reshape(x_BTD.shape) @ weights["o"], weights), k_BSNH, v_BSNH


def llama_loss(weights: Tree, tokens_BT: jax.Array, heads: int) -> jax.Array:
    """Next-token cross-entropy."""
    x_BTD = weights["embedding"][tokens_BT[:, :-1]]
    for block in weights["blocks"]:
        x_BTD = llama_block(x_BTD, block, heads)
    logits = rms_norm(x_BTD, weights["norm"]) @ weights["embedding"].T
    return cross_entropy(logits.reshape(-1, logits.shape[-1]), tokens_BT[:, 1:].reshape(-1))


def _llama_programs(
    sizes: Llama, prefill: tuple[int, int], cache: tuple[int, int], batch: tuple[int, int]
) -> list[Program]:
    """``prefill``, ``cache`` and ``batch``: batch and positions of prefill, of decoding and of training."""
    heads, width = sizes.heads, sizes.width
    block_flops = 2.0 * (4 * width * width + 3 * width * sizes.hidden)  # for each position

    def prefill_arguments(random: np.random.Generator) -> Arguments:
        return random.standard_normal((*prefill, width), np.float32).astype(sizes.dtype), sizes.block(random)

    def prefill_step(x: jax.Array, weights: Tree) -> jax.Array:
        return llama_block(x, weights, heads)

    def decode_arguments(random: np.random.Generator) -> Arguments:
        keys = [normal(random, (*cache, heads, width // heads), sizes.dtype) for _ in range(2)]
        x = random.standard_normal((cache[0], 1, width), np.float32).astype(sizes.dtype)
        return x, sizes.block(random), *keys, np.int32(cache[1] - 2)

    def decode_step(*arguments: Any) -> tuple[jax.Array, ...]:
        return llama_decode(*arguments, heads=heads)  # type: ignore[misc]

    optimizer = optax.adamw(1e-4)

    def training_arguments(random: np.random.Generator) -> Arguments:
        weights = sizes.model(random)
        tokens = random.integers(sizes.vocabulary, size=(batch[0], batch[1] + 1), dtype=np.int32)
        state = jax.tree.map(lambda a: np.zeros(a.shape, a.dtype), jax.eval_shape(optimizer.init, weights))
        return weights, state, tokens

    def training_step(weights: Tree, state: Any, tokens: jax.Array) -> tuple[Any, ...]:
        loss, gradients = jax.value_and_grad(llama_loss)(weights, tokens, heads)
        updates, state = optimizer.update(gradients, state, weights)
        return optax.apply_updates(weights, updates), state, loss

    positions, trained = prefill[0] * prefill[1], batch[0] * batch[1]
    training_flops = 3.0 * trained * (sizes.layers * block_flops + 2.0 * width * sizes.vocabulary)
    name = f"Llama {width}"
    return [
        Program(
            f"{name} prefill {prefill[0]}x{prefill[1]}",
            prefill_step,
            prefill_arguments,
            positions * (block_flops + 2.0 * prefill[1] * width),
        ),
        Program(
            f"{name} decode {cache[0]}x{cache[1]}",
            decode_step,
            decode_arguments,
            cache[0] * block_flops,
            donated=(2, 3),
            updates_in_place=True,
        ),
        Program(
            f"{name} x{sizes.layers} training {batch[0]}x{batch[1]}",
            training_step,
            training_arguments,
            training_flops,
            donated=(0, 1),
        ),
    ]


def _gpt2(config: gpt2.Config) -> Program:
    initialize, step = gpt2.training(config)

    def arguments(random: np.random.Generator) -> Arguments:
        shapes = jax.eval_shape(initialize)
        optimizer = jax.tree.map(lambda a: np.zeros(a.shape, a.dtype), shapes.optimizer)
        parameters = jax.tree.map(lambda a: random.standard_normal(a.shape, a.dtype) * 0.02, shapes.parameters)
        tokens = random.integers(config.vocabulary, size=(config.batch, config.context + 1), dtype=np.int32)
        return gpt2.State(parameters, optimizer), tokens

    flops = 6.0 * config.batch * config.context * config.width * (12 * config.width * config.layers + config.vocabulary)
    name = f"GPT-2 {config.width} x{config.layers} training {config.batch}x{config.context}"
    return Program(name, step, arguments, flops, donated=(0,))


def resnet(weights: list[Any], images_BHWC: jax.Array, training: bool) -> jax.Array:
    """Bottleneck blocks with batch norms; strides 1, 2, 2, 2 at the stages' first blocks."""

    def convolve(x: jax.Array, kernel: jax.Array, stride: int = 1) -> jax.Array:
        dimensions = ("NHWC", "HWIO", "NHWC")
        return jax.lax.conv_general_dilated(x, kernel, (stride, stride), "SAME", dimension_numbers=dimensions)

    def norm(x: jax.Array, parameters: Tree) -> jax.Array:
        wide = x.astype(jnp.float32)
        if training:
            mean, variance = wide.mean((0, 1, 2)), wide.var((0, 1, 2))
        else:
            mean, variance = parameters["mean"], parameters["variance"]
        scaled = (wide - mean) * jax.lax.rsqrt(variance + 1e-5) * parameters["scale"] + parameters["bias"]
        return scaled.astype(x.dtype)

    stem, stages, head = weights
    x = jax.nn.relu(norm(convolve(images_BHWC, stem["kernel"], 2), stem["norm"]))
    x = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "SAME").astype(x.dtype)
    for number, stage in enumerate(stages):
        for position, block in enumerate(stage):
            stride = 2 if number and not position else 1
            y = jax.nn.relu(norm(convolve(x, block["in"]), block["in_norm"]))
            y = jax.nn.relu(norm(convolve(y, block["middle"], stride), block["middle_norm"]))
            y = norm(convolve(y, block["out"]), block["out_norm"])
            short = norm(convolve(x, block["short"], stride), block["short_norm"]) if "short" in block else x
            x = jax.nn.relu(y + short)
    return x.mean((1, 2)) @ head


def _resnet_weights(random: np.random.Generator, stages: tuple[int, ...], width: int, dtype: np.dtype) -> list[Any]:
    def norm(channels: int) -> Tree:
        ones, zeros = np.ones(channels, np.float32), np.zeros(channels, np.float32)
        return {"scale": ones, "bias": zeros, "mean": zeros, "variance": ones}

    def kernel(size: int, inputs: int, outputs: int) -> np.ndarray:
        return _weights(random, (size, size, inputs, outputs), dtype)

    channels, made = width, []
    for number, count in enumerate(stages):
        inner, outputs, blocks = width << number, 4 * width << number, []
        for position in range(count):
            block: dict[str, Any] = {
                "in": kernel(1, channels, inner),
                "middle": kernel(3, inner, inner),
                "out": kernel(1, inner, outputs),
            }
            block |= {"in_norm": norm(inner), "middle_norm": norm(inner), "out_norm": norm(outputs)}
            if not position:
                block |= {"short": kernel(1, channels, outputs), "short_norm": norm(outputs)}
            blocks.append(block)
            channels = outputs
        made.append(blocks)
    stem = {"kernel": kernel(7, 3, width), "norm": norm(width)}
    return [stem, made, _weights(random, (channels, 1000), dtype)]


def _resnets(
    stages: tuple[int, ...], width: int, batch: int, size: int, dtype: np.dtype, flops: float
) -> list[Program]:
    """``flops`` of the convolutions of one image."""

    def arguments(random: np.random.Generator) -> Arguments:
        images = random.standard_normal((batch, size, size, 3), np.float32).astype(dtype)
        return _resnet_weights(random, stages, width, dtype), images

    def infer(weights: list[Any], images: jax.Array) -> jax.Array:
        return resnet(weights, images, training=False)

    def train(weights: list[Any], images: jax.Array) -> tuple[Any, jax.Array]:
        loss, gradients = jax.value_and_grad(lambda w: jnp.square(resnet(w, images, True).astype(jnp.float32)).mean())(
            weights
        )
        return jax.tree.map(lambda w, g: w - (1e-3 * g).astype(w.dtype), weights, gradients), loss

    name = f"ResNet-{3 * sum(stages) + 2}"
    return [
        Program(f"{name} inference {batch}", infer, arguments, batch * flops),
        Program(f"{name} training {batch}", train, arguments, 3 * batch * flops, donated=(0,)),
    ]


def _lstm(batch: int, length: int, width: int, dtype: np.dtype) -> Program:
    def run(x_TBD: jax.Array, weights: jax.Array, bias: jax.Array) -> jax.Array:
        def step(carry: tuple[jax.Array, jax.Array], x_BD: jax.Array) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
            h, c = carry
            i, f, g, o = jnp.split(jnp.concatenate((x_BD, h), -1) @ weights + bias, 4, axis=-1)
            c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
            h = jax.nn.sigmoid(o) * jnp.tanh(c)
            return (h, c), h

        zeros = jnp.zeros((batch, width), dtype)
        return jax.lax.scan(step, (zeros, zeros), x_TBD)[1]

    def arguments(random: np.random.Generator) -> Arguments:
        x = random.standard_normal((length, batch, width), np.float32).astype(dtype)
        return x, _weights(random, (2 * width, 4 * width), dtype), np.zeros(4 * width, dtype)

    flops = 16.0 * length * batch * width * width
    return Program(f"LSTM {length}x{batch}x{width}", run, arguments, flops)


def host() -> list[Program]:
    """Models that take a host with a few cores tens of milliseconds."""
    llama = Llama(width=256, heads=4, hidden=704, layers=2, vocabulary=4096, dtype=F32)
    return [
        *_llama_programs(llama, prefill=(1, 256), cache=(4, 512), batch=(2, 128)),
        _gpt2(gpt2.Config(layers=2, heads=4, width=128, context=128)),
        *_resnets((1, 1, 1, 1), 16, 2, 64, F32, 2.4e7),
        _lstm(8, 64, 128, F32),
    ]


def accelerator() -> list[Program]:
    """Models that take an accelerator milliseconds."""
    llama = Llama(width=2048, heads=16, hidden=5632, layers=4, vocabulary=32000, dtype=BF16)
    return [
        *_llama_programs(llama, prefill=(4, 2048), cache=(32, 2048), batch=(4, 1024)),
        _gpt2(dataclasses.replace(gpt2.Config(), layers=12, heads=12, width=768, context=1024, batch=8)),
        *_resnets((3, 4, 6, 3), 64, 64, 224, BF16, 8.2e9),
        _lstm(64, 512, 1024, F32),
    ]
