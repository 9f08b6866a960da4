"""What torch.profiler shows of a launch: an event by the program's name, with what ``flagos explain`` knows of it.
Called by torch/native/launcher.cc while a profiler listens, and at no other time."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from typing import Any, Final

import torch
from torch._C._profiler import _RecordFunctionFast

from flagos_backend.process import known_programs
from plugin_abi.host import Executable

#: Steps of a program that a trace tells, the ones of the longest expected time.
_TOLD: Final = 1000

_Launch = Callable[[list[Any]], list[Any]]


class Observer:
    """Launches one executable so that PyTorch's profiler sees it. May be called from several threads."""

    def __init__(self, executable: Executable) -> None:
        self._executable = executable
        self._lock = threading.Lock()
        self._known: tuple[str, dict[str, Any], str] | None = None

    def __call__(self, launch: _Launch, inputs: list[Any]) -> list[Any]:
        """``launch(inputs)``, as one event. The inputs' shapes and the facts are there with ``record_shapes=True``."""
        name, facts, described = self._facts()
        # Each trace has metadata of its own, and nobody says when one begins; a name is written once.
        torch._C._autograd._add_metadata_json(name, described)
        with _RecordFunctionFast(name, [value for value in inputs if isinstance(value, torch.Tensor)], facts):
            return launch(inputs)

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
                    self._known = name, facts, json.dumps(facts | {"steps": _steps(explanation)})
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


def _steps(explanation: Any) -> list[dict[str, Any]]:
    """Each kernel or call in the order in which it runs; of very many those that are expected to take longest."""
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
        for step in sorted(longest, key=lambda step: step.number)
    ]
