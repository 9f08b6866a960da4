"""chex's own test files, run by pytest on the platform and on JAX's CPU from its source distribution."""

from __future__ import annotations

from pathlib import Path

from tools.conformance.device import of_platform
from tools.conformance.pytest_files import Peer, Side, run_files
from tools.conformance.records import ResultFile


def run(platform: str, out: Path, checkout: Path, *, only: str, resume: bool, timeout: float) -> ResultFile:
    """Records of every test on ``platform``; tests that JAX's CPU fails too are not applicable."""
    results = ResultFile(out, "chex tests", platform, of_platform(platform), resume=resume)
    paths = sorted(checkout.glob("chex/**/*_test.py"))
    peer = Peer("JAX's CPU", _side("cpu")) if platform != "cpu" else None
    return run_files(results, paths, _side(platform), peer, only=only, timeout=timeout)


def _side(platform: str) -> Side:
    return Side({"JAX_PLATFORMS": platform if platform == "cpu" else f"{platform},cpu"})
