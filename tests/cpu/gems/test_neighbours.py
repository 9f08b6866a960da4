"""Beside torch_fl, which has this project's names: the device, Dynamo's backend and torch.distributed's.

A stand-in claims them as torch_fl does. What is decided when torch is imported takes a process for each case.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

# What torch_fl does when it is imported, without its kernels.
STAND_IN = """
import types
import torch
import torch._dynamo
import torch.distributed as dist

if torch._C._get_privateuse1_backend_name() != "privateuseone":
    raise RuntimeError("PrivateUse1 is claimed already")
device = types.ModuleType("torch_fl.flagos")
device.is_available, device.device_count, device.is_theirs = (lambda: True), (lambda: 1), True
device._is_in_bad_fork, device.manual_seed_all = (lambda: False), (lambda seed: None)
class Guard(torch._C._acc.DeviceGuard):
    def type_(self):
        return torch._C._autograd.DeviceType.PrivateUse1

torch._C._acc.register_python_privateuseone_device_guard(Guard())
torch.utils.rename_privateuse1_backend("flagos")
torch._register_device_module("flagos", device)
torch.utils.generate_methods_for_privateuse1_backend()

def theirs(graph, inputs):
    print("compiled by torch_fl")
    return graph.forward

torch._dynamo.register_backend(name="flagos", compiler_fn=theirs)
dist.Backend.register_backend("flagos", lambda *args: None, devices=["privateuseone"])
"""

SUM = "x = torch.arange(6.0); f = lambda t: (t * 2).sum(); "
OURS = "from flagos_backend.torch.compile.backend import flagos; "


def python(code: str, folder: Path, **variables: str) -> tuple[list[str], str]:
    """What a new process prints, line by line, and what it warns of."""
    path = os.pathsep.join([str(folder), *(part for part in sys.path if part)])
    kept = {name: value for name, value in os.environ.items() if name not in ("FLAGOS_PREFER", "FLAGOS_DEVICE")}
    environment = {**kept, "FLAGOS_DEVICE": "cpu", "PYTHONPATH": path, **variables}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=280)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines(), done.stderr


@pytest.fixture
def torch_fl(tmp_path: Path) -> Path:
    (tmp_path / "torch_fl").mkdir()
    (tmp_path / "torch_fl/__init__.py").write_text(STAND_IN)
    return tmp_path


def test_installed_beside_it_this_project_stands_aside(torch_fl: Path) -> None:
    out, warned = python(
        "import torch; print(torch._C._get_privateuse1_backend_name()); import torch_fl; "
        "print(torch.flagos.is_theirs); from flagos_backend.torch.autoload import enable; print(enable()); "
        f"{SUM}print(torch.compile(f, backend='flagos')(x)); {OURS}print(torch.compile(f, backend=flagos)(x)); "
        "from flagos_backend.torch.compile.report import reports; print(len(reports())); "
        "import torch.distributed as dist; print('flagos' in dist.Backend.backend_list); "
        "from flagos_backend.torch.gems import gems\ntry: gems().__enter__()\nexcept RuntimeError as e: print(e)",
        torch_fl,
    )
    assert out[:3] == [
        "privateuseone",
        "True",
        "the extension of device 'flagos' has PyTorch's one place for such devices",
    ]
    assert out[3:8] == ["compiled by torch_fl", "tensor(30.)", "tensor(30.)", "1", "True"]
    assert "FlagGems" in out[8]
    assert "torch.compile(backend=flagos_backend.torch.compile.backend.flagos) works all the same" in warned


def test_where_this_project_was_first(torch_fl: Path) -> None:
    out, _ = python(
        "import torch; print(torch.ones(2, device='flagos').sum().item())\n"
        "try: import torch_fl\nexcept RuntimeError as error: print(error)\n"
        f"{SUM}print(torch.compile(f, backend='flagos')(x.to('flagos')).item(), x.to('flagos').sum().item())",
        torch_fl,
        FLAGOS_TORCH_DEVICE="1",
    )
    assert out == ["2.0", "PrivateUse1 is claimed already", "30.0 15.0"]


# ---- variables, read when torch is imported ----

COUNT = (
    "import torch; from flagos_backend.torch import gems; x = torch.rand(3, 4, device='flagos'); y = x.exp(), x.sin(); "
    "print({name: r.flaggems for name, r in gems.reports().items() if name in ('exp', 'sin')})"
)


def test_the_environment_turns_it_on(tmp_path: Path) -> None:
    variables = {"FLAGOS_GLOBAL_GEMS": "1", "VLLM_FL_FLAGOS_WHITELIST": "exp,rms_norm", "FLAGOS_DEVICE": "simulated"}
    out, warned = python(COUNT, tmp_path, **variables)
    assert out == ["{'exp': 1}"] and not warned, warned


def test_a_wrong_value_does_not_break_the_import(tmp_path: Path) -> None:
    out, warned = python("import torch; print(torch.ones(2).sum().item())", tmp_path, FLAGOS_GLOBAL_GEMS="perhaps")
    assert out == ["2.0"] and len(warned.splitlines()) == 1
    assert "FLAGOS_GLOBAL_GEMS is 'perhaps'; it can be 1 or 0" in warned
