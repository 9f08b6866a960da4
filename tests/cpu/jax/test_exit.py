"""Processes that end: the device computes in every handler, of whatever order, and what is in flight ends."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tools import exits

ORDER = """
import atexit, threading, weakref

class Kept: pass
class Held:
    def __call__(self): pass
    def __del__(self): show("let go of by atexit")

def show(when):
    print(when, float(known(x)), float(jax.jit(lambda v: jnp.tan(v).sum())(x)))

atexit.register(lambda: show("before jax"))
kept = Kept()
weakref.finalize(kept, lambda: show("weakref"))
import jax
import jax.numpy as jnp
known = jax.jit(lambda v: jnp.sin(v).sum())
atexit.register(lambda: show("before the device"))
threading._register_atexit(lambda: show("threading, before the device"))
x = jnp.arange(4.0) + 0
known(x).block_until_ready()
threading._register_atexit(lambda: show("threading"))
atexit.register(lambda: show("after the device"))
atexit.register(Held())
print(x.devices())
{then}
"""
#: Python ends while a daemon thread's first program has JAX look for its devices.
LOOKING = """
import threading, time
import jax
from flagos_backend.frontends.jax import registration

looking, register = threading.Event(), registration.register

def slow():
    looking.set()
    time.sleep(0.5)
    register()
    print("registered")

registration.register = slow
threading.Thread(target=lambda: jax.jit(lambda x: x + 1)(1.0), daemon=True).start()
looking.wait()
"""
PARTS = 6  # each in the time that a test may take
HANDLERS = ["after the device", "before the device", "weakref", "before jax", "let go of by atexit"]
THREADS = ["threading", "threading, before the device"]
AGAIN = 'atexit._run_exitfuncs(); show("living"); atexit.register(lambda: show("registered again"))'


def _output(arguments: list[str]) -> str:
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "flagos,cpu",
        "FLAGOS_NUM_CPU_DEVICES": "2",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    done = subprocess.run(
        [sys.executable, "-P", "-W", "ignore", *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
    return done.stdout


def _orders(then: str) -> list[str]:
    lines = _output(["-c", ORDER.format(then=then)]).splitlines()
    assert "Flagos" in lines[0]
    assert {line.split(" 1.89188")[1][-22:] for line in lines[1:]} == {lines[1].split(" 1.89188")[1][-22:]}
    return [line.split(" 1.89188")[0] for line in lines[1:]]


def test_every_handler_computes_whatever_the_order() -> None:
    assert _orders("") == THREADS + HANDLERS


def test_the_device_outlives_a_run_of_the_handlers() -> None:
    assert _orders(AGAIN) == [*HANDLERS, "living", *THREADS, "registered again"]


def test_the_end_waits_for_a_look_for_devices() -> None:
    assert _output(["-c", LOOKING]) == "registered\n"


@pytest.mark.parametrize("part", range(PARTS))
def test_a_process_ends_with_work_in_flight(part: int) -> None:
    kinds = [kind for kind in exits.endings(flagos=True) if kind not in exits.OF_PYTORCH][part::PARTS]
    assert _output(["-m", "tools.exits", "--kinds", *kinds]).splitlines()[-1] == f"{len(kinds)} exits, 0 bad"
