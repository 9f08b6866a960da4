"""The OpInfo suite: PyTorch's database of operators, in every element type that they have, forward and backward."""

from __future__ import annotations

import enum
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tools.conformance.device import FLAGOS, of_tensors
from tools.conformance.records import HOST, ResultFile
from tools.conformance.worker_pool import run_in_workers, worker_command


class Mode(enum.StrEnum):
    COMPILE = "compile"  # torch.compile(backend="flagos") on tensors of a device of torch
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


def cases(device: str = HOST.kind) -> Iterator[Case]:
    """Every case that the installed PyTorch has on the CPU or on ``device``, in the order of its database."""
    # Imported here: it takes seconds, and torch, which publishing does without.
    from torch.testing._internal.common_methods_invocations import op_db

    for op in op_db:
        # What only one of them has is listed too: the worker says which of them refuses it, and in what words.
        supported = {Direction.FORWARD: {*op.supported_dtypes("cpu"), *op.supported_dtypes(device)}}
        if op.supports_autograd:
            both = {*op.supported_backward_dtypes("cpu"), *op.supported_backward_dtypes(device)}
            supported[Direction.BACKWARD] = both
        for direction, dtypes in supported.items():
            for dtype in sorted(str(d).removeprefix("torch.") for d in dtypes):
                yield Case(op.full_name, dtype, direction)


def run(
    mode: Mode,
    out: Path,
    *,
    samples: int,
    only: str,
    stride: int,
    offset: int,
    resume: bool,
    timeout: float,
    device: str = HOST.kind,
    workers: int = 1,
) -> ResultFile:
    """Runs the cases whose name contains ``only``, each ``stride``-th of them from number ``offset`` on, with up to
    ``samples`` inputs each, in ``workers`` processes at once. ``device``: whose tensors are compiled for, a device type
    of torch; the mode DEVICE has its own."""
    device = FLAGOS if mode is Mode.DEVICE else device
    # Tensors of the device flagos are also of whatever it computes on: of two suites.
    suite = f"opinfo {mode}" + (f" {FLAGOS}" if mode is Mode.COMPILE and device == FLAGOS else "")
    results = ResultFile(out, suite, "flagos", of_tensors(device), peer=PEERS[mode], resume=resume)
    chosen = [case for case in cases(device) if only in str(case)][offset::stride]
    chosen = [case for case in chosen if str(case) not in results.records]
    records = run_in_workers(
        worker_command("tools.conformance.opinfo_worker", mode, str(samples), device),
        [str(case) for case in chosen],
        [case.operator for case in chosen],
        timeout=timeout,
        environment={},
        workers=workers,
    )
    for number, record in enumerate(records, 1):
        results.add(record)
        if number % 100 == 0:
            print(f"{number} of {len(chosen)}", file=sys.stderr, flush=True)
    return results
