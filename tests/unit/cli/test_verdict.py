"""What `flagos doctor` concludes from what it found."""

from __future__ import annotations

import subprocess
import sys

import pytest

from flagos_backend.cli import verdict
from flagos_backend.cli.verdict import Reach, Verdict, with_devices, without_backend, without_device
from plugin_abi.errors import Refusal, RefusalCode
from plugin_abi.loader import LoadResult, Warned

JAX = Reach("JAX", "print('jax')")
TORCH = Reach("PyTorch", "print('torch')")


def result(*codes: RefusalCode, warnings: tuple[Warned, ...] = ()) -> LoadResult:
    refusals = tuple(Refusal(code, "fact", "place", "cure") for code in codes)
    return LoadResult("flagos", None, refusals, warnings=warnings)


def test_the_first_refused_manifest_is_looked_at_next() -> None:
    warnings = (Warned("/a b.json", 1110, "line"), Warned("/c.json", 1201, "line"))
    found = without_backend(result(RefusalCode.MANIFEST_INVALID_FIELD, RefusalCode.DISABLED, warnings=warnings), {})
    line = "every backend for flagos that was found is refused, the first with FLAGOS-1110"
    assert found == Verdict(False, line, "flagos check '/a b.json'")


@pytest.mark.parametrize(
    ("codes", "variables", "line", "command"),
    [
        (
            [RefusalCode.DISABLED],
            {"FLAGOS_DRIVERS_DISABLE": "*"},
            "FLAGOS_DRIVERS_DISABLE=* leaves out every backend for flagos",
            "env -u FLAGOS_DRIVERS_DISABLE flagos doctor",
        ),
        (
            [],
            {"FLAGOS_DRIVER_FILES": "/none"},
            "FLAGOS_DRIVER_FILES=/none has no manifest for flagos",
            "env -u FLAGOS_DRIVER_FILES flagos doctor",
        ),
        (
            [],
            {"FLAGOS_DRIVERS_DISABLE": "x"},  # it disabled nothing
            "no backend for flagos is installed; install one, or name its manifest",
            "FLAGOS_DRIVER_FILES=MANIFEST flagos doctor",
        ),
    ],
)
def test_without_a_backend(codes: list[RefusalCode], variables: dict[str, str], line: str, command: str) -> None:
    assert without_backend(result(*codes), variables) == Verdict(False, line, command)


def test_a_driver_that_is_missing_is_named_by_pytorch() -> None:
    found = without_device("NOT_FOUND:\nno driver", {"FLAGOS_DEVICE": "cuda"})
    assert found.line == "the backend gives no device: NOT_FOUND: no driver"
    assert found.command == """python -c "import torch; torch.zeros(1, device='cuda')\""""
    assert without_device("none", {}).command == "FLAGOS_DEBUG=2 flagos devices"
    assert not found.ready


def test_what_a_shell_would_replace_is_quoted() -> None:
    command = without_device("none", {"FLAGOS_DEVICE": "$(echo no)`"}).command
    printed = command.replace("python -c", "printf %s", 1)
    done = subprocess.run(["bash", "-c", printed], capture_output=True, text=True, check=True)
    assert done.stdout == "import torch; torch.zeros(1, device='$(echo no)`')"


def test_ready_names_devices_and_frameworks() -> None:
    found = with_devices(["chip", "chip", "cpu"], [JAX, TORCH])
    assert str(found) == "ready: 2 × chip, cpu, for JAX and PyTorch\nnext: python -c \"print('jax')\""


def test_what_is_unusual_is_said_and_no_obstacle() -> None:
    found = with_devices(["cpu"], [Reach("PyTorch", "pass", note="the accelerator is cuda")], undriven=True)
    assert found.ready
    assert found.line.startswith("cpu, for PyTorch; PyTorch: the accelerator is cuda; this machine seems to have an")


def test_one_obstacle_is_enough() -> None:
    found = with_devices(["cpu"], [JAX, Reach("PyTorch", obstacle="it is off", command="switch it on")])
    assert found == Verdict(False, "PyTorch: it is off", "switch it on")


def test_no_framework_at_all() -> None:
    assert not with_devices(["cpu"], []).ready


def test_settings_that_leave_jax_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verdict, "is_announced", lambda group: True)
    monkeypatch.setattr(verdict, "detect", lambda name: name if name == "jax" else None)
    assert [reach.obstacle for reach in verdict.reaches({"JAX_PLATFORMS": "cpu, tpu"})] == [
        "JAX_PLATFORMS=cpu, tpu leaves flagos out"
    ]
    assert [reach.obstacle for reach in verdict.reaches({"JAX_PLATFORMS": "cpu, flagos"})] == [""]
    monkeypatch.setattr(verdict, "is_announced", lambda group: False)
    assert "not installed" in verdict.reaches({})[0].obstacle


_OFF = """
from flagos_backend.cli import verdict
verdict.is_announced = lambda group: True
verdict.detect = lambda name: name if name == "torch" else None
for variables in ({"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}, {"FLAGOS_TORCH_DEVICE": "0"}, {"FLAGOS_TORCH_DEVICE": "2"}):
    (reach,) = verdict.reaches(variables)
    print(reach.obstacle)
    print(reach.command)
"""


def test_settings_that_leave_pytorch_out() -> None:
    done = subprocess.run([sys.executable, "-c", _OFF], capture_output=True, text=True, timeout=120)
    assert done.stdout.splitlines() == [
        "TORCH_DEVICE_BACKEND_AUTOLOAD=0 keeps it from loading the device",
        "env -u TORCH_DEVICE_BACKEND_AUTOLOAD flagos doctor",
        "FLAGOS_TORCH_DEVICE=0 leaves flagos out",
        "env -u FLAGOS_TORCH_DEVICE flagos doctor",
        "FLAGOS_TORCH_DEVICE is '2'; it can be auto, 0 or 1",
        "env -u FLAGOS_TORCH_DEVICE flagos doctor",
    ]
