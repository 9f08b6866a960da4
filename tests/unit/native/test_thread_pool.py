"""The threads that native programs share their loops with (native/cpu/thread_pool.h)."""

from __future__ import annotations

import os
import random
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
NATIVE = ROOT / "flagos_backend/native"


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("native") / "thread_pool"
    sources = [Path(__file__).with_name("thread_pool.cc"), NATIVE / "cpu/thread_pool.cc"]
    compiler = os.environ.get("CXX", "c++")
    arguments = ["-std=c++17", "-O1", f"-I{NATIVE}", *map(str, sources), "-o", str(path), "-pthread", "-ldl"]
    subprocess.run([compiler, *arguments], check=True)
    return path


def test_each_element_is_visited_once(program: Path) -> None:
    seed = str(random.randrange(2**31))
    done = subprocess.run([str(program), seed], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout == "0\n", f"seed {seed}"


def test_a_thread_that_is_stuck_beside_the_caller_is_sent_away(program: Path) -> None:
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("this process may run on one processor only")
    done = subprocess.run([str(program), "apart"], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout == "0\n"
