"""Programs that the native side replays, whole and in segments; the oracle is NumPy, or JAX's own CPU."""

from __future__ import annotations

import gc
import re
import sys
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
import pytest
import torch

import flagos_backend.frontends.jax
from cpu.native.harness import add_one, compile, get, put, run
from flagos_backend import bridge
from flagos_backend.devices import streams
from flagos_backend.devices.target import Target
from flagos_backend.runtime.accelerator.conditional import ConditionalRecorder
from flagos_backend.runtime.accelerator.graphs import GraphReplay
from flagos_backend.runtime.plan import Plan
from plugin_abi.host import Artifact, Context, Executable, Memory
from support.accelerator_programs import PROGRAM
from support.against_xla import assert_same
from support.compiled_programs import graph_of
from support.decided_programs import PROGRAMS, argument, guarded_step
from support.divided_programs import called_back, chain

if TYPE_CHECKING:
    from cpu.replay.driver import Driver
    from support.tape import Kernel

flagos_backend.frontends.jax.initialize()

RUNS = 6
# Runs after which a program is captured.
FIRST = 2


@pytest.fixture(params=["branched", "selected"])
def branching(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Branches on few elements, which an accelerator selects from, as the branches that they are on many too."""
    jax.clear_caches()
    if request.param == "branched":
        monkeypatch.setattr(Target, "untaken_operations", 0)


def on_both(x: np.ndarray) -> tuple[jax.Array, jax.Array]:
    return jax.device_put(x, jax.devices("flagos")[0]), jax.device_put(x, jax.devices("cpu")[0])


def test_copies_go_on_while_a_program_is_captured(
    driver: Driver, context: Context, memory: Memory, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stream that is captured records what any thread enqueues there, and does none of it."""
    arrived: list[np.ndarray] = []
    sent = rng.standard_normal(1000).astype(np.float32)

    def there_and_back() -> None:
        arrived.append(get(put(memory, sent)))

    def copied_meanwhile() -> None:
        thread = threading.Thread(target=there_and_back)
        thread.start()
        thread.join()

    executable = compile(context, add_one(1000, donate=False))
    monkeypatch.setattr(driver, "on_capture", copied_meanwhile)
    x = rng.standard_normal(1000).astype(np.float32)
    for _ in range(FIRST + 1):
        np.testing.assert_array_equal(get(run(executable, put(memory, x))[0]), x + 1)
    # In each of three captures, the first of which is kept.
    assert len(arrived) == 3 and all(np.array_equal(array, sent) for array in arrived)
    assert "replayed as a graph of 1 nodes" in executable.artifact(Artifact.EXPLANATION).decode()


def test_the_native_side_makes_streams(context: Context) -> None:
    make = streams._make
    assert make is not None and context.devices
    made = {make(0) for _ in range(3)}
    assert len(made) == 3 and 0 not in made


def test_a_whole_program_needs_no_python_plan(
    driver: Driver, context: Context, memory: Memory, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    executable = compile(context, PROGRAM)
    for number in range(RUNS):
        x, y = rng.standard_normal((8, 16)).astype(np.float32), rng.uniform(1, 2, (16, 8)).astype(np.float32)
        if number == FIRST:
            monkeypatch.setattr(bridge.Runner, "bind", None)
        (result,) = run(executable, put(memory, x), put(memory, y))
        exp = np.exp(x.astype(np.float64))
        expected = np.concatenate([(exp @ y) / (exp @ y).sum(1, keepdims=True), exp], 1)
        np.testing.assert_allclose(get(result), expected, rtol=1e-5)
    assert len(driver.launches) == RUNS - FIRST
    assert (
        "device 0: replayed as a graph of 1 nodes with 3 addresses"
        in executable.artifact(Artifact.EXPLANATION).decode()
    )


def test_a_donated_argument_is_written_over_and_a_held_one_is_not(
    driver: Driver, context: Context, memory: Memory
) -> None:
    executable = compile(context, add_one(1000))
    replayed = 0
    for number in range(20):
        state, held = put(memory, np.full(1000, number, np.float32)), number % 2 == 1
        address, before = state.pointer_address(), len(driver.launches)
        if held:
            state.hold(1)
        (result,) = run(executable, state)
        np.testing.assert_array_equal(get(result), np.full(1000, number + 1, np.float32))
        if len(driver.launches) > before:
            assert not held and result.pointer_address() == address
            replayed += 1
    assert replayed > 1


@pytest.mark.parametrize("by_kernel", [False, True])
def test_nodes_of_events_are_removed(
    by_kernel: bool, driver: Driver, context: Context, memory: Memory, rng: np.random.Generator
) -> None:
    """A graph with some cannot be launched here."""
    driver.events, driver.by_kernel = True, by_kernel
    before = driver.graph_launches
    executable = compile(context, PROGRAM)
    for _ in range(RUNS):
        x, y = rng.standard_normal((8, 16)).astype(np.float32), rng.uniform(1, 2, (16, 8)).astype(np.float32)
        (result,) = run(executable, put(memory, x), put(memory, y))
        exp = np.exp(x.astype(np.float64))
        expected = np.concatenate([(exp @ y) / (exp @ y).sum(1, keepdims=True), exp], 1)
        np.testing.assert_allclose(get(result), expected, rtol=1e-5)
    assert driver.graph_launches - before == RUNS - FIRST
    assert (graph_of(executable).nodes > 1) == by_kernel


def test_segments_around_a_callback(driver: Driver, rng: np.random.Generator) -> None:
    compiled = jax.jit(called_back)
    for number in range(RUNS):
        there, here = on_both(rng.standard_normal((6, 8)).astype(np.float32))
        before = len(driver.launches)
        for ours, theirs in zip(compiled(there), compiled(here), strict=True):
            assert_same(np.asarray(ours), np.asarray(theirs), 1e-5)
        assert len(driver.launches) - before == (2 if number >= FIRST else 0)


@pytest.mark.parametrize("donated", [False, True])
@pytest.mark.parametrize("name", PROGRAMS)
def test_what_data_decides_is_one_launch(
    name: str, donated: bool, driver: Driver, rng: np.random.Generator, branching: None
) -> None:
    function, first, later = PROGRAMS[name]
    compiled = jax.jit(function, donate_argnums=0 if donated else ())
    for number, value in enumerate((*first, *later, *later)):
        there, here = on_both(argument(value, rng))
        before = driver.graph_launches
        ours, theirs = jax.tree.leaves(compiled(there)), jax.tree.leaves(jax.jit(function)(here))
        for our, their in zip(ours, theirs, strict=True):
            assert_same(np.asarray(our), np.asarray(their), 1e-5)
        assert driver.graph_launches - before == (1 if number >= FIRST else 0)


def test_a_step_that_skips_its_update(driver: Driver, rng: np.random.Generator, branching: None) -> None:
    """The first launches skip nothing; what they did not run is captured all the same. The state is donated."""
    start = rng.standard_normal((6, 8)).astype(np.float32)
    state = start, np.zeros_like(start), np.array(0, np.int32)
    compiled = jax.jit(guarded_step, donate_argnums=0)
    for number in range(RUNS):
        x = rng.standard_normal(start.shape).astype(np.float32)
        if number in (3, 4):
            x[2, 3] = np.nan
        (*ours, there), (*theirs, here) = zip(*map(on_both, (*state, x)), strict=True)
        before = driver.graph_launches
        (ours, finite), (theirs, _) = compiled(tuple(ours), there), compiled(tuple(theirs), here)
        assert bool(finite) == (number not in (3, 4))
        assert driver.graph_launches - before == (1 if number >= FIRST else 0)
        state = tuple(map(np.array, theirs))
        for our, their in zip(ours, state, strict=True):
            assert_same(np.asarray(our), their, 1e-5)


LOOP_OF_SORTS = """
less { a = f32[] parameter(0) b = f32[] parameter(1) ROOT c = pred[] compare(a, b), direction=LT }
body {
  p = (s32[], f32[9]) parameter(0)
  n = s32[] get-tuple-element(p), index=0
  x = f32[9] get-tuple-element(p), index=1
  one = s32[] constant(1)
  m = s32[] subtract(n, one)
  y = f32[9] sort(x), dimensions={0}, to_apply=less
  z = f32[9] tanh(y)
  w = f32[9] sort(z), dimensions={0}, to_apply=less
  ROOT r = (s32[], f32[9]) tuple(m, w)
}
condition {
  p = (s32[], f32[9]) parameter(0)
  n = s32[] get-tuple-element(p), index=0
  zero = s32[] constant(0)
  ROOT r = pred[] compare(n, zero), direction=GT
}
ENTRY main {
  n = s32[] parameter(0)
  x = f32[9] parameter(1)
  t = (s32[], f32[9]) tuple(n, x)
  w = (s32[], f32[9]) while(t), condition=condition, body=body
  ROOT y = f32[9] get-tuple-element(w), index=1
}"""


def run_sorts(executable: Executable, memory: Memory, rng: np.random.Generator) -> None:
    for iterations in (1, 2, 0, 3, 5, 1):
        x = rng.standard_normal(9).astype(np.float32)
        (result,) = run(executable, put(memory, np.array(iterations, np.int32)), put(memory, x))
        expected = x
        for _ in range(iterations):
            expected = np.tanh(np.sort(expected))
        np.testing.assert_allclose(get(result), expected, rtol=1e-5)


def test_explain_counts_conditional_nodes(
    driver: Driver, context: Context, memory: Memory, rng: np.random.Generator
) -> None:
    executable = compile(context, LOOP_OF_SORTS)
    run_sorts(executable, memory, rng)
    graph = graph_of(executable)
    assert graph.nodes >= 10 and graph.conditionals == 1
    assert (
        f"device 0: replayed as a graph of {graph.nodes} nodes, of which 1 conditional, with "
        in executable.artifact(Artifact.EXPLANATION).decode()
    )


def test_a_driver_without_conditional_nodes_runs_iterations(
    driver: Driver, context: Context, memory: Memory, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    def prepare(accelerator: int) -> None:
        raise RuntimeError("an old driver")

    assert bridge._native_conditionals is not None
    monkeypatch.setattr(bridge, "_native_conditionals", (prepare, *bridge._native_conditionals[1:]))
    executable = compile(context, LOOP_OF_SORTS)
    before = driver.graph_launches
    run_sorts(executable, memory, rng)
    assert driver.graph_launches - before == 0 + 3 + 5 + 1
    assert "goes on as data says: an old driver" in executable.artifact(Artifact.EXPLANATION).decode()


def test_a_body_that_breaks_leaves_the_loop_to_the_host(
    driver: Driver, context: Context, memory: Memory, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    capture_kernel = type(driver).capture_kernel

    def breaks(self: Driver, plan: Plan, number: int, kernel: Kernel) -> None:
        if "sort" in kernel.name:
            raise RuntimeError("sort: operation not permitted when stream is capturing")
        capture_kernel(self, plan, number, kernel)

    monkeypatch.setattr(type(driver), "capture_kernel", breaks)
    executable = compile(context, LOOP_OF_SORTS)
    run_sorts(executable, memory, rng)
    text = executable.artifact(Artifact.EXPLANATION).decode()
    assert "not permitted when stream is capturing in" in text and driver.stream == 1


def test_a_body_that_cannot_be_patched_leaves_the_loop_to_the_host(
    driver: Driver, context: Context, memory: Memory, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A body reads what never changes where the argument is."""
    text = LOOP_OF_SORTS.replace("(s32[], f32[9])", "(s32[], f32[9], f32[9])").replace("tuple(m, w)", "tuple(m, w, u)")
    text = text.replace("y = f32[9] sort(x)", "u = f32[9] get-tuple-element(p), index=2\n  y = f32[9] sort(u)")
    executable = compile(context, text.replace("tuple(n, x)", "tuple(n, x, x)"))
    refused: list[str] = []
    capture_kernel = type(driver).capture_kernel

    def refuse(self: Driver, plan: Plan, number: int, kernel: Kernel) -> None:
        capture_kernel(self, plan, number, kernel)
        if "sort" in kernel.name and not refused:
            refused.append(kernel.name)
            driver.refuse(driver.next_number - 1)

    monkeypatch.setattr(type(driver), "capture_kernel", refuse)
    for iterations in (1, 2, 0, 3):
        x = rng.standard_normal(9).astype(np.float32)
        (result,) = run(executable, put(memory, np.array(iterations, np.int32)), put(memory, x))
        np.testing.assert_allclose(get(result), np.sort(np.tanh(np.sort(x))) if iterations else x, rtol=1e-5)
    text = executable.artifact(Artifact.EXPLANATION).decode()
    assert refused and "the driver refuses to patch node" in text and "graph of" in text, text


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("kernel", r"three captures have \d+, \d+ and \d+ nodes"),
        ("node", r"node \d+ is a conditional node of which the captures do not tell"),
        ("nodes", "three captures have (1, 2 and 2|2, 1 and 2|2, 2 and 1) conditional nodes"),
    ],
)
def test_captures_whose_bodies_differ_are_refused(
    what: str,
    message: str,
    driver: Driver,
    context: Context,
    memory: Memory,
    rng: np.random.Generator,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    capture_kernel, run_while, seen = type(driver).capture_kernel, ConditionalRecorder.run_while, []

    def another_kernel(self: Driver, plan: Plan, number: int, kernel: Kernel) -> None:
        capture_kernel(self, plan, number, kernel)
        if "sort" in kernel.name:
            seen.append(kernel)
            if (len(seen) - 1) // 2 % 3 == 1:  # the second capture of three; a body has two
                capture_kernel(self, plan, number, kernel)

    def told_otherwise(self: ConditionalRecorder, another: torch.Tensor, body: Callable[[], torch.Tensor]) -> None:
        run_while(self, another, body)
        seen.append(another)
        node, *rest = self.nodes[-1]
        if what == "node":
            self.nodes[-1] = (node + 8, *rest)
        elif what == "nodes" and len(seen) % 3 != 1:
            self.nodes.append(self.nodes[-1])

    if what == "kernel":
        monkeypatch.setattr(type(driver), "capture_kernel", another_kernel)
    else:
        monkeypatch.setattr(ConditionalRecorder, "run_while", told_otherwise)
    executable = compile(context, LOOP_OF_SORTS)
    run_sorts(executable, memory, rng)
    text = executable.artifact(Artifact.EXPLANATION).decode()
    assert re.search(message, text), text


def test_a_callback_that_runs_programs_itself(driver: Driver, rng: np.random.Generator) -> None:
    """Between two segments of a program another one is launched, the same one too."""
    device = jax.devices("flagos")[0]

    def again(x: np.ndarray) -> np.ndarray:
        return np.asarray(inner(jax.device_put(np.asarray(x), device))[0])

    inner = jax.jit(called_back)
    x = rng.standard_normal((6, 8)).astype(np.float32)

    def outer(x: jax.Array) -> jax.Array:
        before = chain(x)
        return chain(jax.pure_callback(again, jax.ShapeDtypeStruct(x.shape, x.dtype), before)) - before

    compiled = jax.jit(outer)
    there, here = on_both(x)
    wanted = inner(chain(here))[0]
    expected = np.asarray(chain(wanted) - chain(here))
    for _ in range(RUNS):
        np.testing.assert_allclose(np.asarray(compiled(there)), expected, rtol=1e-4, atol=1e-5)
    assert len(driver.launches) == 4 * (RUNS - FIRST)


def test_threads_and_devices(driver: Driver, rng: np.random.Generator) -> None:
    arrays = [rng.standard_normal((6, 8)).astype(np.float32) for _ in range(4)]
    cpu = jax.devices("cpu")[0]
    wanted = [np.asarray(jax.jit(called_back)(jax.device_put(x, cpu))[0]) for x in arrays]
    compiled = jax.jit(called_back)
    outcomes: list[tuple[int, np.ndarray]] = []

    def work(number: int) -> None:
        device = jax.devices("flagos")[number % 2]
        for _ in range(RUNS):
            outcomes.append((number, np.asarray(compiled(jax.device_put(arrays[number], device))[0])))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(len(arrays))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(outcomes) == len(arrays) * RUNS
    # While one thread records, the others go on step by step; from then on all replay.
    before = len(driver.launches)
    work(0)
    work(1)
    assert len(driver.launches) - before == 2 * 2 * RUNS
    for number, result in outcomes:
        assert_same(result, wanted[number], 1e-5)


def test_a_launch_gives_up_the_interpreter(
    driver: Driver, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = jax.jit(called_back)
    there, _ = on_both(rng.standard_normal((6, 8)).astype(np.float32))
    for _ in range(FIRST + 1):
        jax.block_until_ready(compiled(there))
    order: list[str] = []
    launching, launch = threading.Event(), GraphReplay.launch

    def watched(self: GraphReplay, arrays: Sequence[Any]) -> None:
        order.append("begins")
        launching.set()
        launch(self, arrays)

    def watch() -> None:
        launching.wait()
        order.append("another thread")

    monkeypatch.setattr(GraphReplay, "launch", watched)
    monkeypatch.setattr(driver, "on_launch", lambda: order.append("is on the device"))
    driver.delay(0.2)
    watcher, interval = threading.Thread(target=watch), sys.getswitchinterval()
    watcher.start()
    sys.setswitchinterval(30)  # who has the interpreter keeps it until it gives it up
    try:
        jax.block_until_ready(compiled(there))
    finally:
        sys.setswitchinterval(interval)
        launching.set()
        watcher.join()
    assert order[:3] == ["begins", "another thread", "is on the device"]


def test_what_the_driver_does_not_patch_is_halved(
    driver: Driver, context: Context, memory: Memory, rng: np.random.Generator
) -> None:
    less = "less { a = f32[] parameter(0) b = f32[] parameter(1) ROOT c = pred[] compare(a, b), direction=LT }"
    lines = [
        line
        for n in range(6)
        for line in (f"t{n} = f32[9] tanh(x{n})", f"x{n + 1} = f32[9] sort(t{n}), dimensions={{0}}, to_apply=less")
    ]
    body = "\n".join(lines)
    executable = compile(
        context, f"{less}\nENTRY main {{ x0 = f32[9] parameter(0)\n{body}\nROOT r = f32[9] negate(x6) }}"
    )
    driver.refuse(driver.next_number)
    for _ in range(RUNS):
        x = rng.standard_normal(9).astype(np.float32)
        expected = np.sort(x)
        for _ in range(6):
            expected = np.tanh(expected)
        np.testing.assert_allclose(get(run(executable, put(memory, x))[0]), -expected, rtol=1e-5)
    text = executable.artifact(Artifact.EXPLANATION).decode()
    assert "replayed in 2 segments" in text
    assert len(driver.launches) == 2 * (RUNS - FIRST)


def test_replays_go_with_their_programs(driver: Driver, context: Context, memory: Memory) -> None:
    def sweep() -> None:
        jax.clear_caches()
        gc.collect()
        # What was dropped without the interpreter goes when it is entered.
        jax.block_until_ready(jax.jit(lambda x: x - 1)(y))

    y = jax.device_put(np.zeros((5, 7), np.float32), jax.devices("flagos")[0])
    sweep()
    before = driver.execs
    whole, parts = compile(context, add_one(8, donate=False)), jax.jit(called_back)
    x = put(memory, np.zeros(8, np.float32))
    for _ in range(RUNS):
        get(run(whole, x)[0])
        jax.block_until_ready(parts(y))
    assert driver.execs == before + 3
    whole.close()
    del parts
    sweep()
    assert driver.execs == before
