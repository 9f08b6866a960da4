"""The demo: trains a small GPT-2 on flagos and on JAX's own CPU in one process, and shows a manifest being refused.

Run through tools/demo. Exits with 1 if a loss does not fall, the curves part, or the refusal does not happen.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

import gpt2
from demo_report import Training, compare, conclude
from flagos_backend.cli.session import compile_file
from plugin_abi import loader
from plugin_abi.host import Artifact

TOLERANCE = 1e-3
"""Largest difference of the two losses. JAX's CPU against itself, started from parameters that differ in the last bit,
parts by 2e-6 in 100 steps; kernels that sum in another order part a little further."""

FALL = 1.5
"""The loss must fall by this much, in nats per byte; it starts near ln 256 = 5.5."""

REFUSED_PROGRAM = """
import jax, jax.numpy as jnp
print("jax.devices():", jax.devices(), "and it computes: 1 + 1 =", int(jnp.add(1, 1)))
try:
    print("jax.devices('flagos'):", jax.devices("flagos"))
except RuntimeError as error:
    print("jax.devices('flagos'):", error)
"""


def train(device: jax.Device, config: gpt2.Config, start: Any, batches: Sequence[np.ndarray]) -> tuple[Training, str]:
    """Compiles the training step for `device` and takes one step for each batch; also gives the step as StableHLO."""
    _, step = gpt2.training(config)
    state, tokens = jax.device_put(start, device), jax.device_put(batches[0], device)
    lowered = jax.jit(step, donate_argnums=0).lower(state, tokens)
    began = time.perf_counter()
    compiled = lowered.compile()
    compile_time = time.perf_counter() - began
    losses, times = [], []
    for number, batch in enumerate(batches):
        began = time.perf_counter()
        state, loss = compiled(state, jax.device_put(batch, device))
        losses.append(float(loss))
        times.append(time.perf_counter() - began)
        if sys.stderr.isatty():
            print(f"\r  {device.platform}: step {number + 1}, loss {losses[-1]:.3f}", end="", file=sys.stderr)
    if sys.stderr.isatty():
        print("\r\033[K", end="", file=sys.stderr)
    return Training(np.array(losses), compile_time, statistics.median(times[1:])), lowered.as_text()


def show_program(program: str) -> None:
    """Prints what the step became on flagos: `flagos explain`, with lines that begin alike counted together."""
    with tempfile.NamedTemporaryFile("w", suffix=".mlir", encoding="utf-8") as file:
        file.write(program)
        file.flush()
        with compile_file(Path(file.name)) as compiled:
            lines = compiled.executable.artifact(Artifact.EXPLANATION).decode("utf-8").splitlines()
    steps = [line for line in lines[1:] if not line.startswith(" ")]
    kinds = Counter(" ".join(line.split()[:2]) for line in steps)
    examples = [next(line for line in steps if line.startswith(kind)) for kind in kinds]
    print("\n".join(f"  {line.strip()}" for line in lines if line not in steps))
    print(f"  {len(steps)} steps: " + ", ".join(f"{count} {kind}" for kind, count in kinds.most_common()))
    print("\n".join(f"    {example}" for example in examples))


def show_refusal() -> list[str]:
    """Starts JAX with a copy of the manifest that states another compiler; returns what is wrong with the outcome."""
    result = loader.last_result("flagos")
    assert result is not None and result.accepted is not None and result.accepted.manifest is not None
    path = result.accepted.manifest.path
    manifest = json.loads(path.read_text(encoding="utf-8"))
    manifest["library_path"] = str((path.parent / manifest["library_path"]).resolve())
    stated = manifest["built_with"]["compiler"]
    manifest["built_with"]["compiler"] = "gcc 4.8.5"
    print(f"  built_with.compiler changed from {stated!r} to 'gcc 4.8.5'; the library is the same. A new process says:")
    with tempfile.TemporaryDirectory() as folder:
        changed = Path(folder) / path.name
        changed.write_text(json.dumps(manifest), encoding="utf-8")
        environment = os.environ | {"FLAGOS_DRIVER_FILES": str(changed)}
        done = subprocess.run(
            [sys.executable, "-c", REFUSED_PROGRAM], env=environment, capture_output=True, text=True, timeout=120
        )
    said = done.stderr + done.stdout
    print("".join(f"    {line}\n" for line in said.splitlines()), end="")
    problems = []
    if done.returncode != 0:
        problems.append(f"the process with the refused manifest ended with {done.returncode}")
    if "1 + 1 = 2" not in done.stdout:
        problems.append("JAX did not compute beside the refused manifest")
    if "gcc 4.8.5" not in done.stderr or "gcc 4.8.5" not in done.stdout.partition("jax.devices('flagos')")[2]:
        problems.append("warning and error do not name the compiler that the manifest states")
    return problems


def main() -> int:
    """Runs the demo; 1 if anything is not as it should be."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100)
    options = parser.parse_args()
    config = gpt2.Config(layers=4, width=128, context=128, batch=8)
    device, peer = jax.devices("flagos")[0], jax.devices("cpu")[0]
    with jax.default_device(peer):
        start = jax.device_get(jax.jit(gpt2.training(config)[0])())
    batches = gpt2.batches(config, options.steps)
    parameters = sum(leaf.size for leaf in jax.tree.leaves(start.parameters))
    print(
        f"GPT-2, {config.layers} layers, width {config.width}, {parameters} parameters; {options.steps} steps of "
        f"{config.batch} × {config.context} bytes from {len(gpt2.text())} bytes of the standard library's source"
    )
    print(f"jax {jax.__version__}, Python {sys.version.split()[0]}, devices: {device} and {peer}")
    ours, program = train(device, config, start, batches)
    theirs, _ = train(peer, config, start, batches)
    problems = compare(ours, theirs, "JAX CPU", fall=FALL, tolerance=TOLERANCE)
    print("What the training step consists of on flagos (flagos explain):")
    show_program(program)
    print("A manifest that does not match its library:")
    problems += show_refusal()
    return conclude(problems)


if __name__ == "__main__":
    sys.exit(main())
