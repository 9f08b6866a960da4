"""Where the shares of a launch wait for one another (native/barrier.h)."""

from __future__ import annotations

import os
import random
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
NATIVE = ROOT / "flagos_backend/native"


def test_all_come_or_all_hear_that_one_failed(tmp_path: Path) -> None:
    program = tmp_path / "barrier"
    sources = [Path(__file__).with_name("barrier.cc"), NATIVE / "barrier.cc", NATIVE / "error.cc"]
    include = [f"-I{NATIVE}", f"-I{ROOT / 'plugin_abi/include'}"]
    arguments = ["-std=c++17", "-O1", *include, *map(str, sources), "-o", str(program), "-pthread"]
    subprocess.run([os.environ.get("CXX", "c++"), *arguments], check=True)
    seed = str(random.randrange(2**31))
    done = subprocess.run([str(program), seed], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout == "0 0\n", f"seed {seed}"
