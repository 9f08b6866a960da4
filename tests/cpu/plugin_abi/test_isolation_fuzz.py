"""No message, ring or frame of the other side harms an end of an isolated backend's channels, or a decoder."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import numpy as np
import pytest

import plugin_abi

SOURCE = Path(__file__).parent / "fixtures" / "isolation_fuzz.cc"
ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "plugin_abi" / "isolation"
SOURCES = [
    *(FOLDER / f"{name}.cc" for name in ("channel", "frames", "segment", "wire")),
    FOLDER / "../pjrt/src/proto.cc",
]
INCLUDE = Path(plugin_abi.__file__).parent / "include"
FLAGS = ["-std=c++17", "-D_GNU_SOURCE", "-g1", "-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
#: A million takes a minute and a half: `isolation_fuzz SEED 1000000`.
MESSAGES = 20_000


@pytest.fixture(scope="module")
def fuzz(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fuzz")
    compiler = os.environ.get("CXX", "c++")
    (folder / "empty.cc").write_text("int main() { return 0; }\n")
    command = [compiler, *FLAGS, str(folder / "empty.cc"), "-o", str(folder / "empty")]
    tried = subprocess.run(command, capture_output=True, text=True, check=False)
    if tried.returncode != 0:
        pytest.skip(f"{compiler} builds nothing with AddressSanitizer and UBSan: {tried.stderr[-300:]}")
    built = folder / "isolation_fuzz"
    folders = [f"-I{FOLDER}", f"-I{INCLUDE}"]
    sources = [str(source) for source in (SOURCE, *SOURCES)]
    subprocess.run([compiler, *FLAGS, *folders, *sources, "-pthread", "-o", str(built)], check=True)
    return built


def test_spoiled_messages_are_messages_or_none(fuzz: Path, rng: np.random.Generator) -> None:
    seed = int(rng.integers(2**63))
    done = subprocess.run(
        [str(fuzz), str(seed), str(MESSAGES)], capture_output=True, text=True, check=False, timeout=250
    )
    assert done.returncode == 0, (seed, done.stderr[-3000:])
    counted = {name: int(number) for name, number in re.findall(r"(\w+) (\d+)", done.stdout)}
    assert counted["messages"] == MESSAGES
    assert min(counted["channels"], counted["arrived"], counted["decoded"]) > MESSAGES // 100
