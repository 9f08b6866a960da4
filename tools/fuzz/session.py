"""Judges programs in a worker process, which starts anew after a crash or a hang. For the loop and the shrinker."""

from __future__ import annotations

import base64
import json
from typing import Any

from flagos_backend.importer.export import export_module
from flagos_backend.ir.hlo import Module
from tools.conformance.records import Status
from tools.conformance.worker_pool import Worker, worker_command
from tools.fuzz.tape import Blocks
from tools.fuzz.verdict import RUNNING, Engine, Kind, Verdict

_ENVIRONMENT = {
    "XLA_FLAGS": "--xla_cpu_parallel_codegen_split_count=1",
    "JAX_PLATFORMS": "cpu",
    "PYTHONFAULTHANDLER": "1",
}
# Without its newer emitters the oracle compiles in half the time. The older ones convert to float8_e4m3fnuz,
# float8_e5m2fnuz and float8_e4m3b11fnuz wrongly below the normal range, and 496 to a zero of float8_e4m3fn: what
# differs from them is judged by the newer ones again.
_OLDER_EMITTERS = "--xla_cpu_use_fusion_emitters=false"
# Enough to hold the stack of a crash and what was announced before it.
_LOG_LENGTH = 20_000


class Session:
    """``timeout``: seconds after which a program counts as hung."""

    def __init__(self, timeout: float) -> None:
        flags = f"{_ENVIRONMENT['XLA_FLAGS']} {_OLDER_EMITTERS}"
        self._first = _Judge(timeout, {**_ENVIRONMENT, "XLA_FLAGS": flags})
        self._second = _Judge(timeout, _ENVIRONMENT)

    def judge_seed(self, seed: int) -> Verdict:
        return self._ask({"seed": seed})

    def judge_blocks(self, blocks: Blocks, seed: int) -> Verdict:
        return self._ask({"blocks": blocks, "seed": seed})

    def judge_module(self, module: Module, seed: int) -> Verdict:
        return self._ask({"hlo": base64.b64encode(export_module(module)).decode(), "seed": seed})

    def _ask(self, request: dict[str, Any]) -> Verdict:
        verdict = self._first.ask(request)
        if verdict.kind is not Kind.DIFFERENT:
            return verdict
        again = self._second.ask(request)
        return again if again.is_failure else Verdict(Kind.EMITTERS)

    def close(self) -> None:
        self._first.close()
        self._second.close()


class _Judge:
    """One worker process at a time."""

    def __init__(self, timeout: float, environment: dict[str, str]) -> None:
        self._timeout = timeout
        self._environment = environment
        self._worker: Worker | None = None

    def ask(self, request: dict[str, Any]) -> Verdict:
        if self._worker is None:
            self._worker = Worker(worker_command("tools.fuzz.worker"), self._environment)
        answer = self._worker.ask(json.dumps(request), self._timeout)
        if answer is not None:
            return Verdict(Kind(answer["kind"]), answer["message"])
        status, message = self._worker.post_mortem(_LOG_LENGTH)
        self._worker = None
        if message.rfind(RUNNING.format(Engine.XLA)) > message.rfind(RUNNING.format(Engine.FLAGOS)):
            return Verdict(Kind.ORACLE_REFUSES, f"XLA {status}")
        return Verdict(Kind.HUNG if status is Status.HUNG else Kind.CRASHED, message[-2000:])

    def close(self) -> None:
        if self._worker is not None:
            self._worker.close()
            self._worker = None
