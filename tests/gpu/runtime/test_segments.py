"""JAX programs that cannot be captured as one, run often enough to be replayed in segments, against JAX's own CPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import flagos_backend.frontends.jax
from cpu.native.harness import compile, get, put, run
from flagos_backend.kernels.reference.registry import Run
from flagos_backend.runtime.accelerator.conditional import NativeConditionals
from flagos_backend.runtime.accelerator.graphs import GraphRecorder, GraphReplay
from plugin_abi.host import Artifact, Context, Memory

flagos_backend.frontends.jax.initialize()

RUNS = 6
# Runs after which a program is captured.
FIRST = 2


@pytest.fixture
def iteration_by_iteration(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with a driver that has no conditional nodes: the host decides what runs."""

    def prepare(accelerator: int) -> None:
        raise RuntimeError("an old driver")

    prepared = GraphRecorder.__init__

    def of_old_driver(self: GraphRecorder, native: Any, conditionals: NativeConditionals, run: Run) -> None:
        prepared(self, native, replace(conditionals, prepare=prepare), run)

    monkeypatch.setattr(GraphRecorder, "__init__", of_old_driver)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry for each segment that is launched."""
    seen: list[int] = []
    launch = GraphReplay.launch

    def counted(self: GraphReplay, arrays: Sequence[Any]) -> None:
        seen.append(len(arrays))
        launch(self, arrays)

    monkeypatch.setattr(GraphReplay, "launch", counted)
    return seen


def layers(x: jax.Array, count: int = 10) -> jax.Array:
    """Three kernels each: a product, what is elementwise, a sum with what it is divided by."""
    for _ in range(count):
        x = jnp.tanh(jnp.sort(x @ x.T @ x, axis=1))
        x = x / (1 + jnp.abs(x).sum(0))
    return x


def called_back(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    before = layers(x)
    called = jax.pure_callback(lambda x: np.asarray(x) * 3, jax.ShapeDtypeStruct(x.shape, x.dtype), before)
    return layers(called) + before, before


def until_large(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    def iteration(state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        x, iterations = state
        return layers(x) + x * 1.5, iterations + 1

    return jax.lax.while_loop(lambda state: jnp.abs(state[0]).sum() < 1e3, iteration, (x, jnp.int32(0)))


def one_of_two(x: jax.Array) -> jax.Array:
    return jax.lax.cond(x.sum() > 0, layers, lambda x: -layers(x, 5), x)


def drawn_between(x: jax.Array) -> jax.Array:
    """Draws with a state of their own, which are replayed with the rest, and a step that is not."""
    key = jax.random.key(3, impl="rbg")
    noise = jax.random.uniform(key, x.shape)
    called = jax.pure_callback(lambda x: np.asarray(x) + 1, jax.ShapeDtypeStruct(x.shape, x.dtype), layers(x) + noise)
    return layers(called) - noise


@pytest.mark.usefixtures("iteration_by_iteration")
@pytest.mark.parametrize(
    ("function", "launches"),
    [(called_back, 2), (one_of_two, 1), (until_large, None)],
    ids=["callback", "conditional", "while"],
)
def test_as_on_the_cpu(
    function: Callable[..., Any], launches: int | None, launched: list[int], rng: np.random.Generator
) -> None:
    device, cpu = jax.devices("flagos")[0], jax.devices("cpu")[0]
    with jax.default_matmul_precision("highest"):
        compiled = jax.jit(function)
        kept = []
        for number in range(RUNS):
            # Of both signs in the first two runs, after which what ran is recorded.
            x = rng.uniform(0.1, 1, (16, 8)).astype(np.float32) * (-1) ** number
            before = len(launched)
            ours = jax.tree.leaves(compiled(jax.device_put(x, device)))
            jax.block_until_ready(ours)
            wanted = jax.tree.leaves(compiled(jax.device_put(x, cpu)))
            kept += zip(ours, wanted, strict=True)
            if number >= FIRST:
                at_least = launches or int(wanted[1])
                assert len(launched) - before >= at_least > 0
    for result, expected in kept:
        np.testing.assert_allclose(np.asarray(result), np.asarray(expected), rtol=1e-3, atol=1e-5)


@pytest.mark.usefixtures("iteration_by_iteration")
def test_an_iteration_of_a_loop_costs_one_launch(launched: list[int]) -> None:
    device = jax.devices("flagos")[0]
    compiled = jax.jit(until_large)
    x = jax.device_put(np.full((16, 8), 0.5, np.float32), device)
    for _ in range(FIRST):
        jax.block_until_ready(compiled(x))
    before = len(launched)
    _, iterations = compiled(x)
    assert int(iterations) <= len(launched) - before <= int(iterations) + 2  # and what stands around the loop


def test_draws_with_a_state_of_their_own_are_replayed(launched: list[int], rng: np.random.Generator) -> None:
    device = jax.devices("flagos")[0]
    compiled = jax.jit(drawn_between)
    x = jax.device_put(rng.uniform(-1, 1, (16, 8)).astype(np.float32), device)
    results = [np.asarray(compiled(x)) for _ in range(RUNS)]
    for result in results[1:]:
        np.testing.assert_allclose(result, results[0], rtol=1e-4, atol=1e-6)
    assert len(launched) >= 2 * (RUNS - FIRST)


def test_a_state_that_is_donated_goes_round(launched: list[int], rng: np.random.Generator) -> None:
    device, cpu = jax.devices("flagos")[0], jax.devices("cpu")[0]
    x = rng.uniform(-1, 1, (16, 8)).astype(np.float32)
    ends = []
    with jax.default_matmul_precision("highest"):
        for where in (device, cpu):
            compiled = jax.jit(called_back, donate_argnums=0)
            state = jax.device_put(x, where)
            for _ in range(RUNS):
                state, _ = compiled(state)
            ends.append(np.asarray(state))
    np.testing.assert_allclose(*ends, rtol=1e-3, atol=1e-5)
    assert len(launched) >= 2 * (RUNS - FIRST)


@pytest.mark.usefixtures("iteration_by_iteration")
def test_many_launches_keep_their_results_apart(launched: list[int], rng: np.random.Generator) -> None:
    """Nothing is waited for: a segment's temporaries are written again while results of former launches wait."""
    device = jax.devices("flagos")[0]
    compiled = jax.jit(one_of_two)
    arrays = [rng.uniform(0.1, 1, (16, 8)).astype(np.float32) * (-1) ** number for number in range(30)]
    results = [compiled(jax.device_put(x, device)) for x in arrays]
    again = [np.asarray(compiled(jax.device_put(x, device))) for x in arrays]
    for result, expected in zip(results, again, strict=True):
        np.testing.assert_allclose(np.asarray(result), expected, rtol=1e-5, atol=1e-6)
    assert len(launched) >= 2 * len(arrays) - FIRST


DRAWN = """less { a = f32[] parameter(0) b = f32[] parameter(1) ROOT c = pred[] compare(a, b), direction=LT }
ENTRY main {
  x = f32[900] parameter(0)
  low = f32[] constant(0)
  high = f32[] constant(1)
  a = f32[900] sort(x), dimensions={0}, to_apply=less
  b = f32[900] tanh(a)
  c = f32[900] sort(b), dimensions={0}, to_apply=less
  r = f32[900] rng(low, high), distribution=rng_uniform
  ROOT both = (f32[900], f32[900]) tuple(c, r)
}"""


def test_draws_of_the_generator_stay_outside(context: Context, memory: Memory, rng: np.random.Generator) -> None:
    executable = compile(context, DRAWN)
    draws = []
    for _ in range(RUNS):
        x = rng.standard_normal(900).astype(np.float32)
        first, drawn = run(executable, put(memory, x))
        np.testing.assert_allclose(get(first), np.tanh(np.sort(x)), rtol=1e-5)
        draws.append(get(drawn))
    assert all(draw.min() >= 0 and draw.max() < 1 for draw in draws)
    assert len({draw.tobytes() for draw in draws}) == RUNS
    text = executable.artifact(Artifact.EXPLANATION).decode()
    assert "draws from a generator" in text and f"launched {RUNS - FIRST} times" in text, text
