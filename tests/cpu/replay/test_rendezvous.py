"""Programs whose devices meet in what is recorded of them: launched natively and together. The oracle is JAX's own CPU,
or the same program before it was recorded."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import flagos_backend.frontends.jax
from flagos_backend import bridge
from flagos_backend.collectives import context_peers
from flagos_backend.collectives.context_peers import ContextPeers
from flagos_backend.collectives.transport import Transport
from flagos_backend.collectives.watchdog import Watchdog
from flagos_backend.errors import CaptureRefused
from flagos_backend.runtime.accelerator.graphs import GraphRecorder, GraphReplay
from flagos_backend.runtime.accelerator.recordings import Recordings
from flagos_backend.runtime.accelerator.segments import Division
from flagos_backend.runtime.plan import Plan
from support.poisoned_replays import PoisonedReplay

if TYPE_CHECKING:
    from cpu.replay.driver import Driver

flagos_backend.frontends.jax.initialize()

RUNS = 6
# Runs after which a program is captured.
FIRST = 2
DEVICES = 2
# Steps in which some have to launch what was recorded.
_PATIENCE = 30
Outcomes = list[tuple[int, object]]


@pytest.fixture(autouse=True)
def rendezvous(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is captured exchanges nothing, what is launched does, over gloo."""
    jax.clear_caches()
    driver.run_side_by_side(True)
    monkeypatch.setattr(context_peers, "_RECORDED", frozenset({"gloo"}))
    monkeypatch.setattr(ContextPeers, "no_recording", "")
    monkeypatch.setattr(PoisonedReplay, "_stream", contextlib.nullcontext())
    exchange = Transport._await

    def captured(self: Transport, channel: object, starts: Sequence[Callable[[], Any]]) -> None:
        if threading.get_ident() not in driver.captures_in:
            exchange(self, channel, starts)

    monkeypatch.setattr(Transport, "_await", captured)


@pytest.fixture
def outcomes(monkeypatch: pytest.MonkeyPatch) -> Outcomes:
    """What became of each capture, by device."""
    seen: Outcomes = []
    note = Recordings.note

    def noted(self: Recordings, local_ordinal: int, outcome: object) -> None:
        seen.append((local_ordinal, outcome))
        note(self, local_ordinal, outcome)

    monkeypatch.setattr(Recordings, "note", noted)
    return seen


def step(weights: list[jax.Array], x: jax.Array) -> tuple[list[jax.Array], jax.Array]:
    def loss(weights: list[jax.Array]) -> jax.Array:
        return jnp.mean(jnp.tanh(jnp.tanh(x @ weights[0]) @ weights[1]) ** 2)

    value, gradients = jax.value_and_grad(loss)(weights)
    return [w - 0.1 * g for w, g in zip(weights, gradients, strict=True)], value


class Steps:
    """Training steps over two devices, with their weights spread over them: ours, and the CPU's beside it."""

    def __init__(self, rng: np.random.Generator, function: Callable[..., Any] = step) -> None:
        self._rng = rng
        weights = [rng.standard_normal(shape).astype(np.float32) for shape in ((64, 128), (128, 64))]
        self._compiled = jax.jit(function, donate_argnums=0)
        self._sides = []
        for platform in ("flagos", "cpu"):
            sharding = NamedSharding(Mesh(np.array(jax.devices(platform)[:DEVICES]), ("d",)), P("d"))
            self._sides.append((sharding, jax.device_put(weights, sharding)))

    def run_until(self, happened: Callable[[], bool]) -> None:
        """Steps until then: a copy to the host that has not quite ended keeps a launch from writing over weights."""
        for _ in range(_PATIENCE):
            self.run()
            if happened():
                return
        raise AssertionError("it did not happen")

    @property
    def weights(self) -> list[jax.Array]:
        return self._sides[0][1]

    @weights.setter
    def weights(self, weights: list[jax.Array]) -> None:
        """Of both sides."""
        self._sides = [(sharding, jax.device_put(weights, sharding)) for sharding, _ in self._sides]

    def run(self, *, held: bool = False) -> None:
        """One more step. ``held``: somebody else still has weights of our first device."""
        x = self._rng.standard_normal((32, 64)).astype(np.float32)
        losses, after = [], []
        for number, (sharding, before) in enumerate(self._sides):
            # Steps of the interpreter leave them in the host's memory, aligned to less than a device's.
            weights = jax.device_put([np.asarray(w) for w in before], sharding)
            kept = torch.from_dlpack(weights[0].addressable_shards[0].data) if held and number == 0 else None
            made, loss = self._compiled(weights, jax.device_put(x, sharding))
            losses.append(np.asarray(loss))
            after.append((sharding, made))
            del kept
        self._sides = after
        np.testing.assert_allclose(losses[0], losses[1], rtol=1e-4)
        for ours, theirs in zip(*(weights for _, weights in self._sides), strict=True):
            np.testing.assert_allclose(np.asarray(ours), np.asarray(theirs), rtol=1e-4, atol=1e-5)


def test_the_devices_launch_what_they_recorded(
    driver: Driver, outcomes: Outcomes, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps, native = Steps(rng), 0
    for number in range(_PATIENCE):
        before = len(driver.launches)
        steps.run()
        launched = len(driver.launches) - before
        assert launched in (0, DEVICES) and (launched == 0 or number >= FIRST)
        native += launched
    assert native > DEVICES
    assert sorted(device for device, _ in outcomes) == [0, 1]
    assert all(isinstance(made, Division) and made.whole is not None for _, made in outcomes)


Collective = tuple[Callable[[jax.Array], jax.Array], P, Callable[[np.ndarray], np.ndarray]]

# What a device does with its part, how the result is spread, and what it is of given[device, element].
COLLECTIVES: dict[str, Collective] = {
    "all-gather": (lambda y: lax.all_gather(y, "d", tiled=True), P(), np.ravel),
    "all-reduce": (lambda y: lax.psum(y, "d"), P(), lambda g: g.sum(0)),
    "all-to-all": (
        lambda y: lax.all_to_all(y, "d", 0, 0, tiled=True),
        P("d"),
        lambda g: g.reshape(2, 2, -1).transpose(1, 0, 2).ravel(),
    ),
    "permute": (lambda y: lax.ppermute(y, "d", [(0, 1), (1, 0)]), P("d"), lambda g: g[::-1].ravel()),
    "reduce-scatter": (lambda y: lax.psum_scatter(y, "d", tiled=True), P("d"), lambda g: g.sum(0)),
    "argument used twice": (
        lambda y: lax.all_gather(y, "d", tiled=True) - jnp.tile(lax.psum(y, "d") * y, 2)[::-1],
        P("d"),
        lambda g: np.concatenate([g.ravel() - np.tile(g.sum(0) * row, 2)[::-1] for row in g]),
    ),
}


@pytest.mark.parametrize("keeps", [False, True], ids=["in the graph", "elsewhere"])
@pytest.mark.parametrize("name", COLLECTIVES)
def test_collectives_of_arguments_and_outputs(
    driver: Driver, outcomes: Outcomes, rng: np.random.Generator, name: str, keeps: bool
) -> None:
    """They are given these without a copy, if the graph then says where they lie."""
    driver.keeps_addresses = keeps
    function, out, expected = COLLECTIVES[name]
    mesh = Mesh(np.array(jax.devices("flagos")[:DEVICES]), ("d",))
    program = jax.jit(jax.shard_map(function, mesh=mesh, in_specs=P("d"), out_specs=out, check_vma=False))
    before = len(driver.launches)
    for _ in range(RUNS):
        given = rng.integers(-9, 9, (DEVICES, 6)).astype(np.float32)
        x = jax.device_put(given.ravel(), NamedSharding(mesh, P("d")))
        np.testing.assert_array_equal(np.asarray(program(x)), expected(given))
        np.testing.assert_array_equal(np.asarray(x), given.ravel())
    assert len(driver.launches) > before
    assert outcomes and all(isinstance(made, Division) and made.rendezvous for _, made in outcomes)
    assert all(("lent to collectives" in str(made)) != keeps for _, made in outcomes), [str(m) for _, m in outcomes]


def _is_told_again_after(seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """A launch says that somebody has to watch, and for so long no other one does."""
    follow = Watchdog.follow

    def followed(self: Watchdog, *given: Any) -> float:
        follow(self, *given)
        return seconds

    monkeypatch.setattr(Watchdog, "follow", followed)


def test_a_launch_enters_the_interpreter_rarely(
    driver: Driver, outcomes: Outcomes, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of what was recorded: to say that somebody has to watch, once for many launches."""
    entered: list[str] = []
    for name in ("begin", "launched"):
        method = getattr(bridge.Runner, name)

        def entry(self: bridge.Runner, *given: Any, name: str = name, method: Any = method) -> Any:
            entered.append(name)
            return method(self, *given)

        monkeypatch.setattr(bridge.Runner, name, entry)
    _is_told_again_after(3600.0, monkeypatch)
    mesh = Mesh(np.array(jax.devices("flagos")[:DEVICES]), ("d",))
    sharding = NamedSharding(mesh, P("d"))
    program = jax.jit(jax.shard_map(lambda y: lax.psum(y, "d"), mesh=mesh, in_specs=P("d"), out_specs=P()))
    for _ in range(_PATIENCE):
        program(jax.device_put(rng.random(4, np.float32), sharding)).block_until_ready()
    assert len(driver.launches) > DEVICES and len(outcomes) == DEVICES
    assert entered.count("launched") == DEVICES
    assert entered.count("begin") <= FIRST + 1


def test_where_one_device_cannot_none_does(driver: Driver, rng: np.random.Generator) -> None:
    """What was recorded writes over the weights, which somebody else still has on one of them."""
    steps = Steps(rng)
    steps.run_until(lambda: len(driver.launches) > 0)
    before = len(driver.launches)
    steps.run(held=True)
    assert len(driver.launches) == before


@pytest.mark.parametrize("times", [1, 2])
def test_what_devices_recorded_differently_is_recorded_again(
    driver: Driver, outcomes: Outcomes, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    """Where that happens twice, without what they meet in."""
    record, refused = GraphRecorder.__call__, set[int]()

    def recorded(self: GraphRecorder, plan: Plan) -> GraphReplay:
        attempt = len(outcomes) // DEVICES
        if self._run.partition_id == 1 and attempt < times and self._run.communicator is not None:
            refused.add(attempt)
            raise CaptureRefused(reason="there is no memory left")
        return record(self, plan)

    monkeypatch.setattr(GraphRecorder, "__call__", recorded)
    steps = Steps(rng)
    for _ in range(RUNS + times):
        steps.run()
    last = dict(outcomes)
    assert sorted(last) == [0, 1] and len(outcomes) == (times + 1) * DEVICES and refused == set(range(times))
    for made in last.values():
        assert isinstance(made, Division) and made.whole is None
        assert bool(made.rendezvous) == (times == 1)
        # What was given up before has left the memory that all graphs of a device share.
        assert "in memory of its own" not in str(made)
        assert ("meets other devices: the devices recorded it differently" in str(made)) == (times == 2)
    before = len(driver.launches)
    steps.run()
    if times == 1:
        assert len(driver.launches) == before + DEVICES


def test_segments_in_which_devices_meet(driver: Driver, outcomes: Outcomes, rng: np.random.Generator) -> None:
    """A callback divides the program: the host decides nothing between the devices."""

    def step_and_note(weights: list[jax.Array], x: jax.Array) -> tuple[list[jax.Array], jax.Array]:
        made, value = step(weights, x)
        return made, jax.pure_callback(lambda v: np.asarray(v) * 1, jax.ShapeDtypeStruct((), np.float32), value)

    steps = Steps(rng, step_and_note)
    steps.run_until(lambda: len(driver.launches) > 0)
    for _, made in outcomes:
        assert isinstance(made, Division) and made.whole is None and made.rendezvous
        segments = [part.segment for part in made.parts if part.segment and part.segment.meets]
        assert segments and all(segment.launches == 1 for segment in segments)


def test_a_launch_that_fails_fails_for_all(
    driver: Driver, outcomes: Outcomes, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the one after it does not."""
    _is_told_again_after(0.0, monkeypatch)
    steps = Steps(rng)
    steps.run_until(lambda: len(driver.launches) > 0)
    note = bridge.Runner.launched

    def failing(self: bridge.Runner, local_ordinal: int) -> float:
        if local_ordinal == 1:
            raise RuntimeError("the second device is lost")
        return note(self, local_ordinal)

    weights = jax.tree.map(jnp.copy, steps.weights)
    with monkeypatch.context() as patch:
        patch.setattr(bridge.Runner, "launched", failing)
        with pytest.raises(jax.errors.JaxRuntimeError, match="the second device is lost"):
            steps.run_until(lambda: False)
    steps.weights = weights
    steps.run()


def test_a_graph_that_was_given_up_is_not_launched(
    driver: Driver, outcomes: Outcomes, rng: np.random.Generator
) -> None:
    """As where another process is lost: the steps that come after hear of that from their transports."""
    steps = Steps(rng)
    steps.run_until(lambda: len(outcomes) == DEVICES)
    execs = driver.execs
    for _, made in outcomes:
        assert isinstance(made, Division) and isinstance(made.whole, GraphReplay)
        made.whole.drop()
        made.whole.drop()
    assert driver.execs == execs - DEVICES
    before = len(driver.launches)
    steps.run()
    assert len(driver.launches) == before
