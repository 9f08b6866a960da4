"""TransformerEngine's own tests of its operation fuser against our fusible operations, from a checkout of the caller's.

The checkout is not changed, and TransformerEngine is not imported: transformer_engine_shim.py stands in for it.
"""

from __future__ import annotations

from pathlib import Path

from tools.conformance.device import of_tensors
from tools.conformance.pytest_files import Side, run_files
from tools.conformance.records import ResultFile

#: Variable of a run: the type of device that the tests' tensors are on.
DEVICE = "FLAGOS_CONFORMANCE_DEVICE"
_FILES = ("tests/pytorch/test_fusible_ops.py",)


def run(out: Path, checkout: Path, device: str, *, only: str, resume: bool, timeout: float) -> ResultFile:
    """Records of the tests on tensors of `device`. Raises FileNotFoundError where the checkout has none."""
    paths = [checkout.resolve() / name for name in _FILES]
    if missing := [str(path) for path in paths if not path.is_file()]:
        raise FileNotFoundError(f"{checkout} is no checkout of TransformerEngine: it has no {', '.join(missing)}")
    results = ResultFile(
        out, "transformer engine", "flagos", of_tensors(device), peer="plain PyTorch in float64", resume=resume
    )
    side = Side({DEVICE: device}, ["-p", "tools.conformance.transformer_engine_shim", "--noconftest"])
    return run_files(results, paths, side, None, only=only, timeout=timeout)
