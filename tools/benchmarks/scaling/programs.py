"""Programs over a row of devices as frameworks write them: a Llama's training step in three ways, experts that exchange
their tokens, a pipeline in a scan, ring attention.

Shape suffixes: B batch, T positions, N heads, H width of a head, D width of the model, F width of the hidden layer,
E experts, C tokens that an expert takes from one device, M microbatches.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from ..programs import Scale  # noqa: TID252 (the folder has two names)
from ..programs.models import Llama, llama_loss  # noqa: TID252 (the folder has two names)

#: The one dimension of every mesh here.
AXIS: Final = "devices"
P = PartitionSpec
_RATE: Final = 1e-3


@dataclass(frozen=True)
class Sharded:
    """``arguments``: random ones for so many devices. ``specs``: where each is, as prefixes of their trees.
    ``step``: the program over a mesh. The weights, where there are any, are its first argument and its first result.

    ``weak``: the work grows with the devices, so that a step over n takes as long as over one at best; otherwise all
    devices do the work of one, in an n-th of the time. ``precision``: the largest difference between results, relative
    to the largest magnitude.
    """

    name: str
    arguments: Callable[[np.random.Generator, int], tuple[Any, ...]]
    specs: Callable[[tuple[Any, ...], int], tuple[Any, ...]]
    step: Callable[[Mesh], Callable[..., Any]]
    weak: bool
    precision: float


def _largest_split(shape: tuple[int, ...], count: int) -> PartitionSpec:
    """Along the largest dimension that has equal parts; whole where none has."""
    sizes = [size if size % count == 0 else 0 for size in shape]
    along = sizes.index(max(sizes)) if any(sizes) else -1
    return P(*(AXIS if d == along else None for d in range(len(shape))))


def _descend(loss: Callable[..., jax.Array], weights: Any, *batch: jax.Array) -> tuple[Any, jax.Array]:
    """One step of gradient descent: the weights, and the loss before."""
    value, slopes = jax.value_and_grad(loss)(weights, *batch)
    moved = jax.tree.map(lambda w, s: (w - _RATE * s.astype(jnp.float32)).astype(w.dtype), weights, slopes)
    return moved, value


def _llamas(sizes: Llama, batch: int, length: int) -> list[Sharded]:
    """``batch``: of each device where the work grows with the devices, else of all."""

    def arguments(rows: int, random: np.random.Generator) -> tuple[Any, ...]:
        tokens = random.integers(sizes.vocabulary, size=(rows, length + 1), dtype=np.int32)
        return sizes.model(random), tokens

    def each(random: np.random.Generator, count: int) -> tuple[Any, ...]:
        return arguments(batch * count, random)

    def all_of_them(random: np.random.Generator, count: int) -> tuple[Any, ...]:
        del count
        return arguments(batch, random)

    def replicated(given: tuple[Any, ...], count: int) -> tuple[Any, ...]:
        del count
        return jax.tree.map(lambda _: P(), given[0]), P(AXIS)

    def fully_sharded(given: tuple[Any, ...], count: int) -> tuple[Any, ...]:
        return jax.tree.map(lambda w: _largest_split(w.shape, count), given[0]), P(AXIS)

    def tensor_parallel(given: tuple[Any, ...], count: int) -> tuple[Any, ...]:
        """Columns of what goes into heads and hidden units, rows of what comes from them."""
        del count

        def of(path: tuple[Any, ...], _: Any) -> PartitionSpec:
            name = path[-1].key
            if name in ("q", "k", "v", "gate", "up"):
                return P(None, AXIS)
            return P(AXIS, None) if name in ("o", "down", "embedding") else P()

        return jax.tree_util.tree_map_with_path(of, given[0]), P()

    def step(mesh: Mesh) -> Callable[..., Any]:
        del mesh
        return lambda weights, tokens: _descend(partial(llama_loss, heads=sizes.heads), weights, tokens)

    name = f"Llama {sizes.width}"
    precision = 1e-4 if sizes.dtype == np.float32 else 4e-2
    return [
        Sharded(f"{name} data parallel", each, replicated, step, True, precision),
        Sharded(f"{name} fully sharded", each, fully_sharded, step, True, precision),
        Sharded(f"{name} tensor parallel", all_of_them, tensor_parallel, step, False, precision),
    ]


def _experts(tokens: int, width: int, hidden: int, experts: int, dtype: Any) -> Sharded:
    """Each token goes to its best expert, which lives on one of the devices: two exchanges of all with all, and two
    more for the gradients. ``tokens``: of each device; ``experts`` too."""

    def arguments(random: np.random.Generator, count: int) -> tuple[Any, ...]:
        # The router's sums are whole numbers, so that no choice depends on how they are rounded.
        router = random.choice([-1.0, 1.0], (width, experts * count)).astype(np.float32)
        first = (random.standard_normal((experts * count, width, hidden), np.float32) * width**-0.5).astype(dtype)
        second = (random.standard_normal((experts * count, hidden, width), np.float32) * hidden**-0.5).astype(dtype)
        x = random.integers(-4, 5, (tokens * count, width)).astype(dtype)
        return {"first": first, "second": second}, router, x

    def specs(given: tuple[Any, ...], count: int) -> tuple[Any, ...]:
        del given, count
        return P(AXIS), P(), P(AXIS)

    def step(mesh: Mesh) -> Callable[..., Any]:
        def loss(weights: Any, router: jax.Array, x_TD: jax.Array) -> jax.Array:
            count, total = x_TD.shape[0], router.shape[1]
            here_E = total // mesh.size
            # Three times what comes if all are chosen alike: of random tokens none is left out.
            room = 3 * count // total
            best_T = jnp.argmax(x_TD.astype(jnp.float32) @ router, axis=1)
            chosen_TE = jax.nn.one_hot(best_T, total, dtype=jnp.int32)
            place_T = jnp.take_along_axis(jnp.cumsum(chosen_TE, 0) - 1, best_T[:, None], 1)[:, 0]
            # Beyond the room an index is out of bounds.
            sent_ECD = jnp.zeros((total, room, width), x_TD.dtype).at[best_T, place_T].add(x_TD, mode="drop")
            by_device = sent_ECD.reshape(mesh.size, here_E, room, width)
            came = lax.all_to_all(by_device, AXIS, 0, 0, tiled=False)
            mine_ECD = came.transpose(1, 0, 2, 3).reshape(here_E, mesh.size * room, width)
            hidden_ECF = jax.nn.silu(jnp.einsum("ECD,EDF->ECF", mine_ECD, weights["first"]))
            made_ECD = jnp.einsum("ECF,EFD->ECD", hidden_ECF, weights["second"])
            back = made_ECD.reshape(here_E, mesh.size, room, width).transpose(1, 0, 2, 3)
            returned_ECD = lax.all_to_all(back, AXIS, 0, 0, tiled=False).reshape(total, room, width)
            y_TD = returned_ECD.at[best_T, place_T].get(mode="fill", fill_value=0)
            squares = jnp.square(y_TD.astype(jnp.float32)).sum()
            return lax.psum(squares, AXIS) / (count * mesh.size * width)

        weights_spec, router_spec, x_spec = specs((), mesh.size)
        mapped = jax.shard_map(
            loss, mesh=mesh, in_specs=(weights_spec, router_spec, x_spec), out_specs=P(), check_vma=False
        )
        return partial(_descend, mapped)

    return Sharded(f"experts {tokens}x{width}x{experts}", arguments, specs, step, True, 4e-2)


def _pipeline(layers: int, width: int, microbatches: int, rows: int, dtype: Any) -> Sharded:
    """Layers are spread over the devices; microbatches pass from one to the next in a scan, and their gradients back.
    ``layers``: of each device."""

    def arguments(random: np.random.Generator, count: int) -> tuple[Any, ...]:
        shape = (layers * count, width, width)
        weights = (random.standard_normal(shape, np.float32) * width**-0.5).astype(dtype)
        x_MBD = random.standard_normal((microbatches, rows, width), np.float32).astype(dtype)
        return weights, x_MBD

    def specs(given: tuple[Any, ...], count: int) -> tuple[Any, ...]:
        del given, count
        return P(AXIS), P()

    def step(mesh: Mesh) -> Callable[..., Any]:
        onward = [(i, i + 1) for i in range(mesh.size - 1)]

        def loss(weights: jax.Array, x_MBD: jax.Array) -> jax.Array:
            stage = lax.axis_index(AXIS)

            def through(x: jax.Array) -> jax.Array:
                for number in range(weights.shape[0]):
                    x = x + jnp.tanh(x @ weights[number])
                return x

            def tick(coming: jax.Array, time: jax.Array) -> tuple[jax.Array, jax.Array]:
                fresh = x_MBD[jnp.minimum(time, microbatches - 1)]
                made = through(jnp.where(stage == 0, fresh, coming))
                passed = lax.ppermute(made, AXIS, onward) if onward else made
                return passed, jnp.square(made.astype(jnp.float32)).mean()

            times = jnp.arange(microbatches + mesh.size - 1)
            _, squares = lax.scan(tick, jnp.zeros_like(x_MBD[0]), times)
            # What comes out before the first microbatch has passed all stages belongs to none.
            counted = jnp.where((stage == mesh.size - 1) & (times >= mesh.size - 1), squares, 0.0).sum()
            return lax.psum(counted, AXIS) / microbatches

        mapped = jax.shard_map(loss, mesh=mesh, in_specs=(P(AXIS), P()), out_specs=P(), check_vma=False)
        return partial(_descend, mapped)

    return Sharded(f"pipeline {microbatches}x{rows}x{width}", arguments, specs, step, True, 4e-2)


def _ring_attention(length: int, heads: int, width: int, chunk: int, dtype: Any) -> Sharded:
    """Causal attention over ``length`` positions; keys and values go round once. ``chunk``: keys looked at together."""

    def arguments(random: np.random.Generator, count: int) -> tuple[Any, ...]:
        del count
        return tuple(random.standard_normal((length, heads, width), np.float32).astype(dtype) for _ in range(3))

    def specs(given: tuple[Any, ...], count: int) -> tuple[Any, ...]:
        del given, count
        return P(AXIS), P(AXIS), P(AXIS)

    def step(mesh: Mesh) -> Callable[..., Any]:
        part = length // mesh.size
        round_trip = [(i, (i + 1) % mesh.size) for i in range(mesh.size)]

        def attend(q_TNH: jax.Array, k_TNH: jax.Array, v_TNH: jax.Array) -> jax.Array:
            me = lax.axis_index(AXIS)
            mine_T = me * part + jnp.arange(part)

            def look(state: Any, begin: jax.Array, keys: jax.Array, values: jax.Array, first: jax.Array) -> Any:
                most_NT, sum_NT, made_NTH = state
                some_k = lax.dynamic_slice_in_dim(keys, begin, chunk)
                some_v = lax.dynamic_slice_in_dim(values, begin, chunk)
                scores_NTS = jnp.einsum("TNH,SNH->NTS", q_TNH, some_k).astype(jnp.float32) * width**-0.5
                seen_TS = mine_T[:, None] >= (first + begin + jnp.arange(chunk))[None]
                scores_NTS = jnp.where(seen_TS, scores_NTS, -1e30)
                top_NT = jnp.maximum(most_NT, scores_NTS.max(-1))
                # A row that has seen no key yet weighs all alike; the first key that it sees makes that nothing.
                weights_NTS = jnp.exp(scores_NTS - top_NT[..., None])
                kept_NT = jnp.exp(most_NT - top_NT)
                mixed = jnp.einsum("NTS,SNH->NTH", weights_NTS.astype(some_v.dtype), some_v).astype(jnp.float32)
                return top_NT, sum_NT * kept_NT + weights_NTS.sum(-1), made_NTH * kept_NT[..., None] + mixed

            def hop(carry: Any, number: jax.Array) -> tuple[Any, None]:
                state, keys, values = carry
                first = ((me - number) % mesh.size) * part

                def some(state: Any, begin: jax.Array) -> tuple[Any, None]:
                    return look(state, begin, keys, values, first), None

                state, _ = lax.scan(some, state, jnp.arange(0, part, chunk))
                keys, values = (lax.ppermute(a, AXIS, round_trip) for a in (keys, values))
                return (state, keys, values), None

            state = (
                jnp.full((heads, part), -1e30, jnp.float32),
                jnp.zeros((heads, part), jnp.float32),
                jnp.zeros((heads, part, width), jnp.float32),
            )
            # One's own keys come first, of which every row sees one.
            ((_, total_NT, made_NTH), _, _), _ = lax.scan(hop, (state, k_TNH, v_TNH), jnp.arange(mesh.size))
            return (made_NTH / total_NT[..., None]).transpose(1, 0, 2).astype(q_TNH.dtype)

        return jax.shard_map(attend, mesh=mesh, in_specs=P(AXIS), out_specs=P(AXIS), check_vma=False)

    return Sharded(f"ring attention {length}x{heads}x{width}", arguments, specs, step, False, 2e-2)


def sharded(scale: Scale) -> list[Sharded]:
    """All programs: of sizes that keep a few cores, or accelerators, busy for milliseconds."""
    if scale is Scale.HOST:
        llama = Llama(width=256, heads=8, hidden=704, layers=2, vocabulary=4096, dtype=np.dtype(np.float32))
        return [
            *_llamas(llama, batch=1, length=64),
            _experts(256, 64, 128, 2, np.float32),
            _pipeline(1, 128, 8, 16, np.float32),
            _ring_attention(1024, 2, 32, 64, np.float32),
        ]
    llama = Llama(width=2048, heads=16, hidden=5632, layers=4, vocabulary=32000, dtype=np.dtype(jnp.bfloat16))
    return [
        *_llamas(llama, batch=4, length=1024),
        _experts(8192, 1024, 4096, 8, jnp.bfloat16),
        _pipeline(2, 4096, 32, 512, jnp.bfloat16),
        _ring_attention(131072, 4, 128, 1024, jnp.bfloat16),
    ]
