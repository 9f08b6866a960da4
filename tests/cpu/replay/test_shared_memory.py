"""Programs of one device whose graphs have their temporaries in one place, where each launch leaves something else; the
oracle is NumPy."""

from __future__ import annotations

import gc
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import jax
import numpy as np
import pytest
import torch

import flagos_backend.frontends.jax
from cpu.native.harness import compile, get, put, run
from flagos_backend.runtime.accelerator.memory import shared_memory
from flagos_backend.runtime.plan import Plan
from plugin_abi.host import Artifact, Buffer, Context, Executable, Memory
from support.against_xla import assert_same
from support.compiled_programs import graph_of
from support.decided_programs import PROGRAMS, argument
from support.divided_programs import called_back

if TYPE_CHECKING:
    from cpu.replay.driver import Driver
    from support.tape import Kernel

flagos_backend.frontends.jax.initialize()

# Runs after which a program is captured.
FIRST = 2


@pytest.fixture
def driver(driver: Driver) -> Iterator[Driver]:
    jax.clear_caches()
    gc.collect()
    driver.by_kernel = True
    yield driver


@dataclass(frozen=True)
class Program:
    """``iterations`` times: the tanh of it, sorted."""

    executable: Executable
    elements: int
    iterations: int

    def check(self, result: Buffer, x: np.ndarray) -> None:
        for _ in range(self.iterations):
            x = np.tanh(np.sort(x))
        np.testing.assert_allclose(get(result), -x, rtol=1e-5)

    def explanation(self) -> str:
        return self.executable.artifact(Artifact.EXPLANATION).decode()


def captured(context: Context, memory: Memory, rng: np.random.Generator, elements: int, iterations: int = 3) -> Program:
    lines = [
        line
        for n in range(iterations)
        for line in (
            f"t{n} = f32[{elements}] sort(x{n}), dimensions={{0}}, to_apply=less",
            f"x{n + 1} = f32[{elements}] tanh(t{n})",
        )
    ]
    less = "less { a = f32[] parameter(0) b = f32[] parameter(1) ROOT c = pred[] compare(a, b), direction=LT }"
    body = "\n".join(lines)
    entry = (
        f"ENTRY main {{ x0 = f32[{elements}] parameter(0)\n{body}\nROOT r = f32[{elements}] negate(x{iterations}) }}"
    )
    text = f"{less}\n{entry}"
    program = Program(compile(context, text), elements, iterations)
    interleave([program] * (FIRST + 1), memory, rng)
    return program


def interleave(programs: list[Program], memory: Memory, rng: np.random.Generator) -> None:
    """Launches them in that order before any result is looked at."""
    launched = []
    for program in programs:
        x = rng.standard_normal(program.elements).astype(np.float32)
        launched.append((program, x, run(program.executable, put(memory, x))[0]))
    for program, x, result in launched:
        program.check(result, x)


def test_smaller_programs_need_no_more_memory(
    driver: Driver, context: Context, memory: Memory, rng: np.random.Generator
) -> None:
    programs = [captured(context, memory, rng, 3000)]
    (in_use,) = driver.pools.in_use.items()
    for elements, iterations in ((1000, 4), (3000, 3), (500, 2)):
        programs.append(captured(context, memory, rng, elements, iterations))
        assert list(driver.pools.in_use.items()) == [in_use]
    before = driver.graph_launches
    interleave([programs[n] for n in rng.integers(0, len(programs), 40)], memory, rng)
    assert driver.graph_launches - before == 40
    for program in programs:
        assert not graph_of(program.executable).alone


def test_a_larger_program_leaves_the_others_where_they_are(
    driver: Driver, context: Context, memory: Memory, rng: np.random.Generator
) -> None:
    programs, sizes = [], []
    for elements in (500, 1000, 4000):
        programs.append(captured(context, memory, rng, elements))
        (size,) = driver.pools.in_use.values()
        sizes.append(size)
        interleave(programs * 3, memory, rng)
    assert sizes == sorted(set(sizes))


def test_memory_goes_with_the_last_program(
    driver: Driver, context: Context, memory: Memory, rng: np.random.Generator
) -> None:
    def sweep() -> None:
        gc.collect()
        # What was dropped without the interpreter goes when it is entered.
        jax.block_until_ready(jax.jit(lambda x: x - 1)(np.zeros(3)))

    first, second = captured(context, memory, rng, 3000), captured(context, memory, rng, 700)
    first.executable.close()
    sweep()
    assert len(driver.pools.in_use) == 1
    interleave([second] * 3, memory, rng)
    second.executable.close()
    sweep()
    assert not driver.pools.in_use
    third = captured(context, memory, rng, 900)
    interleave([third] * 3, memory, rng)
    assert len(driver.pools.in_use) == 1


@pytest.mark.parametrize("what", ["another kernel", "memory elsewhere"])
def test_what_is_not_as_proven_keeps_memory_of_its_own(
    what: str,
    driver: Driver,
    context: Context,
    memory: Memory,
    rng: np.random.Generator,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sharing = captured(context, memory, rng, 2000)
    shared = shared_memory(torch.device("cpu"))
    capture_kernel = type(driver).capture_kernel

    def twice(self: Driver, plan: Plan, number: int, kernel: Kernel) -> None:
        capture_kernel(self, plan, number, kernel)
        if self.pools.current == shared.pool.handle and number == 0:
            capture_kernel(self, plan, number, kernel)

    if what == "another kernel":
        monkeypatch.setattr(type(driver), "capture_kernel", twice)
        reason = r"captures have (\d+) and (?!\1)\d+ nodes"
    else:
        driver.pools.misplaced = shared.pool.handle
        reason = r"a kernel parameter of node \d+ is not what the captures that were compared have"
    alone = captured(context, memory, rng, 1000)
    assert re.match(reason, graph_of(alone.executable).alone)
    assert f", in memory of its own ({graph_of(alone.executable).alone})" in alone.explanation()
    assert not graph_of(sharing.executable).alone
    assert len(driver.pools.in_use) == 2
    interleave([alone, sharing] * 5, memory, rng)


def test_segments_and_loops_of_other_programs_lie_there_too(
    driver: Driver, context: Context, memory: Memory, rng: np.random.Generator
) -> None:
    """Segments around a callback, and a loop that data decides, each between launches of a third."""
    device, cpu = jax.devices("flagos")[0], jax.devices("cpu")[0]
    loop, first, later = PROGRAMS["collatz"]
    whole = captured(context, memory, rng, 100)
    values = iter((*first, *later, *later))
    before = driver.graph_launches
    for number, value in enumerate(values):
        for function, x in (
            (called_back, rng.standard_normal((6, 8)).astype(np.float32)),
            (loop, argument(value, rng)),
        ):
            ours, theirs = (jax.tree.leaves(jax.jit(function)(jax.device_put(x, where))) for where in (device, cpu))
            for our, their in zip(ours, theirs, strict=True):
                assert_same(np.asarray(our), np.asarray(their), 1e-5)
            interleave([whole], memory, rng)
        assert driver.graph_launches - before == 2 + (3 if number >= FIRST else 0)
        before = driver.graph_launches
    assert len(driver.pools.in_use) == 1


def test_threads_launch_different_programs(
    driver: Driver, context: Context, memory: Memory, rng: np.random.Generator
) -> None:
    programs = [captured(context, memory, rng, elements) for elements in (3000, 800)]
    failures: list[BaseException] = []

    def work(program: Program, seed: int) -> None:
        try:
            interleave([program] * 20, memory, np.random.default_rng(seed))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(program, int(rng.integers(1 << 30)))) for program in programs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
