"""One trace out of what each process recorded: the lines of FLAGOS_TRACE (native/profiler.cc), with what
compile/trace_notes.py says of programs and steps. Between cli/trace.py and cli/trace_text.py."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, TextIO

from flagos_backend.cli.failure import CommandFailed

#: The folder in which each process writes what it records, a file for each context.
VARIABLE: Final = "FLAGOS_TRACE"
_PARTS: Final = "*.jsonl"
_DESCRIPTION: Final = "flagos_program"

Event = dict[str, Any]


def has_parts(folder: Path) -> bool:
    """Whether any process opened the device."""
    return next(folder.glob(_PARTS), None) is not None


def events_of(folder: Path) -> Iterator[Event]:
    """The Chrome trace events of all parts, each launch and step with what is known of it.

    Raises CommandFailed for a line that is no event. One that was cut off with its process is left out.
    """
    for part in sorted(folder.glob(_PARTS)):
        programs: dict[int, Mapping[str, Any]] = {}
        lines = part.read_text(encoding="utf-8", errors="replace").split("\n")
        for number, line in enumerate(lines[:-1], 1):
            event = _event(part, number, line)
            if event["ph"] == "M" and event["name"] == _DESCRIPTION:
                programs[event["args"]["program"]] = event["args"]["facts"]
            else:
                yield _described(event, programs)


def write(stream: TextIO, events: Iterable[Event], about: Mapping[str, Any]) -> None:
    """The JSON that Perfetto and Chrome read: an event a line, between what ``about`` says of the whole."""
    stream.write(f'{{"displayTimeUnit":"ns","otherData":{json.dumps(about)},"traceEvents":[')
    for number, event in enumerate(events):
        stream.write((",\n" if number else "\n") + json.dumps(event))
    stream.write("\n]}\n")


def _event(part: Path, number: int, line: str) -> Event:
    try:
        event = json.loads(line)
    except ValueError:
        event = None
    if not (isinstance(event, dict) and isinstance(event.get("ph"), str) and isinstance(event.get("name"), str)):
        raise CommandFailed(f"{part.name}, line {number}, is no trace event; record it again")
    return event


def _described(event: Event, programs: Mapping[int, Mapping[str, Any]]) -> Event:
    """With the names and numbers that stand for ``program`` and ``step``."""
    arguments = event.get("args", {})
    program = programs.get(arguments.get("program", -1))
    if program is None:
        return event
    step = program.get("steps", {}).get(str(arguments.get("step", "")))
    facts = program if event["cat"] == "execute" else step or {}
    shown = {"device": arguments["device"], "program": program["name"]}
    if "step" in arguments:
        shown["step"] = arguments["step"]
    for name in ("fingerprint", "target", "kind", "provider", "operation", "source", "flops", "bytes"):
        if facts.get(name):
            shown[name] = facts[name]
    if expected := facts.get("expected_seconds"):
        shown["expected_us"] = expected * 1e6
        if event["dur"] > 0:
            shown["roofline"] = expected * 1e6 / event["dur"]
    category = "step,collective" if shown.get("kind") == "collective" else event["cat"]
    return {**event, "cat": category, "args": shown}
