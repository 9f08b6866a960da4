"""Result files: one record a test, written as the run goes, so that an interrupted run can resume."""

from __future__ import annotations

import dataclasses
import datetime
import enum
import importlib.metadata
import json
import os
import platform as host
import sys
from collections.abc import Sequence
from pathlib import Path

# What else a run depends on.
_VARIABLES = ("FLAGOS_DEVICE", "JAX_NUM_GENERATED_CASES")


class Status(enum.StrEnum):
    PASSED = "passed"
    FAILED = "failed"
    CRASHED = "crashed"
    HUNG = "hung"
    # The peer (JAX's CPU, eager PyTorch) fails or refuses it too: it says nothing about the platform.
    NOT_APPLICABLE = "not applicable"
    # FlagOS does not ask for it, and says why: a guard keeps it from a kernel that would compute it wrongly.
    REFUSED = "refused"
    # Skipped by the suite itself.
    SKIPPED = "skipped"

    @property
    def counts(self) -> bool:
        """Whether it is part of the pass rate."""
        return self not in (Status.NOT_APPLICABLE, Status.REFUSED, Status.SKIPPED)


@dataclasses.dataclass(frozen=True)
class Record:
    """``group``: a primitive, an operator, a model or a test file. ``message``: why it did not pass."""

    name: str
    group: str
    status: Status
    message: str = ""
    seconds: float = 0.0

    @property
    def counts(self) -> bool:
        """Whether it is part of the pass rate."""
        return self.status.counts


@dataclasses.dataclass(frozen=True)
class Device:
    """What a run is about: results of different devices are kept apart.

    ``kind``: the type that torch gives its memory, or "simulated". ``name``: the product's."""

    kind: str
    name: str = ""


HOST = Device("cpu")
# Kernels in Triton's interpreter, on tensors of the host.
SIMULATED = Device("simulated")


class ResultFile:
    """``path`` holds a header line and then one JSON record a line.

    ``peer``: what a test must pass on to count, in words."""

    def __init__(
        self, path: Path, suite: str, platform: str, device: Device, *, resume: bool, peer: str = "JAX's CPU"
    ) -> None:
        """Raises ValueError for a file to resume that is of another suite, platform or device."""
        self._path = path
        self.records: dict[str, Record] = {}
        about = {"suite": suite, "platform": platform, "device": device.kind}
        if resume and path.exists():
            header, records = load(path)
            if (before := {name: header[name] for name in about}) != about:
                raise ValueError(f"{path} is of {before}, and this run of {about}: it needs a file of its own")
            self.records = {record.name: record for record in records}
            return
        header = {**about, "peer": peer, **_facts(device)}
        path.write_text(json.dumps(header) + "\n")

    def add(self, record: Record) -> None:
        self.records[record.name] = record
        with self._path.open("a") as file:
            file.write(json.dumps(dataclasses.asdict(record)) + "\n")


def load(path: Path) -> tuple[dict[str, str], list[Record]]:
    """The header and the records; a later record of the same name replaces an earlier one. Files from before there was
    a device in them are of the host."""
    header, *lines = path.read_text().splitlines()
    records = {}
    for line in lines:
        fields = json.loads(line)
        records[fields["name"]] = Record(**{**fields, "status": Status(fields["status"])})
    return {"device": HOST.kind, **json.loads(header)}, list(records.values())


def _facts(device: Device) -> dict[str, str]:
    versions = {name: importlib.metadata.version(name) for name in ("jax", "jaxlib", "torch", "numpy")}
    return {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        "python": host.python_version(),
        "machine": ", ".join(filter(None, (f"{os.cpu_count()} cores", host.machine(), device.name))),
        "command": _command(sys.argv[1:]),
        **versions,
    }


def _command(arguments: Sequence[str]) -> str:
    """How to run this again; absolute paths are this machine's own, so only their last part is kept."""
    variables = [f"{name}={os.environ[name]}" for name in _VARIABLES if name in os.environ]
    words = [Path(word).name if word.startswith("/") else word for word in arguments]
    return " ".join([*variables, "python -m tools.conformance", *words])
