"""The subcommands that use a device, on the host CPU."""

import os
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from flagos_backend.cli import verdict
from flagos_backend.cli.main import main
from flagos_backend.cli.running import random_bytes
from flagos_backend.importer import schema
from flagos_backend.ir.types import ArrayShape, ElementType
from programs import hlo_bytes


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """tanh(x @ y) summed over the rows."""
    path = tmp_path_factory.mktemp("programs") / "dense.hlo"
    operand = np.ones((16, 16), np.float32)
    path.write_bytes(hlo_bytes(lambda x, y: jnp.tanh(x @ y).sum(0), operand, operand))
    return path


def output_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(arguments) == 0
    return capsys.readouterr().out


@pytest.fixture
def announced(monkeypatch: pytest.MonkeyPatch) -> None:
    """As an installed package is; the source tree alone announces nothing to the frameworks."""
    monkeypatch.setattr(verdict, "is_announced", lambda group: True)


@pytest.mark.usefixtures("announced")
def test_doctor_finds_the_device(capsys: pytest.CaptureFixture[str]) -> None:
    out = output_of(capsys, "doctor")
    assert "50_flagos.json: accepted, for the platform flagos" in out
    assert "ABI 1.0 negotiated" in out
    assert ": cpu, process 0, memories: " in out
    judged, following = out.splitlines()[-2:]
    assert judged.startswith("ready: ") and judged.partition(";")[0].endswith("cpu, for JAX and PyTorch")
    assert following.startswith('next: python -c "import jax; ')


@pytest.mark.usefixtures("announced")
def test_doctor_with_the_autoload_off(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(verdict.AUTOLOAD_VARIABLE, "0")
    assert main(["doctor"]) == 1
    assert capsys.readouterr().out.splitlines()[-2:] == [
        "not ready: PyTorch: TORCH_DEVICE_BACKEND_AUTOLOAD=0 keeps it from loading the device",
        "next: env -u TORCH_DEVICE_BACKEND_AUTOLOAD flagos doctor",
    ]


@pytest.mark.parametrize("trial", [verdict.TRY_JAX, verdict.TRY_TORCH_COMPILE, verdict.TRY_TORCH])
def test_what_doctor_says_to_run_next_runs(trial: str) -> None:
    # The source tree announces no entry points, so what they lead to is called here.
    announce = (
        "import flagos_backend.jax as j, jax; j.initialize()"
        if "jax" in trial
        else "import flagos_backend.torch.compile.backend, flagos_backend.torch.autoload as a; assert a.enable() == ''"
    )
    done = subprocess.run([sys.executable, "-c", f"{announce}\n{trial}"], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(("2.0", "tensor([2., 2.], device='flagos:0')", "tensor([0.8415, 0.8415])"))


def test_doctor_where_the_driver_is_missing() -> None:
    program = "import sys; from flagos_backend.cli.main import main; sys.exit(main(['doctor']))"
    environment = {**os.environ, "FLAGOS_DEVICE": "gcu"}  # of a package that is not installed
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1
    judged, following = done.stdout.splitlines()[-2:]
    assert judged.startswith("not ready: the backend gives no device: NOT_FOUND: FLAGOS_DEVICE names 'gcu'")
    assert following == """next: python -c "import torch; torch.zeros(1, device='gcu')\""""
    assert "Traceback" not in done.stderr


def test_devices_lists_one(capsys: pytest.CaptureFixture[str]) -> None:
    out = output_of(capsys, "devices")
    assert out.count(": cpu, process 0") == 1
    assert "bytes in use" in out


def test_explain_names_the_operations(program: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = output_of(capsys, "explain", str(program), "--steps")
    for opcode in ("dot", "tanh", "reduce"):
        assert opcode in out


def test_explain_says_what_becomes_of_16_bits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "halves.hlo"
    path.write_bytes(hlo_bytes(lambda x: jnp.exp(x) * x, np.ones(8, jnp.bfloat16)))
    assert "16-bit results are rounded one by one" in output_of(capsys, "explain", str(path), "--steps")
    monkeypatch.setenv("FLAGOS_EXCESS_PRECISION", "1")
    assert "16-bit results keep float32's digits within a kernel" in output_of(capsys, "explain", str(path), "--steps")


def test_compile_describes_the_interface(program: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = output_of(capsys, "compile", str(program))
    assert "2 arguments (0 may be donated), 1 outputs: f32[16]" in out
    assert "arguments 2048, outputs 64" in out


def test_compile_keeps_what_is_asked_for(program: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    optimized, serialized = tmp_path / "optimized", tmp_path / "serialized"
    output_of(capsys, "compile", str(program), "--optimized", str(optimized), "--serialized", str(serialized))
    assert schema.Program.FromString(optimized.read_bytes()).module.computations
    assert serialized.stat().st_size > 0
    assert "dot" in output_of(capsys, "explain", str(optimized))


def test_compile_into_no_folder_says_so(program: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compile", str(program), "--optimized", str(tmp_path / "absent" / "f")]) == 1
    assert "cannot be written (No such file or directory)" in capsys.readouterr().err


def test_bench_times_each_part(program: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = output_of(capsys, "bench", str(program), "--rounds", "3")
    assert [line.split()[0] for line in out.splitlines()] == ["compile", "again", "first", "launch", "run"]


def test_bench_of_no_rounds(program: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", str(program), "--rounds", "0"]) == 1
    assert "at least one round" in capsys.readouterr().err


def test_a_program_that_is_not_supported_is_refused_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    module = schema.HloModuleProto.FromString(hlo_bytes(jnp.sin, 1.0))
    for instruction in module.computations[0].instructions:
        if instruction.opcode == "sine":
            instruction.opcode = "no-such-opcode"
    path = tmp_path / "unknown.hlo"
    path.write_bytes(module.SerializeToString())
    assert main(["explain", str(path)]) == 1
    error = capsys.readouterr().err
    assert "no-such-opcode" in error
    assert "Traceback" not in error


@pytest.mark.parametrize("kind", [kind for kind in ElementType if kind is not ElementType.TOKEN])
def test_random_arguments_fill_their_shape(kind: ElementType, rng: np.random.Generator) -> None:
    data = random_bytes(ArrayShape(kind, (3, 5)), rng)
    assert len(data) == 15 * kind.bytes
    assert len(set(data)) > 1


def test_random_floats_are_finite_and_integers_are_indices(rng: np.random.Generator) -> None:
    floats = np.frombuffer(random_bytes(ArrayShape(ElementType.F32, (1000,)), rng), np.float32)
    assert np.all(np.abs(floats) <= 1) and floats.std() > 0.5
    upper_half = np.frombuffer(random_bytes(ArrayShape(ElementType.BF16, (1000,)), rng), np.uint16).astype(np.uint32)
    assert np.all(np.abs((upper_half << 16).view(np.float32)) <= 1)
    integers = np.frombuffer(random_bytes(ArrayShape(ElementType.S64, (1000,)), rng), np.int64)
    assert set(integers) == {0, 1}
