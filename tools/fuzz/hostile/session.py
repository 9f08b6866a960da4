"""Gives targets their inputs in a worker process, which starts anew after a crash or a hang."""

from __future__ import annotations

import collections
import json
import shutil
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Self

from tools.conformance.records import Status
from tools.conformance.worker_pool import Worker, worker_command

#: Inputs that a worker takes before it answers.
_BATCH: Final = 500
#: Seconds without an answer, by the clock: a worker that uses the CPU ends by itself long before.
_TIMEOUT: Final = 280.0
_LOG_LENGTH: Final = 6000


@dataclass(frozen=True)
class Finding:
    """An input that did what none may: `kind` is raised, slow, large, afterwards, crashed or hung."""

    seed: int
    kind: str
    message: str


@dataclass
class Account:
    """What came of some inputs of one target. `seconds` and `megabytes` are the most that one of them took."""

    outcomes: collections.Counter[str] = field(default_factory=collections.Counter)
    findings: list[Finding] = field(default_factory=list)
    seconds: float = 0.0
    megabytes: float = 0.0

    def add(self, answer: dict[str, Any]) -> None:
        self.outcomes.update(answer["outcomes"])
        self.findings += [Finding(*finding) for finding in answer["findings"]]
        self.seconds = max(self.seconds, answer["seconds"])
        self.megabytes = max(self.megabytes, answer["megabytes"])

    def merge(self, other: Account) -> None:
        self.outcomes.update(other.outcomes)
        self.findings += other.findings
        self.seconds = max(self.seconds, other.seconds)
        self.megabytes = max(self.megabytes, other.megabytes)


class Session:
    """One worker at a time, with a cache folder of its own."""

    def __init__(self, batch: int = _BATCH) -> None:
        self._batch = batch
        self._scratch = Path(tempfile.mkdtemp(prefix="flagos-fuzz-"))
        self._place = self._scratch / "seed"
        self._worker: Worker | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._worker is not None:
            self._worker.close()
        shutil.rmtree(self._scratch, ignore_errors=True)

    def run(self, target: str, seed: int, count: int) -> Account:
        """The inputs of `count` seeds."""
        account, end = Account(), seed + count
        while seed < end:
            number = min(self._batch, end - seed)
            self._place.write_bytes(seed.to_bytes(8, "little"))
            answer = self._ask({"target": target, "seed": seed, "count": number})
            if isinstance(answer, Finding):
                # What the inputs before it in this batch did is lost: they did not end the worker.
                reached = int.from_bytes(self._place.read_bytes(), "little")
                account.findings.append(Finding(reached, answer.kind, answer.message))
                account.outcomes["taken before a worker ended"] += reached - seed
                seed = reached + 1
            else:
                account.add(answer)
                seed += number
        return account

    def replay(self, target: str, data: bytes) -> Account:
        account = Account()
        answer = self._ask({"target": target, "hex": data.hex()})
        if isinstance(answer, Finding):
            account.findings.append(answer)
        else:
            account.add(answer)
        return account

    def _ask(self, request: dict[str, Any]) -> dict[str, Any] | Finding:
        if self._worker is None:
            environment = {"XDG_CACHE_HOME": str(self._scratch), "JAX_PLATFORMS": "cpu", "FLAGOS_DEVICE": "cpu"}
            self._worker = Worker(worker_command("tools.fuzz.hostile.worker", str(self._place)), environment)
        answer = self._worker.ask(json.dumps(request), _TIMEOUT)
        if answer is not None:
            return answer
        status, message = self._worker.post_mortem(_LOG_LENGTH)
        self._worker = None
        return Finding(0, "hung" if status is Status.HUNG else "crashed", message)
