"""The programs and the command by which scaling is measured."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

ROOT = Path(__file__).resolve().parents[3]
sys.path += [str(ROOT / "tools")]

from benchmarks.programs import Scale  # noqa: E402
from benchmarks.scaling.programs import AXIS, Sharded, sharded  # noqa: E402

PROGRAMS = sharded(Scale.HOST)


def results(program: Sharded, platform: str, count: int, arguments: tuple[object, ...]) -> list[np.ndarray]:
    mesh = Mesh(np.array(jax.devices(platform)[:count]), (AXIS,), axis_types=(AxisType.Auto,))
    specs = program.specs(arguments, count)
    places = jax.tree.map(lambda s: NamedSharding(mesh, s), specs, is_leaf=lambda s: isinstance(s, PartitionSpec))
    found = jax.jit(program.step(mesh))(*jax.device_put(arguments, places))
    return [np.asarray(leaf) for leaf in jax.tree.leaves(found)]


@pytest.mark.parametrize("program", PROGRAMS, ids=[program.name for program in PROGRAMS])
def test_devices_compute_what_one_computes(program: Sharded, rng: np.random.Generator) -> None:
    arguments = program.arguments(rng, 4)
    alone = results(program, "cpu", 1, arguments)
    for ours, one in zip(results(program, "flagos", 4, arguments), alone, strict=True):
        assert ours.dtype == one.dtype
        np.testing.assert_allclose(ours, one, rtol=0, atol=1e-4 * np.abs(one).max())


def test_ring_attention_is_attention(rng: np.random.Generator) -> None:
    program = next(p for p in PROGRAMS if p.name.startswith("ring attention"))
    q, k, v = arguments = program.arguments(rng, 4)
    scores = np.einsum("tnh,snh->nts", q.astype(np.float64), k) * q.shape[-1] ** -0.5
    scores = np.where(np.tri(len(q), dtype=bool), scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    expected = np.einsum("nts,snh->tnh", weights / weights.sum(-1, keepdims=True), v)
    (made,) = results(program, "flagos", 4, arguments)
    np.testing.assert_allclose(made, expected, rtol=0, atol=1e-5)


def test_the_command_measures_all_parts() -> None:
    command = [
        str(ROOT / "tools" / "gpu" / "scale"),
        "cpu",
        "--devices",
        "2",
        "--only",
        "experts*",
        "--largest",
        "1024",
    ]
    environment = {name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "JAX_PLATFORMS")}
    # The interpreter of this test, not the system's.
    environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), environment.get("PATH", "")])
    done = subprocess.run([*command, "--seconds", "0.01"], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert next(line for line in lines if line.startswith("collective ")).split() == [
        "collective",
        "flagos",
        "XLA",
        "gloo",
    ]
    row = next(line for line in lines if line.startswith("all-reduce 1024 B")).split()
    assert len(row) == 9
    assert row.count("us") == 3
    assert any(line.startswith("experts 256x64x2 ") and len(line.split()) >= 11 for line in lines)
    assert "FLAGOS-504" in done.stdout or "UNAVAILABLE" in done.stdout
    assert ": never:" not in done.stdout


@pytest.mark.parametrize(
    ("options", "said"),
    [(["--parts", "steps,none"], "no none among"), (["--devices", "1"], "needs two devices or more, not 1")],
)
def test_options_that_measure_nothing(options: list[str], said: str) -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "tools"), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-m", "benchmarks.scale", *options]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode != 0
    assert said in done.stderr
