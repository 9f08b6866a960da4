"""What torch.profiler shows of a launch: an event by the program's name, with what ``flagos explain`` knows of it.
Called by torch/native/launcher.cc while a profiler listens, and at no other time."""

from __future__ import annotations

import json
import statistics
import threading
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch._C._profiler import _RecordFunctionFast

from flagos_backend.process import known_programs
from plugin_abi.errors import FlagosStatusError
from plugin_abi.host import Executable

#: Steps of a program that a trace tells, the ones of the longest expected time.
_TOLD: Final = 1000
#: Launches whose steps are timed, the first that a profiler sees: it costs more than a launch of short steps.
_TIMED: Final = 3

_Launch = Callable[[list[Any]], list[Any]]


class Observer:
    """Launches one executable so that PyTorch's profiler sees it. May be called from several threads."""

    def __init__(self, executable: Executable) -> None:
        self._executable = executable
        self._lock = threading.Lock()
        self._known: tuple[str, dict[str, Any], str] | None = None
        self._times: dict[int, list[int]] = {}
        self._timed = 0

    def __call__(self, launch: _Launch, inputs: list[Any]) -> list[Any]:
        """``launch(inputs)``, as one event. The inputs' shapes and the facts are there with ``record_shapes=True``."""
        name, facts, _ = self._facts()
        is_timed = self._begin_timing()
        try:
            with _RecordFunctionFast(name, [value for value in inputs if isinstance(value, torch.Tensor)], facts):
                return launch(inputs)
        finally:
            if is_timed:
                self._end_timing()
            # Each trace has metadata of its own, and nobody says when one begins; a name is written once.
            torch._C._autograd._add_metadata_json(name, self._facts()[2])

    def _begin_timing(self) -> bool:
        """Whether the steps of this launch are timed: not where an accelerator runs them later, nor while somebody else
        listens to the context."""
        with self._lock:
            if self._timed >= _TIMED:
                return False
            self._timed += 1
        description = self._executable.describe()
        if not all(device.is_host_memory for device in description.devices):
            return False
        try:
            self._executable.context.profiler_start()
        except FlagosStatusError:
            return False
        return True

    def _end_timing(self) -> None:
        description = self._executable.describe()
        for device in description.devices:
            device.synchronize()
        found = _step_times(self._executable.context.profiler_stop(), description.fingerprint)
        with self._lock:
            for step, times in found.items():
                self._times.setdefault(step, []).extend(times)
            self._known = None

    def _facts(self) -> tuple[str, dict[str, Any], str]:
        """The event's name, its arguments, and the program with its steps as JSON."""
        with self._lock:
            if self._known is None:
                description = self._executable.describe()
                explanation = known_programs.explanation(description.fingerprint)
                name = f"flagos: {_plain(description.name)} {description.fingerprint[:8]}"
                facts: dict[str, Any] = {"program": _plain(description.name), "fingerprint": description.fingerprint}
                if explanation is None:  # of another backend, or in a process of its own
                    self._known = name, facts, json.dumps(facts)
                else:
                    facts |= _work(explanation)
                    self._known = name, facts, json.dumps(facts | {"steps": _steps(explanation, self._times)})
            return self._known


def _plain(text: str) -> str:
    """PyTorch writes names and arguments to its trace without escapes."""
    return "".join(c if c.isascii() and c.isprintable() and c not in '"\\\\' else "_" for c in text)


def _work(explanation: Any) -> dict[str, Any]:
    """Whole numbers: PyTorch writes others as JSON has none."""
    steps = explanation.steps
    source = next((step.source for step in steps if step.source), "")
    operation = next((step.operation for step in steps if step.operation), "")
    return {
        "target": _plain(explanation.target),
        "source": _plain(source),
        "operation": _plain(operation),
        "providers": ", ".join(sorted({step.provider for step in steps if step.provider})),
        "flops": round(sum(step.flops for step in steps)),
        "bytes": round(sum(step.bytes for step in steps)),
        "expected_ns": round(sum(step.seconds for step in steps) * 1e9),
    }


def _step_times(trace: bytes, fingerprint: str) -> dict[int, list[int]]:
    """Nanoseconds of each step of a program, by number, of each run in what ``profiler_stop`` gave."""
    events = json.loads(trace)["traceEvents"]
    numbers = {
        event["args"]["program"]
        for event in events
        if event["name"] == "flagos_program" and event["args"]["facts"].get("fingerprint") == fingerprint
    }
    times: dict[int, list[int]] = {}
    for event in events:
        if event.get("cat") == "step" and event["args"].get("program") in numbers:
            times.setdefault(event["args"]["step"], []).append(round(event["dur"] * 1e3))
    return times


def _steps(explanation: Any, times: Mapping[int, list[int]]) -> list[dict[str, Any]]:
    """Each kernel or call in the order in which it runs; of very many those that are expected to take longest. Steps
    that are one function of machine code have a number and a time in common."""
    longest = sorted(explanation.steps, key=lambda step: -step.seconds)[:_TOLD]
    return [
        {
            "step": step.number,
            "kernel": step.text,
            "kind": step.kind,
            "provider": step.provider,
            "operation": step.operation,
            "source": step.source,
            "flops": round(step.flops),
            "bytes": round(step.bytes),
            "expected_ns": round(step.seconds * 1e9),
        }
        | ({"measured_ns": round(statistics.median(times[step.number]))} if step.number in times else {})
        for step in sorted(longest, key=lambda step: step.number)
    ]
