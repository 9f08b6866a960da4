"""What a trace says of a program and its steps: explanation.py's, by the numbers that launches record. Called by
bridge.py once a profiler listens; cli/trace_file.py reads it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import groupby
from typing import Any

from flagos_backend.compile.compiler import CompiledProgram
from flagos_backend.compile.explanation import Step, explanation_of


def trace_notes(compiled: CompiledProgram) -> tuple[str, tuple[str, ...]]:
    """A JSON object, and the name of each step by number.

    The object has the program's name, fingerprint, target, flops, bytes and expected seconds, as ``flagos explain`` has
    them, the line of the user's program that its first step comes from, and the same of each of its ``steps``, by
    number.
    """
    explanation = explanation_of(compiled)
    grouped = {number: list(steps) for number, steps in groupby(explanation.steps, key=lambda step: step.number)}
    names = [""] * (max(grouped, default=-1) + 1)
    for number, steps in grouped.items():
        names[number] = _name(steps)
    facts = {
        "name": explanation.name,
        "fingerprint": explanation.fingerprint,
        "target": explanation.target,
        **_work(explanation.steps),
        "steps": {str(number): _step(steps) for number, steps in grouped.items()},
    }
    return json.dumps(facts), tuple(names)


def _name(steps: Sequence[Step]) -> str:
    """Several are one function of machine code."""
    more = f", and {len(steps) - 1} more in one function" if len(steps) > 1 else ""
    return steps[0].text + more


def _step(steps: Sequence[Step]) -> dict[str, Any]:
    operation = next((step.operation for step in steps if step.operation), "")
    named = {"text": _name(steps), "kind": steps[0].kind, "provider": steps[0].provider, "operation": operation}
    return {**named, **_work(steps)}


def _work(steps: Sequence[Step]) -> dict[str, Any]:
    return {
        "source": next((step.source for step in steps if step.source), ""),
        "flops": sum(step.flops for step in steps),
        "bytes": sum(step.bytes for step in steps),
        "expected_seconds": sum(step.seconds for step in steps),
    }
