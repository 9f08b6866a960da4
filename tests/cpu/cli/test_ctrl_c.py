"""Ctrl-C at random moments of compiles: KeyboardInterrupt, nothing left behind, and the device works afterwards."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from support import seeds

ROUNDS = 5

# A child's SIGINT is Python's own, also where this process ignores it, as what a shell starts in the background does.
SCRIPT = """
import os, random, signal, sys, threading, time
from pathlib import Path
import jax, jax.numpy as jnp, numpy as np
from flagos_backend.cli.program_file import Form, program_of
from flagos_backend.cli.session import open_context
from plugin_abi.host import Executable

signal.signal(signal.SIGINT, signal.default_int_handler)
seed, rounds = map(int, sys.argv[1:])
random.seed(seed)
device = jax.devices("flagos")[0]
x = jax.device_put(np.arange(64, dtype=np.float32).reshape(8, 8) / 64, device)

def lowered(number):
    "A program that no other number has."
    def long(x):
        for i in range(60):
            x = jnp.sin(x) * (i + number) + jnp.roll(x, i) if i % 3 else (x @ x) / x.sum()
        return x
    return jax.jit(long).lower(x)

def interrupted(compile_it, after):
    timer = threading.Timer(after, os.kill, (os.getpid(), signal.SIGINT))
    try:
        try:
            timer.start()
            compile_it()
        finally:
            timer.cancel()
            timer.join()
    except KeyboardInterrupt:
        return True
    return False

def works():
    "As it did before; a program of its own each time."
    n = random.random()
    found = np.asarray(jax.jit(lambda x: jnp.cumsum(x @ x + n, 0))(x))
    np.testing.assert_allclose(found, np.cumsum(np.asarray(x) @ np.asarray(x) + n, 0), rtol=1e-5)

def seconds_of(compile_it):
    began = time.perf_counter()
    compile_it()
    return time.perf_counter() - began

def client_compile(context, number):
    serialized = program_of(lowered(number).as_text().encode(), Form.MLIR, "long")
    return lambda: Executable.compile(context, serialized).close()

works()
lowered(-1).compile()  # imports what compiling needs
jax_takes = seconds_of(lowered(-2).compile)
came = {"jax": 0, "client": 0}
with open_context() as context:
    client_takes = seconds_of(client_compile(context, -3))
    number = 0
    # A compile may be over before the signal comes, but not ever.
    while number < rounds or (min(came.values()) == 0 and number < 20 * rounds):
        came["jax"] += interrupted(lowered(number).compile, random.uniform(0, jax_takes))
        works()
        came["client"] += interrupted(client_compile(context, number), random.uniform(0, client_takes))
        works()
        number += 1
left = [thread.name for thread in threading.enumerate() if thread.name.startswith("flagos-")]
children = "".join(task.read_text() for task in Path("/proc/self/task").glob("*/children"))
files = [str(path) for path in Path(os.environ["XDG_CACHE_HOME"]).rglob("*.tmp")]
print(came["jax"], came["client"], "left:", left, children, files)
"""


def test_a_compile_ends_and_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    environment = os.environ | {
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
        "JAX_PLATFORMS": "flagos,cpu",
        "JAX_ENABLE_COMPILATION_CACHE": "0",
    }
    seed = seeds.fresh("ctrl c").integers(1 << 32)
    command = [sys.executable, "-X", "faulthandler", str(path), str(seed), str(ROUNDS)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    of_jax, of_client, left = done.stdout.split(maxsplit=2)
    assert left.split() == ["left:", "[]", "[]"], done.stdout
    assert int(of_jax) > 0 and int(of_client) > 0
    assert "defect of flagos" not in done.stderr
