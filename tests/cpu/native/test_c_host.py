"""Hosts that are not Python: a plain C program, and one whose threads stress every object at once."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

import flagos_backend
from cpu.native.harness import ADD_ONE, add_one, build_host, program

LIBRARY = Path(flagos_backend.__path__[0]) / "lib" / "libflagos_backend.so"


def libpython() -> Path:
    """The interpreter as a library, for a host that has none."""
    name = sysconfig.get_config_var("INSTSONAME")
    for folder in (sysconfig.get_config_var("LIBDIR"), Path(sys.base_prefix) / "lib"):
        if Path(folder, name).is_file() and ".so" in name:
            return Path(folder, name)
    pytest.skip(f"this Python was built without a shared library ({name}), so no other process can load it")


def python_options() -> list[str]:
    site = ":".join(path for path in sys.path if path.endswith("site-packages"))
    return [f"libpython={libpython()}", f"python_site={site}"]


def run_host(*command: object, **environment: str) -> subprocess.CompletedProcess[str]:
    arguments = [str(part) for part in command]
    return subprocess.run(arguments, env=environment, capture_output=True, text=True, timeout=280, check=False)


def test_a_c_host_compiles_and_runs_a_program(tmp_path: Path) -> None:
    host = build_host("host.c", tmp_path / "host")
    (tmp_path / "program").write_bytes(program(ADD_ONE))
    done = run_host(host, LIBRARY, tmp_path / "program", *python_options())
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.endswith("compiled test\nok\n")


def test_a_c_host_without_any_python_is_told_so(tmp_path: Path) -> None:
    host = build_host("host.c", tmp_path / "host")
    (tmp_path / "program").write_bytes(program(ADD_ONE))
    done = run_host(host, LIBRARY, tmp_path / "program", "libpython=/nowhere/libpython3.so")
    assert done.returncode == 1
    assert "code 5: there is no CPython in this process and none could be loaded" in done.stderr
    assert "set the context option 'libpython' or FLAGOS_LIBPYTHON" in done.stderr


@pytest.mark.parametrize(("elements", "iterations"), [(1000, 100), (100_000, 20)])
def test_threads_of_a_c_host_share_everything(tmp_path: Path, elements: int, iterations: int) -> None:
    host = build_host("stress.c", tmp_path / "stress")
    (tmp_path / "program").write_bytes(program(add_one(elements)))
    done = run_host(host, LIBRARY, tmp_path / "program", 8, iterations, elements, *python_options())
    assert (done.returncode, done.stdout, done.stderr) == (0, "ok\n", "")
