"""Conditional nodes with a driver that has them, with an old one, and in wrong places (native/cuda/conditionals.h)."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
NATIVE = ROOT / "flagos_backend/native"


def outcomes(folder: Path, *definitions: str) -> dict[str, str]:
    """What is printed with a driver that is built so."""
    library, program = folder / "libcuda.so.1", folder / "conditionals"
    driver = ROOT / "tests/cpu/replay/driver.c"
    subprocess.run(
        [os.environ.get("CC", "cc"), "-shared", "-fPIC", *definitions, str(driver), "-o", str(library)], check=True
    )
    names = ("cuda/conditionals.cc", "cuda/driver.cc", "error.cc", "log.cc")
    sources = [Path(__file__).with_name("conditionals.cc"), *(NATIVE / name for name in names)]
    include = [f"-I{NATIVE}", f"-I{ROOT / 'plugin_abi/include'}"]
    command = [os.environ.get("CXX", "c++"), "-std=c++17", *include, *map(str, sources), "-o", str(program)]
    subprocess.run([*command, "-pthread", "-ldl"], check=True)
    environment = {**os.environ, "LD_LIBRARY_PATH": str(folder)}
    done = subprocess.run([str(program)], env=environment, capture_output=True, text=True, check=True)
    return dict(line.split(": ", 1) for line in done.stdout.splitlines())


def test_an_old_driver_says_what_it_lacks(tmp_path: Path) -> None:
    assert outcomes(tmp_path, "-DOLD_DRIVER") == {
        "preparing": "the CUDA driver has no cuGraphConditionalHandleCreate, which came with CUDA 12.4"
    }


@pytest.fixture(scope="module")
def of_new_driver(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return outcomes(tmp_path_factory.mktemp("driver"))


@pytest.mark.parametrize("what", ["preparing", "opening", "closing", "giving up"])
def test_what_a_new_driver_does(what: str, of_new_driver: dict[str, str]) -> None:
    assert of_new_driver[what] == "done"


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("outside a capture", "a conditional node is put into what is not captured (status 0)"),
        ("a body on a stream that has one", "capturing the body of a conditional node: the CUDA driver says: "),
        ("closing again", "launching the kernel that sets conditions: the CUDA driver says: "),
    ],
)
def test_what_is_in_the_wrong_place_says_so(what: str, message: str, of_new_driver: dict[str, str]) -> None:
    assert of_new_driver[what].startswith(message)
