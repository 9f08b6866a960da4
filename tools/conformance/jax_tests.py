"""JAX's own test files, run by pytest on the platform and on JAX's CPU from a checkout that the caller gives."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest

from tools.conformance.results import Record, ResultFile, Status

# What is not about another vendor's hardware or a build system.
FILES = (
    "api_test.py",
    "array_test.py",
    "core_test.py",
    "custom_api_test.py",
    "debugging_primitives_test.py",
    "dtypes_test.py",
    "export_test.py",
    "fft_test.py",
    "ffi_test.py",
    "image_test.py",
    "jax_jit_test.py",
    "lax_autodiff_test.py",
    "lax_control_flow_test.py",
    "lax_numpy_einsum_test.py",
    "lax_numpy_indexing_test.py",
    "lax_numpy_operators_test.py",
    "lax_numpy_reducers_test.py",
    "lax_numpy_setops_test.py",
    "lax_numpy_test.py",
    "lax_numpy_ufuncs_test.py",
    "lax_numpy_vectorize_test.py",
    "lax_scipy_sparse_test.py",
    "lax_scipy_special_functions_test.py",
    "lax_scipy_test.py",
    "lax_test.py",
    "lax_vmap_op_test.py",
    "lax_vmap_test.py",
    "linalg_test.py",
    "lobpcg_test.py",
    "memories_test.py",
    "nn_test.py",
    "ode_test.py",
    "optimizers_test.py",
    "pjit_test.py",
    "python_callback_test.py",
    "random_lax_test.py",
    "random_test.py",
    "scipy_fft_test.py",
    "scipy_interpolate_test.py",
    "scipy_ndimage_test.py",
    "scipy_optimize_test.py",
    "scipy_signal_test.py",
    "scipy_spatial_test.py",
    "scipy_stats_test.py",
    "shard_map_test.py",
    "sparse_bcoo_bcsr_test.py",
    "sparse_test.py",
    "stax_test.py",
)
_MAX_RESTARTS = 50
_REGULAR_ENDS = (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.NO_TESTS_COLLECTED)


def run(
    platform: str, out: Path, checkout: Path, files: list[str] | None, *, only: str, resume: bool, timeout: float
) -> ResultFile:
    """Records of ``files`` on ``platform``; tests that JAX's CPU fails too are not applicable."""
    results = ResultFile(out, "jax tests", platform, resume=resume)
    for name in files or [f for f in FILES if (checkout / "tests" / f).exists()]:
        done = {r.name for r in results.records.values() if r.group == name}
        if done:
            continue
        print(name, file=sys.stderr, flush=True)
        path = checkout / "tests" / name
        records = _run_file(path, platform, only, timeout)
        failed = [r.name for r in records.values() if r.counts and r.status is not Status.PASSED]
        peer = _run_file(path, "cpu", only, timeout, failed) if failed and platform != "cpu" else {}
        for test, record in records.items():
            other = peer.get(test)
            if other is not None and other.status is not Status.PASSED:
                record = Record(test, name, Status.NOT_APPLICABLE, f"JAX's CPU, {other.status}: {other.message}"[:500])
            results.add(record)
    return results


def _run_file(
    path: Path, platform: str, only: str, timeout: float, chosen: Sequence[str] | None = None
) -> dict[str, Record]:
    """Runs one file, or what is ``chosen`` of it; after a crash or a hang again without the tests that were seen."""
    records: dict[str, Record] = {}
    with tempfile.TemporaryDirectory() as folder:
        if chosen is not None:
            (Path(folder) / "chosen").write_text("\n".join(chosen))
        log = Path(folder) / "log"
        for _ in range(_MAX_RESTARTS):
            log.write_text("")
            (Path(folder) / "seen").write_text("\n".join(records))
            process = _start(path, platform, only, timeout, folder)
            code, hung = _wait(process, log, timeout)
            current = None
            for line in log.read_text().splitlines():
                entry = json.loads(line)
                if "status" in entry:
                    records[entry["name"]] = Record(group=path.name, **{**entry, "status": Status(entry["status"])})
                    current = None
                else:
                    current = entry["name"]
            if code in _REGULAR_ENDS:
                break
            status = Status.HUNG if hung else Status.CRASHED
            name = current or f"{path.name}::between tests"
            records[name] = Record(name, path.name, status, f"pytest ended with {code}")
            if current is None and code > 0:  # it did not come to the tests: an import failed
                break
    return records


def _start(path: Path, platform: str, only: str, timeout: float, folder: str) -> subprocess.Popen[bytes]:
    platforms = platform if platform == "cpu" else f"{platform},cpu"
    environment = {
        **os.environ,
        "JAX_PLATFORMS": platforms,
        "JAX_NUM_GENERATED_CASES": os.environ.get("JAX_NUM_GENERATED_CASES", "10"),
        "JAX_SKIP_SLOW_TESTS": "true",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
        "FLAGOS_NUM_CPU_DEVICES": "8",
        "FLAGOS_CONFORMANCE_FOLDER": folder,
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]),
    }
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tools.conformance.pytest_log"]
    command += ["-p", "no:cacheprovider", "-o", "addopts=", f"--rootdir={path.parent}", str(path)]
    command += ["-k", only] if only else []
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )


def _wait(process: subprocess.Popen[bytes], log: Path, timeout: float) -> tuple[int, bool]:
    """The exit code, and whether the process was ended because its log did not grow for ``timeout`` seconds."""
    size = -1
    while True:
        try:
            return process.wait(timeout), False
        except subprocess.TimeoutExpired:
            grown = log.stat().st_size
            if grown == size:
                os.killpg(process.pid, signal.SIGKILL)
                return process.wait(), True
            size = grown
