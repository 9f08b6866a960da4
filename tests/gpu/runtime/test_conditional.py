"""JAX programs in which data decides what runs, captured as one graph with conditional nodes, against JAX's own CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import flagos_backend.frontends.jax
from flagos_backend.devices.target import Target
from flagos_backend.kernels.reference import combining
from flagos_backend.runtime.accelerator.conditional import ConditionalRecorder
from flagos_backend.runtime.accelerator.recordings import Recordings
from support.decided_programs import PROGRAMS, argument, guarded_step

flagos_backend.frontends.jax.initialize()

# Runs after which a program is captured.
FIRST = 2


@pytest.fixture
def outcomes(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """What became of each capture, as explain has it. Small branches stay branches."""
    monkeypatch.setattr(Target, "untaken_operations", 0)
    jax.clear_caches()  # what another test had captured is not captured again
    seen: list[object] = []
    captured = Recordings.note

    def noted(self: Recordings, local_ordinal: int, outcome: object) -> None:
        seen.append(outcome)
        captured(self, local_ordinal, outcome)

    monkeypatch.setattr(Recordings, "note", noted)
    return seen


def assert_one_graph(outcomes: list[object]) -> None:
    (outcome,) = [str(outcome) for outcome in outcomes]
    assert outcome.startswith("replayed as a graph of ") and " conditional, with " in outcome, outcome


def assert_as_on_the_cpu(function: Callable[[jax.Array], object], compiled: object, x: np.ndarray) -> None:
    there, here = (jax.device_put(x, jax.devices(kind)[0]) for kind in ("flagos", "cpu"))
    ours, theirs = jax.tree.leaves(compiled(there)), jax.tree.leaves(jax.jit(function)(here))  # type: ignore[operator]
    for our, their in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(np.asarray(our), np.asarray(their), rtol=1e-4)


@pytest.mark.parametrize("donated", [False, True])
@pytest.mark.parametrize("name", PROGRAMS)
def test_one_graph_does_what_the_data_says(
    name: str, donated: bool, outcomes: list[object], rng: np.random.Generator
) -> None:
    function, first, later = PROGRAMS[name]
    with jax.default_matmul_precision("highest"):
        compiled = jax.jit(function, donate_argnums=0 if donated else ())
        for value in (*first, *later, *later):
            assert_as_on_the_cpu(function, compiled, argument(value, rng))
    assert_one_graph(outcomes)


def test_a_step_that_skips_its_update(outcomes: list[object], rng: np.random.Generator) -> None:
    """The first launches skip nothing; the state is donated."""
    device, cpu = jax.devices("flagos")[0], jax.devices("cpu")[0]
    start = rng.standard_normal((33, 65)).astype(np.float32)
    states = [jax.device_put((start, np.zeros_like(start), np.int32(0)), where) for where in (device, cpu)]
    compiled = jax.jit(guarded_step, donate_argnums=0)
    for number in range(9):
        x = rng.standard_normal(start.shape).astype(np.float32)
        if number in (3, 4, 7):
            x[5, 7] = np.nan
        outs = [compiled(state, jax.device_put(x, where)) for state, where in zip(states, (device, cpu), strict=True)]
        states = [state for state, _ in outs]
        assert bool(outs[0][1]) == (number not in (3, 4, 7))
    for ours, theirs in zip(*states, strict=True):
        np.testing.assert_allclose(np.asarray(ours), np.asarray(theirs), rtol=1e-4, atol=1e-6)
    assert_one_graph(outcomes)


def test_many_launches_keep_their_results_apart(outcomes: list[object], rng: np.random.Generator) -> None:
    """Nothing is waited for, and the loops of all launches have the same memory."""
    function, first, later = PROGRAMS["doubled_until"]
    compiled, device = jax.jit(function), jax.devices("flagos")[0]
    arrays = [argument(value, rng) for value in (*first, *10 * later)]
    results = [compiled(jax.device_put(x, device)) for x in arrays]
    for x, result in zip(arrays, results, strict=True):
        expected = jax.jit(function)(jax.device_put(x, jax.devices("cpu")[0]))
        for ours, theirs in zip(result, expected, strict=True):
            np.testing.assert_array_equal(np.asarray(ours), np.asarray(theirs))
    assert_one_graph(outcomes)


def test_a_loop_of_many_iterations(outcomes: list[object]) -> None:
    def count(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        limit = x[0]
        return jax.lax.while_loop(lambda s: s[1] < limit, lambda s: (s[0] * 0.5 + 1, s[1] + 1), (x, jnp.float32(0)))

    compiled = jax.jit(count)
    for iterations in (2, 3, 10_000, 0):
        x = np.full(1000, iterations, np.float32)
        result, seen = compiled(jax.device_put(x, jax.devices("flagos")[0]))
        assert float(seen) == iterations
        np.testing.assert_allclose(np.asarray(result), 2 + (iterations - 2) * np.float32(0.5) ** iterations, rtol=1e-6)
    assert_one_graph(outcomes)


def test_a_body_that_breaks_leaves_torch_as_it_was(
    outcomes: list[object], rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    function, first, later = PROGRAMS["fibonacci"]
    run_while = ConditionalRecorder.run_while

    def broken(self: ConditionalRecorder, another: torch.Tensor, body: Callable[[], torch.Tensor]) -> None:
        def waits() -> torch.Tensor:
            again = body()
            again.item()
            return again

        run_while(self, another, waits)

    with monkeypatch.context() as patched:
        patched.setattr(ConditionalRecorder, "run_while", broken)
        compiled = jax.jit(function)
        for value in (*first, *later):
            assert_as_on_the_cpu(function, compiled, argument(value, rng))
    (outcome,) = map(str, outcomes)
    assert not outcome.startswith("replayed as a graph") and "captur" in outcome, outcome
    assert torch.zeros(1 << 20, device="cuda").sum().item() == 0
    outcomes.clear()
    jax.clear_caches()
    test_one_graph_does_what_the_data_says("collatz", False, outcomes, rng)


def test_a_body_that_cannot_be_captured_leaves_the_loop_to_the_host(
    outcomes: list[object], monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator
) -> None:
    assign = combining._assign_without_waiting

    def waits(target: torch.Tensor, rows: torch.Tensor, *others: Any) -> None:
        rows.sum().item()
        assign(target, rows, *others)

    def counted_down(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """A scatter of two rows in each iteration of a loop."""

        def iteration(state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            n, seen = state
            return n - 1, seen.at[jnp.stack([n % 6, (n + 1) % 6])].set(n.astype(seen.dtype))

        return jax.lax.while_loop(lambda state: state[0] > 0, iteration, (x.reshape(-1)[0].astype(jnp.int32), x))

    monkeypatch.setattr(combining, "_assign_without_waiting", waits)
    monkeypatch.setenv("FLAGOS_PER_OP", "scatter=reference")
    compiled = jax.jit(counted_down)
    for value in (6, 3, 1, 7, 27, 2):
        assert_as_on_the_cpu(counted_down, compiled, argument(value, rng))
    (outcome,) = [str(outcome) for outcome in outcomes]
    assert "not permitted when stream is capturing" in outcome
