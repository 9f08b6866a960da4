"""PyTorch's own test files, run by pytest on the device flagos and on the CPU from a checkout that the caller gives."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from tools.conformance.device import of_flagos
from tools.conformance.pytest_files import OFFSET, STRIDE, Peer, Side, run_files
from tools.conformance.records import ResultFile

# Files whose tests PyTorch instantiates for whatever device is registered.
FILES = (
    "test_view_ops.py",
    "test_shape_ops.py",
    "test_indexing.py",
    "test_sort_and_select.py",
    "test_type_promotion.py",
    "test_modules.py",
    "test_ops.py",
)
_PEER = "PyTorch's CPU"


def run(
    out: Path,
    checkout: Path,
    files: list[str] | None,
    *,
    only: str,
    stride: int,
    offset: int,
    resume: bool,
    timeout: float,
) -> ResultFile:
    """Records of each ``stride``-th test of ``files`` on the device flagos, from number ``offset`` on; tests that
    PyTorch's CPU does not pass are not applicable."""
    results = ResultFile(out, "torch tests", "flagos", of_flagos(), peer=_PEER, resume=resume)
    paths = [checkout / "test" / name for name in files or FILES]
    peer = Peer(_PEER, _side("cpu"), _name_on_cpu)
    ours = _side("privateuse1")
    ours = replace(ours, environment={**ours.environment, STRIDE: str(stride), OFFSET: str(offset)})
    return run_files(results, paths, ours, peer, only=only, timeout=timeout)


def _side(device_type: str) -> Side:
    # The checkout's conftest.py is about PyTorch's own CI.
    return Side({"PYTORCH_TESTING_DEVICE_ONLY_FOR": device_type}, ["--noconftest"])


def _name_on_cpu(name: str) -> str:
    """The same test on the CPU. PyTorch names the class after the device, or after its type before it has a name."""
    return re.sub("(PRIVATEUSE1|FLAGOS)::", "CPU::", name).replace("_flagos", "_cpu")
