"""Our launcher of Triton's kernels beside Triton's own, both over a driver that writes down what it is asked to do."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from flagos_backend.kernels.triton import _cuda, cuda_launcher
from support.seeds import fresh

SUPPORT = Path(__file__).parents[2] / "support/cuda"


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that holds the driver that writes down."""
    folder = tmp_path_factory.mktemp("driver")
    library = folder / "libcuda.so.1"
    flags = ["-shared", "-fPIC", "-Wall", "-Wextra", "-Werror", f"-Wl,-soname,{library.name}"]
    subprocess.run([os.environ.get("CC", "cc"), *flags, "-o", library, SUPPORT / "driver.c"], check=True)
    return folder


def in_a_process(script: str | Path, driver: Path, *arguments: str) -> str:
    """What a process writes that has no other CUDA driver."""
    command = [sys.executable, *([script] if isinstance(script, Path) else ["-c", script]), str(driver), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_launches_are_those_of_triton(driver: Path) -> None:
    """On random signatures and values, with and without clusters, scratch memory, hooks and a context, in grids that
    are empty, and where the driver refuses."""
    seed = int(fresh("test_cuda_launcher").integers(1 << 31))
    report = json.loads(in_a_process(SUPPORT / "launches.py", driver, str(seed)))
    assert len(report["cases"]) == 300
    launched = 0
    for case in report["cases"]:
        assert case["ours"] == case["theirs"], (seed, case["parameters"])
        line = case["ours"]["log"].strip().split("\n")[-1]
        if line.startswith("launch"):
            launched += 1
            assert line.split(" ")[-2 - len(case["expected"]) : -2] == case["expected"], (seed, case["parameters"])
    assert launched > 150


LAUNCHES = """
import ctypes, json, sys
fake = ctypes.CDLL(sys.argv[1] + "/libcuda.so.1", mode=ctypes.RTLD_GLOBAL)
from flagos_backend.kernels.triton import _cuda

class Array:
    def __init__(self, address):
        self.address = address
    def data_ptr(self):
        return self.address

def refuse(metadata):
    raise KeyError("hook")

log = (ctypes.c_char * 4096).in_dll(fake, "fake_log")
results = []
for signature, leading, arguments in [CASES]:
    log.value = b""
    try:
        _cuda.Launcher(signature)(*leading, None, None, (4, 1, 0), "metadata", *arguments)
        became = "launched"
    except Exception as error:
        became = f"{type(error).__name__}: {error}"
    results.append((became, log.value.decode().strip()))
print(json.dumps(results))
"""
LEADING = "(1, 1, 1, 5, 9, False, False)"
#: (signature, what stands before scratch memory, hooks and arguments), what becomes of it, what the driver is asked
CASES = [
    (("('*fp32',)", LEADING, "(None, None, Array(4096))"), "ValueError: Pointer argument (at 0) cannot be", ""),
    (("('i32', '*i8')", LEADING, "(None, None, 1, Array(1 << 61))"), "RuntimeError: Triton Error", ""),
    (("('*fp32',)", LEADING, "(None, None, 1.5)"), "TypeError: Pointer argument must be either uint64 or", ""),
    (("('*fp32',)", LEADING, "(None, None, Array(None))"), "TypeError: data_ptr method of Pointer object must", ""),
    (("('*fp32',)", LEADING, "(None, None, -1)"), "OverflowError", ""),
    (("('*fp32',)", LEADING, "(None, None, Array(-1))"), "OverflowError", ""),
    (("('i32',)", LEADING, "(None, None, 1 << 31)"), "OverflowError", ""),
    (("('i64',)", LEADING, "(None, None, 1 << 63)"), "OverflowError", ""),
    (("('i8',)", LEADING, "(None, None, -1)"), "OverflowError", ""),
    (("('i32',)", LEADING, "(None, None, 1.0)"), "TypeError", ""),
    (("('fp32',)", LEADING, "(None, None, 'text')"), "TypeError", ""),
    (("('fp16',)", LEADING, "(None, None, 65520.0)"), "OverflowError: float too large", ""),
    (("('i32',)", LEADING, "(None, None)"), "TypeError: the signature has 1 arguments", ""),
    (("('i32',)", LEADING, "(None, None, 1, 2)"), "TypeError: the signature has 1 arguments", ""),
    (("(('i32', 'i32'),)", LEADING, "(None, None, (1,))"), "TypeError: the signature has 2 arguments", ""),
    (("(('i32',),)", LEADING, "(None, None, 1)"), "TypeError: no tuple", ""),
    (("('i32',)", "(1, 1, 1, 5)", "(None,)"), "TypeError", ""),
    (("()", "(1 << 31, 1, 1, 5, 9, False, False)", "(None, None)"), "OverflowError", ""),
    # A hook that raises keeps the kernel from running; what the driver refuses is raised.
    (("()", LEADING, "(refuse, None)"), "KeyError: 'hook'", ""),
    (("()", LEADING, "(None, refuse)"), "KeyError: 'hook'", "launch 0x9 grid 1 1 1"),
    (("()", "(1, 1, 1, 0xBAD, 9, False, False)", "(None, None)"), "RuntimeError: Triton Error", "launch 0x9"),
    # Triton's launchers multiply in 32 bits, and launch nothing.
    (("()", "(65536, 65535, 1, 5, 9, False, False)", "(None, None)"), "launched", "launch 0x9 grid 65536 65535 1"),
    (("()", "(65536, -1, 1, 5, 9, False, False)", "(None, None)"), "launched", ""),
]


@pytest.fixture(scope="module")
def outcomes(driver: Path) -> dict[tuple[str, str, str], tuple[str, str]]:
    """What became of the launches of CASES, and what the driver was asked, all of them in one process."""
    texts = ", ".join(f"({', '.join(case)})" for case, _, _ in CASES)
    results = json.loads(in_a_process(LAUNCHES.replace("CASES", texts), driver))
    return {case: tuple(result) for (case, _, _), result in zip(CASES, results, strict=True)}


@pytest.mark.parametrize(("case", "became", "asked"), CASES, ids=lambda value: value if isinstance(value, str) else "")
def test_what_does_not_fit_is_not_launched(
    outcomes: dict[tuple[str, str, str], tuple[str, str]], case: tuple[str, str, str], became: str, asked: str
) -> None:
    found, log = outcomes[case]
    assert found.startswith(became)
    assert log.startswith(asked)
    assert bool(log) == bool(asked)


@pytest.mark.parametrize("kind", ["nvTmaDesc", "tensordesc<fp16[16, 16]>", "i24", ""])
def test_other_types_are_refused(kind: str) -> None:
    with pytest.raises(ValueError, match="no launch with an argument of type"):
        _cuda.Launcher(("i32", (kind,)))


@pytest.mark.parametrize("signature", [["i32"], (1,), ("i32", None), "i32"])
def test_a_signature_is_a_tuple_of_names(signature: object) -> None:
    with pytest.raises(TypeError):
        _cuda.Launcher(signature)  # type: ignore[arg-type]


MADE: list[Any] = []


def module_of(text: str) -> ModuleType:
    """A driver module that writes ``text`` as every launcher."""

    class CudaLauncher:
        def __init__(self, src: Any, metadata: Any) -> None:
            MADE.append(src)

    module = ModuleType("driver")
    module.make_launcher = lambda constants, signature, tensordesc_meta: text  # type: ignore[attr-defined]
    module.CudaLauncher = CudaLauncher  # type: ignore[attr-defined]
    return module


METADATA = SimpleNamespace(
    num_ctas=2,
    global_scratch_size=3,
    global_scratch_align=4,
    profile_scratch_size=5,
    profile_scratch_align=6,
    launch_cooperative_grid=True,
    launch_pdl=False,
)


def test_only_what_was_compared_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    module = module_of("other")
    original = module.CudaLauncher.__init__
    assert "none that ours was compared with" in cuda_launcher.install(module)
    assert module.CudaLauncher.__init__ is original
    assert "one launcher for all" in cuda_launcher.install(ModuleType("driver"))


def test_an_instance_has_our_launcher_and_what_triton_reads_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    module = module_of("same")
    monkeypatch.setattr(cuda_launcher, "_VERIFIED", frozenset({cuda_launcher.fingerprint(module)}))
    assert cuda_launcher.install(module) == cuda_launcher.install(module) == ""
    MADE.clear()
    made = module.CudaLauncher(SimpleNamespace(signature={"x": "*fp32", "n": "i32"}), METADATA)
    assert not MADE
    assert isinstance(made.launch, _cuda.Launcher)
    assert {name: getattr(made, name) for name in vars(METADATA)} == vars(METADATA)
    descriptor = SimpleNamespace(signature={"x": "tensordesc<fp32[16, 16]>"})
    assert not hasattr(module.CudaLauncher(descriptor, METADATA), "launch")
    (made_by_triton,) = MADE
    assert made_by_triton is descriptor
