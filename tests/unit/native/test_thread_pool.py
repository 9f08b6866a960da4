"""The threads that native programs share their loops with (native/cpu/thread_pool.h)."""

from __future__ import annotations

import os
import random
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
NATIVE = ROOT / "flagos_backend/native"


def test_each_element_is_visited_once(tmp_path: Path) -> None:
    program = tmp_path / "thread_pool"
    sources = [Path(__file__).with_name("thread_pool.cc"), NATIVE / "cpu/thread_pool.cc"]
    compiler = os.environ.get("CXX", "c++")
    arguments = ["-std=c++17", "-O1", f"-I{NATIVE}", *map(str, sources), "-o", str(program), "-pthread", "-ldl"]
    subprocess.run([compiler, *arguments], check=True)
    seed = str(random.randrange(2**31))
    done = subprocess.run([str(program), seed], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout == "0\n", f"seed {seed}"
