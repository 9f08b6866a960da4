"""JAX programs that cannot be captured as one, past their first launches: in segments, whose replays run on poisoned
memory. The oracle is JAX's own CPU, or the same program before it was divided."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import flagos_backend.frontends.jax
from cpu.native.harness import compile, get, put, run
from flagos_backend import bridge
from flagos_backend.devices.accelerator import Accelerator
from flagos_backend.kernels.reference.registry import Run
from flagos_backend.runtime.accelerator.segments import Division, outline
from flagos_backend.runtime.accelerator.warm_up import warm_up
from flagos_backend.runtime.plan import Plan
from plugin_abi.host import Artifact, Context, Memory
from support.against_xla import assert_same
from support.compiled_programs import compiled_program, division_of, plan_of
from support.divided_programs import called_back, chain, until_large
from support.poisoned_replays import PoisonedReplay

flagos_backend.frontends.jax.initialize()

RUNS = 5


class Recorder:
    no_conditionals = "recordings of tests have no conditional nodes"
    no_rendezvous = "recordings of tests have one device"

    def __init__(self, opened: Accelerator, accelerator: int, run: Run) -> None:
        self._run = run

    def __call__(self, plan: Plan) -> PoisonedReplay:
        return PoisonedReplay(plan, self._run)

    def warm_up(self, plan: Plan) -> None:
        warm_up(plan, self._run)


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bridge, "recorder_of", Recorder)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry for each launch of a replay."""
    seen: list[int] = []
    launch = PoisonedReplay.launch

    def counted(self: PoisonedReplay, arrays: Any) -> None:
        seen.append(len(arrays))
        launch(self, arrays)

    monkeypatch.setattr(PoisonedReplay, "launch", counted)
    return seen


def one_of_two(x: jax.Array) -> jax.Array:
    return jax.lax.cond(x.sum() > 0, chain, lambda x: -chain(x), x)


def drawn(x: jax.Array) -> jax.Array:
    return chain(x) + jax.random.normal(jax.random.key(3), x.shape)


def convolved(x: jax.Array) -> jax.Array:
    """With operands that are parts of what is laid out for them."""
    images = jnp.stack([x, 2 * x]).reshape(2, 6, 8, 1) * jnp.arange(1.0, 4.0)
    weights = jnp.sin(jnp.arange(3 * 3 * 3 * 3.0)).reshape(3, 3, 3, 3)
    for _ in range(2):
        images = jax.lax.conv_general_dilated(
            jnp.tanh(images), weights, (1, 1), ((0, 2), (1, 0)), dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        shape = jax.ShapeDtypeStruct(images.shape, images.dtype)
        images = images - jax.pure_callback(lambda x: np.asarray(x) / 3, shape, images)
    return images


@pytest.mark.parametrize(
    ("function", "launches"),
    [(called_back, 2), (one_of_two, 1), (until_large, None), (drawn, None), (convolved, None)],
    ids=["callback", "conditional", "while", "random", "convolutions"],
)
def test_as_on_the_cpu(
    function: Callable[..., Any], launches: int | None, launched: list[int], rng: np.random.Generator
) -> None:
    device, cpu = jax.devices("flagos")[0], jax.devices("cpu")[0]
    compiled = jax.jit(function)
    for number in range(RUNS):
        # Of both signs in the first two runs, after which what ran is recorded.
        x = np.abs(rng.standard_normal((6, 8)).astype(np.float32)) * (-1) ** number
        before = len(launched)
        ours = jax.tree.leaves(compiled(jax.device_put(x, device)))
        wanted = jax.tree.leaves(compiled(jax.device_put(x, cpu)))
        for result, expected in zip(ours, wanted, strict=True):
            assert_same(np.asarray(result), np.asarray(expected), 1e-5)
        if number >= 2 and launches is not None:
            assert len(launched) - before == launches
        if number >= 2 and function is until_large:
            assert len(launched) - before >= int(wanted[1]) > 0


def test_a_state_that_is_donated_goes_round(launched: list[int], rng: np.random.Generator) -> None:
    device, cpu = jax.devices("flagos")[0], jax.devices("cpu")[0]
    x = rng.standard_normal((6, 8)).astype(np.float32)
    ends = []
    for where in (device, cpu):
        compiled = jax.jit(called_back, donate_argnums=0)
        state = jax.device_put(x, where)
        for _ in range(RUNS):
            former = state
            state, _ = compiled(former)
            assert former.is_deleted()
        ends.append(np.asarray(state))
    assert_same(*ends, 1e-5)
    assert len(launched) >= 2 * (RUNS - 2)


def test_several_threads(launched: list[int], rng: np.random.Generator) -> None:
    device, cpu = jax.devices("flagos")[0], jax.devices("cpu")[0]
    compiled = jax.jit(called_back)
    arrays = [rng.standard_normal((6, 8)).astype(np.float32) for _ in range(3)]
    wanted = [np.asarray(compiled(jax.device_put(x, cpu))[0]) for x in arrays]
    outcomes: list[tuple[int, np.ndarray]] = []

    def work(number: int) -> None:
        for _ in range(RUNS):
            outcomes.append((number, np.asarray(compiled(jax.device_put(arrays[number], device))[0])))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(len(arrays))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(outcomes) == len(arrays) * RUNS
    # While one thread records, the others go on step by step; from then on all replay.
    before = len(launched)
    work(0)
    assert len(launched) - before == 2 * RUNS
    for number, result in outcomes:
        assert_same(result, wanted[number], 1e-5)


def test_between_the_collectives_of_two_devices(launched: list[int], rng: np.random.Generator) -> None:
    mesh = jax.make_mesh((2,), ("d",), devices=jax.devices("flagos"))
    split = NamedSharding(mesh, P("d"))
    compiled = jax.jit(lambda x: chain(x - chain(x).mean(0)), out_shardings=split)
    on_cpu = jax.jit(lambda x: chain(x - chain(x).mean(0)))
    for _ in range(RUNS):
        x = rng.standard_normal((6, 4)).astype(np.float32)
        result = compiled(jax.device_put(x, split))
        wanted = on_cpu(jax.device_put(x, jax.devices("cpu")[0]))
        assert_same(np.asarray(result), np.asarray(wanted), 1e-5)
    assert len(launched) >= 2 * 2 * (RUNS - 2)


CHAIN = """less { a = f32[] parameter(0) b = f32[] parameter(1) ROOT c = pred[] compare(a, b), direction=LT }
ENTRY main {
  x = f32[9] parameter(0)
  low = f32[] constant(0)
  high = f32[] constant(1)
  a = f32[9] sort(x), dimensions={0}, to_apply=less
  b = f32[9] tanh(a)
  c = f32[9] sort(b), dimensions={0}, to_apply=less
  r = f32[9] rng(low, high), distribution=rng_uniform
  zeros = f32[9] broadcast(low), dimensions={}
  d = f32[9] maximum(r, zeros)
  ROOT both = (f32[9], f32[9]) tuple(c, d)
}"""


def test_explain_says_where_and_why(context: Context, memory: Memory, rng: np.random.Generator) -> None:
    executable = compile(context, CHAIN)

    def one_segment_beside_a_draw(division: Division) -> bool:
        segments = sum(part.segment is not None for part in division.parts)
        return segments == 1 and any(part.reason.endswith(" draws from a generator") for part in division.parts)

    def explanation() -> str:
        return executable.artifact(Artifact.EXPLANATION).decode()

    planned = outline(plan_of(compiled_program(executable)))
    assert one_segment_beside_a_draw(planned)
    where = "where graphs have conditional nodes, collectives, and can be patched"
    assert f"{where}: {planned.summary()}" in explanation()
    x = rng.standard_normal(9).astype(np.float32)
    for _ in range(RUNS):
        first, drawn = run(executable, put(memory, x))
        np.testing.assert_allclose(get(first), np.tanh(np.sort(x)), rtol=1e-6)
        assert get(drawn).min() >= 0 and get(drawn).max() < 1
    assert one_segment_beside_a_draw(division_of(executable))
    assert f"device 0: {division_of(executable).summary()}" in explanation()
    assert f"segment: 3 steps (0 to 2 of main) as a poisoned replay, launched {RUNS - 2} times" in explanation()
    assert "outside: 2 steps, where a replay pays from 3 on" in explanation()
