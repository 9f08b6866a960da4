"""How long many different programs take to compile: JAX's primitive harnesses, a GPT-2 step, 10,000 instructions."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import gpt2

from . import report

# Below this nobody waits; above it a program may take three times as long as with the peer.
FLOOR_SECONDS = 0.05
GOAL = 3.0
_SHOWN = 12
_BIG = 0.5  # seconds: programs that take longer are compiled once


@dataclass(frozen=True)
class Program:
    """``lower`` gives what jax lowers for a device."""

    name: str
    lower: Callable[[jax.Device], Any]


@dataclass(frozen=True)
class Times:
    """Seconds to compile, the least of the rounds."""

    name: str
    ours: float
    peer: float

    @property
    def is_slow(self) -> bool:
        return self.ours > max(FLOOR_SECONDS, GOAL * self.peer)


def _harnesses(stride: int) -> Iterator[Program]:
    from jax._src.internal_test_util import test_harnesses

    for harness in test_harnesses.all_harnesses[::stride]:
        arguments = harness.dyn_args_maker(np.random.RandomState(0))

        def lower(device: jax.Device, harness: Any = harness, arguments: Any = arguments) -> Any:
            return jax.jit(harness.dyn_fun).lower(*jax.device_put(arguments, device))

        yield Program(harness.fullname, lower)


def _gpt2(device: jax.Device) -> Any:
    config = gpt2.Config(layers=4, width=128, context=128, batch=8)
    initialize, step = gpt2.training(config)
    with jax.default_device(device):
        tokens = jax.ShapeDtypeStruct((config.batch, config.context + 1), np.int32)
        return jax.jit(step, donate_argnums=0).lower(jax.eval_shape(initialize), tokens)


def _long(device: jax.Device) -> Any:
    """10,000 instructions and more: layers of a product, activations and a normalization, each with its own weights."""

    def network(x: jax.Array, weights: jax.Array) -> jax.Array:
        for layer in range(700):
            y = jnp.tanh(x @ weights[layer % 7] + layer / 700)
            x = x + (y - jnp.mean(y, axis=1, keepdims=True)) * jax.lax.rsqrt(jnp.var(y, axis=1, keepdims=True) + 1e-5)
        return x

    arguments = (np.ones((16, 32), np.float32), np.ones((7, 32, 32), np.float32))
    return jax.jit(network).lower(*jax.device_put(arguments, device))


def measure(program: Program, devices: tuple[jax.Device, jax.Device], rounds: int) -> Times | None:
    """None when the program is not for both: some harnesses are for other platforms only."""
    least = [float("inf")] * 2
    try:
        for turn in range(rounds):
            for number, device in enumerate(devices):
                if turn and least[number] > _BIG:
                    continue
                jax.clear_caches()
                lowered = program.lower(device)
                began = time.perf_counter()
                lowered.compile()
                least[number] = min(least[number], time.perf_counter() - began)
    except Exception as error:  # whatever either platform refuses is for the conformance suite to report
        print(f"{program.name}: {type(error).__name__}: {str(error).splitlines()[0][:100] if str(error) else ''}")
        return None
    return Times(program.name, *least)


def main() -> int:
    """Command line; see tools/benchmarks/README.md."""
    arguments = report.parser(__doc__)
    arguments.add_argument("--stride", type=int, default=60, help="each n-th harness only")
    arguments.add_argument("--rounds", type=int, default=3)
    options = arguments.parse_args()
    with tempfile.TemporaryDirectory() as cache:
        os.environ["XDG_CACHE_HOME"] = cache
        jax.config.update("jax_enable_compilation_cache", False)
        jax.config.update("jax_enable_x64", True)
        devices = (jax.devices(options.device)[0], jax.devices("cpu")[0])
        for device in devices:
            jax.jit(lambda x: x + 1)(jax.device_put(np.float32(1), device)).block_until_ready()  # starts the device
        chosen = [*_harnesses(options.stride)]
        times = [found for p in chosen if (found := measure(p, devices, options.rounds)) is not None]
        jax.config.update("jax_enable_x64", False)
        named = (Program("GPT-2 training step", _gpt2), Program("10,000 instructions", _long))
        large = [found for p in named if (found := measure(p, devices, options.rounds)) is not None]
    slow = [t for t in (*times, *large) if t.is_slow]
    rows = [
        report.Row(t.name[:30], "s", FLOOR_SECONDS, t.ours, t.peer, goal=GOAL)
        for t in (*large, *sorted(times, key=lambda t: t.ours, reverse=True)[:_SHOWN])
    ]
    total = report.Row("all harnesses", "s", 0.0, sum(t.ours for t in times), sum(t.peer for t in times), goal=GOAL)
    notes = [f"{len(times)} harnesses; {len(slow)} programs take over 50 ms and over three times the peer's time"]
    notes += [f"slow: {t.name}: {t.ours:.3f} s, {t.peer:.3f} s" for t in slow]
    report.publish("compile_programs", [total, *rows], options.save, notes)
    return int(bool(slow))


if __name__ == "__main__":
    raise SystemExit(main())
