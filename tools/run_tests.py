"""Runs every folder of tests that needs no accelerator: a pytest process each, some at once. Called by tools/test.

    python tools/run_tests.py [--quick] PYTEST_OPTION...

``--quick`` runs the files of QUICK alone. The options go to each process. What a process writes is shown when it ends,
and in the end the last lines of all, and the processor time that each took. The exit status is 1 if one failed.
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
#: Processes at once. Each takes one processor most of the time, and up to 2 GB; one more than there are processors, for
#: tests of processes wait for them.
WORKERS = min((os.cpu_count() or 1) + 1, 4)
#: These take minutes each, so they begin first, the longest before the others: no processor waits for one in the end.
LONG = (
    "tests/cpu/torch_compile",
    "tests/unit/passes",
    "tests/unit",
    "tests/unit/kernels",
    "tests/cpu/jax",
    "tests/cpu/kernels",
    "tests/cpu/accelerator",
    "tests/unit/codegen",
    "tests/cpu/native",
    "tests/cpu/triton",
    "tests/unit/runtime",
    "tests/cpu/torch_device",
    "tests/cpu/replay",
    "tests/cpu/torch_ops",
    "tests/unit/plugin_abi",
    "tests/cpu/plugin_abi",
    "tests/unit/collectives",
    "tests/multi/jax",
    "tests/cpu/jax_multi",
    "tests/cpu/fuzz",
    "tests/cpu/torch_distributed",
    "tests/cpu/gems",
    "tests/cpu/cli",
    "tests/multi/jax_distributed",
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
    """What one pytest process runs: the folder without ``ignored`` ones of it, or ``files`` of it."""

    folder: str
    ignored: Sequence[str] = ()
    files: Sequence[str] = ()
    environment: dict[str, str] = field(default_factory=dict)

    def arguments(self) -> list[str]:
        """What pytest is called with."""
        return [*(self.files or [self.folder]), *(f"--ignore={folder}" for folder in self.ignored)]


def _folders(group: str) -> list[str]:
    parts = {path.parent for path in (ROOT / "tests" / group).glob("*/test_*.py")}
    return sorted(path.relative_to(ROOT).as_posix() for path in parts)


def _unit() -> list[Suite]:
    """The long folders of tests/unit have a process each, as has tests/unit/jax, which sets up JAX in its own
    way: a process can do so once. All others share one: each process imports the frameworks, which takes seconds."""
    alone = ["tests/unit/jax", *(folder for folder in LONG if folder.startswith("tests/unit/"))]
    return [*map(Suite, alone), Suite("tests/unit", ignored=alone)]


def suites() -> list[Suite]:
    """In the order in which they begin. A process holds one backend, started once, so each folder of tests/cpu gets its
    own (tests/README.md)."""
    found = [*_unit(), *(Suite(folder) for folder in _folders("cpu"))]
    # Several accelerators of one process and of two, each with memory of its own, as far as can be told without one.
    found += [Suite(folder, environment={"FLAGOS_TEST_DEVICE": "simulated"}) for folder in _folders("multi")]
    order = {folder: rank for rank, folder in enumerate(LONG)}
    return sorted(found, key=lambda suite: order.get(suite.folder, len(order)))


def quick_suites() -> list[Suite]:
    """The files of QUICK: those of tests/unit in one process, and one a folder of tests/cpu, the longest first."""
    unit = [file for file in QUICK if file.startswith("tests/unit/")]
    rest = [file for file in QUICK if file not in unit]
    return [Suite("tests/unit", files=unit), *(Suite(file, files=[file]) for file in reversed(rest))]


class Runner:
    """Runs suites, and keeps the last line of each and the processor time that it took."""

    def __init__(self, options: Sequence[str]) -> None:
        self._options = options
        self._writes = threading.Lock()
        self.closing: list[str] = []
        self.seconds = 0.0
        self.failed = False

    def run(self, suite: Suite) -> None:
        """To its end, and then shows what it wrote."""
        with self._writes:
            print(f"\n== {suite.folder} begins", flush=True)
        command = [sys.executable, "-m", "pytest", "-q", *self._options, *suite.arguments()]
        with subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, **suite.environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        ) as process:
            assert process.stdout is not None
            written = process.stdout.read()
            _, status, used = os.wait4(process.pid, 0)  # with its children, where they were waited for
            process.returncode = os.waitstatus_to_exitcode(status)
        with self._writes:
            print(f"\n== pytest {suite.folder}\n{written}", end="", flush=True)
            last = (written.splitlines() or [""])[-1]
            seconds = used.ru_utime + used.ru_stime
            self.closing.append(f"{suite.folder:28} {seconds:6.0f} s  {last}")
            self.seconds += seconds
            self.failed |= process.returncode != 0


def main() -> None:
    quick = sys.argv[1:2] == ["--quick"]
    runner = Runner(sys.argv[2:] if quick else sys.argv[1:])
    with ThreadPoolExecutor(WORKERS) as pool:
        list(pool.map(runner.run, quick_suites() if quick else suites()))
    print("\n== Summary: processor time, and what pytest said", *runner.closing, sep="\n")
    print(f"{'all':28} {runner.seconds:6.0f} s", flush=True)
    sys.exit(runner.failed)


if __name__ == "__main__":
    main()
