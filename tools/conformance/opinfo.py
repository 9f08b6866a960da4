"""The OpInfo suite: PyTorch's database of operators, in every element type that the CPU has, forward and backward."""

from __future__ import annotations

import enum
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tools.conformance.results import ResultFile
from tools.conformance.worker_pool import run_in_worker, worker_command


class Mode(enum.StrEnum):
    COMPILE = "compile"  # torch.compile(backend="flagos") on CPU tensors
    DEVICE = "device"  # eager on the device flagos


class Direction(enum.StrEnum):
    FORWARD = "forward"
    BACKWARD = "backward"


PEERS = {Mode.COMPILE: "torch.compile(backend='aot_eager')", Mode.DEVICE: "eager PyTorch on the CPU"}


@dataclass(frozen=True)
class Case:
    """One test: an operator of the database, an element type (of torch, without its prefix), and what is computed."""

    operator: str
    dtype: str
    direction: Direction

    def __str__(self) -> str:
        return f"{self.operator} {self.dtype} {self.direction}"

    @classmethod
    def parse(cls, name: str) -> Case:
        operator, dtype, direction = name.split(" ")
        return cls(operator, dtype, Direction(direction))


def cases() -> Iterator[Case]:
    """Every case of the installed PyTorch, in the order of its database."""
    # Imported here: it takes seconds, and torch, which publishing does without.
    from torch.testing._internal.common_methods_invocations import op_db

    for op in op_db:
        supported = {Direction.FORWARD: op.supported_dtypes("cpu")}
        if op.supports_autograd:
            supported[Direction.BACKWARD] = op.supported_backward_dtypes("cpu")
        for direction, dtypes in supported.items():
            for dtype in sorted(str(d).removeprefix("torch.") for d in dtypes):
                yield Case(op.full_name, dtype, direction)


def run(
    mode: Mode, out: Path, *, samples: int, only: str, stride: int, offset: int, resume: bool, timeout: float
) -> ResultFile:
    """Runs the cases whose name contains ``only``, each ``stride``-th of them from number ``offset`` on, with up to
    ``samples`` inputs each."""
    results = ResultFile(out, f"opinfo {mode}", "flagos", peer=PEERS[mode], resume=resume)
    chosen = [case for case in cases() if only in str(case)][offset::stride]
    chosen = [case for case in chosen if str(case) not in results.records]
    records = run_in_worker(
        worker_command("tools.conformance.opinfo_worker", mode, str(samples)),
        [str(case) for case in chosen],
        [case.operator for case in chosen],
        timeout=timeout,
        environment={},
    )
    for number, record in enumerate(records, 1):
        results.add(record)
        if number % 100 == 0:
            print(f"{number} of {len(chosen)}", file=sys.stderr, flush=True)
    return results
