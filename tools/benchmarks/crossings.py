"""How often a program goes from folder to folder while it is compiled: calls between packages of the compiler, counted
by Python's profiler.

    python -m tools.benchmarks.crossings [--checkout FOLDER] [--save]

``--checkout`` counts in another revision's tree, so that both see the same bytes. Nothing is launched: the library need
not be built.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).resolve().parents[2]
_RESULT = _ROOT / "tools" / "benchmarks" / "results" / "crossings.txt"
# Run in the revision that is counted, whose compiler may stand in another folder: prints how often functions of one
# folder called those of another.
_COUNT = """
import cProfile, json, pathlib, pstats, sys
package = pathlib.Path(sys.argv[1]) / "flagos_backend"
try:
    from flagos_backend.compile.compiler import compile_program
except ModuleNotFoundError:
    from flagos_backend.runtime.compiler import compile_program
def folder(file):
    path = pathlib.Path(file)
    return path.relative_to(package).parts[0] if path.is_relative_to(package) else None
found = []
for name in sys.argv[2:]:
    source = pathlib.Path(name).read_bytes()
    compile_program(source, "crossings", False)  # what is imported at its first use
    profile = cProfile.Profile()
    profile.runcall(compile_program, source, "crossings", False)
    counts = {}
    for (file, _, _), row in pstats.Stats(profile).stats.items():
        for (caller, _, _), calls in row[4].items():
            pair = folder(caller), folder(file)
            if None not in pair and pair[0] != pair[1]:
                key = " ".join(pair)
                counts[key] = counts.get(key, 0) + calls[0]
    found.append(counts)
print(json.dumps(found))
"""


@dataclass(frozen=True)
class Crossings:
    """``folders``: those that take part. ``pairs``: in which one calls the other. ``mutual``: of these, the pairs in
    which both call, so that a program comes back. ``calls``: of all of them."""

    folders: int
    pairs: int
    mutual: int
    calls: int

    @classmethod
    def of(cls, counts: Mapping[str, int]) -> Crossings:
        calls: Counter[tuple[str, str]] = Counter()
        for pair, count in counts.items():
            caller, called = pair.split()
            calls[caller, called] += count
        mutual = sum((called, caller) in calls for caller, called in calls) // 2
        return cls(len({folder for pair in calls for folder in pair}), len(calls), mutual, calls.total())


def program_sources() -> dict[str, bytes]:
    """Serialized flagos.Program of a training step, attention and a loop."""
    import jax
    import jax.numpy as jnp
    from jaxlib import _jax

    from flagos_backend.importer import schema

    def step(w: Any, x: Any, y: Any) -> Any:
        loss, gradient = jax.value_and_grad(lambda w: jnp.mean((jax.nn.gelu(x @ w[0]) @ w[1] - y) ** 2))(w)
        return [a - 0.1 * g for a, g in zip(w, gradient, strict=True)], loss

    def attention(q: Any, k: Any, v: Any) -> Any:
        return jax.nn.softmax(q @ k.swapaxes(-1, -2) / 8, -1) @ v

    def loop(x: Any) -> Any:
        return jax.lax.fori_loop(0, 9, lambda _, v: jnp.tanh(v) / v.sum(-1, keepdims=True), x)

    def f32(*dims: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(dims, jnp.float32)

    programs: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
        "training step": (step, ([f32(64, 256), f32(256, 32)], f32(128, 64), f32(128, 32))),
        "attention": (attention, (f32(2, 4, 128, 64),) * 3),
        "loop": (loop, (f32(64, 64),)),
    }
    found = {}
    for name, (function, arguments) in programs.items():
        bytecode = io.BytesIO()
        lowered = jax.jit(function).trace(*arguments).lower(lowering_platforms=("generic",))
        lowered.compiler_ir("stablehlo").operation.write_bytecode(bytecode)
        computation = _jax.mlir.mlir_module_to_xla_computation(
            bytecode.getvalue(), use_tuple_args=False, return_tuple=False
        )
        program = schema.Program(schema_version=1)
        program.module.ParseFromString(computation.as_serialized_hlo_module_proto())
        found[name] = program.SerializeToString()
    return found


def count(sources: Mapping[str, bytes], checkout: Path) -> dict[str, Crossings]:
    """By the name of each program."""
    with tempfile.TemporaryDirectory() as folder:
        files = []
        for number, source in enumerate(sources.values()):
            files.append(Path(folder) / str(number))
            files[-1].write_bytes(source)
        command = [sys.executable, "-c", _COUNT, str(checkout), *map(str, files)]
        environment = os.environ | {"PYTHONPATH": str(checkout)}
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment, cwd=folder)
    return {name: Crossings.of(found) for name, found in zip(sources, json.loads(done.stdout), strict=True)}


def report(found: Mapping[str, Crossings]) -> str:
    lines = [f"{'program':16}{'folders':>9}{'pairs':>7}{'mutual':>8}{'calls':>9}"]
    lines += [f"{name:16}{c.folders:9}{c.pairs:7}{c.mutual:8}{c.calls:9}" for name, c in found.items()]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkout", type=Path, default=_ROOT)
    parser.add_argument("--save", action="store_true", help=f"append to {_RESULT.name}")
    options = parser.parse_args()
    checkout = options.checkout.resolve()
    command = ["git", "-C", str(checkout), "describe", "--always", "--dirty"]
    revision = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    text = f"{revision}\n{report(count(program_sources(), checkout))}\n"
    print(text)
    if options.save:
        with _RESULT.open("a", encoding="utf-8") as file:
            file.write(f"{text}\n")


if __name__ == "__main__":
    main()
