"""Runs every folder of tests that needs no accelerator: a pytest process each, some at once. Called by tools/test.

    python tools/run_tests.py [--quick] PYTEST_OPTION...

``--quick`` runs the files of QUICK alone. The options go to each process. What a process writes is shown when it ends,
and the last lines of all in the end. The exit status is 1 if one failed.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
#: Processes at once. Each takes one processor most of the time, and up to 2 GB.
WORKERS = min(os.cpu_count() or 1, 4)
#: These take minutes each, so they begin first, the longest before the others: no processor waits for one in the end.
LONG = (
    "tests/cpu/torch_compile",
    "tests/cpu/jax",
    "tests/cpu/kernels",
    "tests/cpu/accelerator",
    "tests/cpu/triton",
    "tests/cpu/native",
    "tests/cpu/torch_device",
    "tests/cpu/torch_ops",
    "tests/cpu/replay",
    "tests/multi/jax",
)
#: What tools/test --quick runs, and why: for each stage the tests that find most in the least time. All together take
#: some 100 seconds of processor time. What takes seconds a test (pipelines over models, Triton's interpreter) is left
#: out.
QUICK = {
    "tests/unit/test_docs.py": "links of every page",
    "tests/unit/test_imports.py": "layers of modules; tests import no tests",
    "tests/unit/test_errors.py": "the catalogue of errors",
    "tests/unit/tools/test_errors_page.py": "pages that are generated are up to date",
    "tests/unit/tools/test_pipeline_page.py": "pages that are generated are up to date",
    "tests/unit/cli/test_verdict.py": "what people meet first",
    "tests/unit/plugin_abi/test_layout.py": "every offset of the ABI",
    "tests/unit/plugin_abi/test_loader.py": "manifests, checks and negotiation, with plugins of each kind",
    "tests/unit/importer/test_program.py": "bytes to a module",
    "tests/unit/ir/test_verifier.py": "the rules of the graph",
    "tests/unit/ir/test_printer.py": "its text",
    "tests/unit/loop_ir/test_text.py": "loop nests, printed and parsed",
    "tests/unit/passes/test_pass_manager.py": "a fault in any pass is caught; passes run in pipelines alone",
    "tests/unit/passes/test_cse.py": "a pass against stock XLA",
    "tests/unit/fusion/test_choices.py": "grouping into loop nests",
    "tests/unit/codegen/cpu/test_buffer_assignment.py": "memory of a program",
    "tests/unit/compile/test_compiler.py": "the stages, called in order",
    "tests/unit/devices/test_streams.py": "the order of an accelerator",
    "tests/cpu/native/test_pairs.py": "native programs of the host",
    "tests/cpu/jax/test_platform.py": "JAX, end to end",
    "tests/cpu/torch_compile/test_taken_apart.py": "torch.compile, end to end",
    "tests/cpu/torch_device/test_storage.py": "the device of PyTorch",
}


@dataclass(frozen=True, slots=True)
class Suite:
    """What one pytest process runs: the folder, or ``files`` of it."""

    folder: str
    options: Sequence[str] = ()
    files: Sequence[str] = ()
    environment: dict[str, str] = field(default_factory=dict)


def _folders(group: str) -> list[str]:
    parts = {path.parent for path in (ROOT / "tests" / group).glob("*/test_*.py")}
    return sorted(path.relative_to(ROOT).as_posix() for path in parts)


def suites() -> list[Suite]:
    """All but tests/unit, in the order in which they begin. A process holds one backend, started once, so each folder
    of tests/cpu gets its own (tests/README.md)."""
    found = [Suite("tests/unit/jax")]  # it sets up JAX's platforms in its own way, which a process can do once
    found += [Suite(folder) for folder in _folders("cpu")]
    # Several accelerators of one process and of two, each with memory of its own, as far as can be told without one.
    found += [Suite(folder, environment={"FLAGOS_TEST_DEVICE": "simulated"}) for folder in _folders("multi")]
    order = {folder: rank for rank, folder in enumerate(LONG)}
    return sorted(found, key=lambda suite: order.get(suite.folder, len(order)))


def quick_suites() -> list[Suite]:
    """The files of QUICK: those of tests/unit in one process, and one a folder of tests/cpu, the longest first."""
    unit = [file for file in QUICK if file.startswith("tests/unit/")]
    rest = [file for file in QUICK if file not in unit]
    return [Suite("tests/unit", files=unit), *(Suite(file, files=[file]) for file in reversed(rest))]


# A worker that crashed is not replaced: with files as units pytest-xdist waits for ever after it was (its issue 1378).
UNIT = Suite(
    "tests/unit",
    ("-n", str(WORKERS), "--dist", "loadfile", "--max-worker-restart=0", "--ignore=tests/unit/jax"),
)


class Runner:
    """Runs suites and keeps the last line of each."""

    def __init__(self, options: Sequence[str]) -> None:
        self._options = options
        self._writes = threading.Lock()
        self.closing: list[str] = []
        self.failed = False

    def run(self, suite: Suite) -> None:
        """To its end, and then shows what it wrote."""
        with self._writes:
            print(f"\n== {suite.folder} begins", flush=True)
        command = [sys.executable, "-m", "pytest", "-q", *self._options, *(suite.files or [suite.folder])]
        command += suite.options
        environment = {**os.environ, **suite.environment}
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            check=False,
        )
        with self._writes:
            print(f"\n== pytest {suite.folder}\n{done.stdout}", end="", flush=True)
            last = (done.stdout.splitlines() or [""])[-1]
            self.closing.append(f"{suite.folder:28} {last}")
            self.failed |= done.returncode != 0


def main() -> None:
    quick = sys.argv[1:2] == ["--quick"]
    runner = Runner(sys.argv[2:] if quick else sys.argv[1:])
    if not quick:
        runner.run(UNIT)
    with ThreadPoolExecutor(WORKERS) as pool:
        list(pool.map(runner.run, quick_suites() if quick else suites()))
    print("\n== Summary", *runner.closing, sep="\n", flush=True)
    sys.exit(runner.failed)


if __name__ == "__main__":
    main()
