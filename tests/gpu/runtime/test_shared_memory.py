"""JAX programs with large temporaries, kept as graphs that have them in one place, against JAX's own CPU."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import flagos_backend.frontends.jax
from flagos_backend.runtime.accelerator.recordings import Recordings

flagos_backend.frontends.jax.initialize()

# Runs after which a program is captured.
FIRST = 2
# What torch allocates at least for an array of some MiB, and for small ones.
SLACK = 24 << 20


@pytest.fixture
def outcomes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What became of each capture, as explain has it."""
    seen: list[str] = []
    captured = Recordings.note

    def noted(self: Recordings, local_ordinal: int, outcome: object) -> None:
        seen.append(str(outcome))
        captured(self, local_ordinal, outcome)

    monkeypatch.setattr(Recordings, "note", noted)
    return seen


def pool_bytes() -> int:
    """What graphs have, and nobody else can have."""
    gc.collect()
    # What was dropped without the interpreter goes when it is entered.
    jax.block_until_ready(jnp.zeros(3) + 1)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    segments = torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
    return sum(segment["total_size"] for segment in segments if tuple(segment["segment_pool_id"]) != (0, 0))


@dataclass
class Program:
    """Takes and gives a vector, with matrices of as many rows and columns in between."""

    size: int
    iterations: int

    def __post_init__(self) -> None:
        self.compiled: Callable[[jax.Array], jax.Array] = jax.jit(self.function)

    def function(self, x: jax.Array) -> jax.Array:
        matrix = jnp.sin(x[:, None] * x[None, :] * self.iterations)
        for _ in range(self.iterations):
            matrix = jnp.tanh(matrix @ matrix / 8) + matrix
        return matrix.sum(1)

    def draw(self, rng: np.random.Generator) -> np.ndarray:
        return rng.uniform(-1, 1, self.size).astype(np.float32) / np.float32(self.size**0.25)

    def launch(self, x: np.ndarray) -> jax.Array:
        return self.compiled(jax.device_put(x, jax.devices("flagos")[0]))

    def check(self, result: jax.Array, x: np.ndarray) -> None:
        expected = np.asarray(jax.jit(self.function)(jax.device_put(x, jax.devices("cpu")[0])))
        np.testing.assert_allclose(np.asarray(result), expected, rtol=1e-3, atol=1e-3 * np.abs(expected).max())


def captured(size: int, iterations: int, rng: np.random.Generator) -> Program:
    program = Program(size, iterations)
    for _ in range(FIRST + 1):
        x = program.draw(rng)
        program.check(program.launch(x), x)
    return program


@pytest.fixture(autouse=True)
def exact() -> None:
    jax.clear_caches()
    jax.config.update("jax_default_matmul_precision", "highest")


def test_programs_need_the_memory_of_the_largest(outcomes: list[str], rng: np.random.Generator) -> None:
    before = pool_bytes()
    programs = [captured(3072, 3, rng)]
    largest = pool_bytes() - before
    assert largest >= 4 * 3072**2
    for size, iterations in ((2048, 4), (3072, 2), (1024, 5), (2560, 3)):
        programs.append(captured(size, iterations, rng))
        assert pool_bytes() - before <= largest + SLACK
    assert len(outcomes) >= len(programs)
    for outcome in outcomes:
        assert outcome.startswith("replayed as a graph of ") and "in memory of its own" not in outcome, outcome
    # Nothing is waited for: each launch writes over what the one before it left.
    launched = []
    for number in rng.integers(0, len(programs), 20):
        x = programs[number].draw(rng)
        launched.append((programs[number], x, programs[number].launch(x)))
    for program, x, result in launched:
        program.check(result, x)


def test_a_larger_program_leaves_the_others_where_they_are(rng: np.random.Generator) -> None:
    programs = []
    for size in (512, 1024, 3072):
        programs.append(captured(size, 3, rng))
        for program in programs * 2:
            x = program.draw(rng)
            program.check(program.launch(x), x)


def test_memory_goes_with_the_last_program(rng: np.random.Generator) -> None:
    before = pool_bytes()
    programs = [captured(2048, 3, rng), captured(1536, 3, rng)]
    kept = pool_bytes()
    assert kept - before > 16 * 2048**2 // 2
    programs.pop(0)
    jax.clear_caches()  # of all programs, so that what is left is launched from the start
    assert pool_bytes() <= kept
    del programs
    assert pool_bytes() - before <= (kept - before) // 4
    again = captured(2048, 3, rng)
    x = again.draw(rng)
    again.check(again.launch(x), x)
