"""One trace out of what each process recorded: the records of FLAGOS_TRACE and the texts beside them
(native/profiler.cc), with what compile/trace_notes.py says of programs and steps. Between cli/trace.py and
cli/trace_text.py."""

from __future__ import annotations

import json
import struct
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TextIO

from flagos_backend.cli.failure import CommandFailed

#: The folder in which each process writes what it records, two files for each context.
VARIABLE: Final = "FLAGOS_TRACE"
TEXTS: Final = ".jsonl"
RECORDS: Final = ".records"
#: TraceRecord of native/trace_record.h: kind, process, thread, category, name; device, program, step; begin and end in
#: nanoseconds; bytes, or of a run how many steps; nothing. Of a run, the steps' ends follow in records of STEP_ENDS.
RECORD: Final = struct.Struct("=IIIIIiiiqqqq")
STEP_ENDS: Final = struct.Struct("=II7q")
HEADER_BYTES: Final = 4096
MAGIC: Final = b"flagos trace 1\0\0"
SPAN, MEMORY_IN_USE, STEPS, ENDS = 1, 2, 3, 4

_PARTS: Final = f"*{TEXTS}"
_READ_AT_ONCE: Final = 1 << 20

Event = dict[str, Any]


@dataclass(slots=True)
class _Meanings:
    """What the numbers of a part's records stand for."""

    categories: tuple[str, ...] = ()
    texts: dict[int, str] = field(default_factory=dict)
    programs: dict[int, Mapping[str, Any]] = field(default_factory=dict)


def has_parts(folder: Path) -> bool:
    """Whether any process opened the device."""
    return next(folder.glob(_PARTS), None) is not None


def events_of(folder: Path) -> Iterator[Event]:
    """The Chrome trace events of all parts, each launch and step with what is known of it.

    Raises CommandFailed for a part that is none. What was cut off with its process is left out.
    """
    for part in sorted(folder.glob(_PARTS)):
        meanings = _Meanings()
        for event in _texts(part):
            name, arguments = event["name"], event["args"]
            try:
                if name == "flagos_records":
                    meanings.categories = tuple(arguments["categories"])
                elif name == "flagos_text":
                    meanings.texts[arguments["number"]] = arguments["text"]
                elif name == "flagos_program":
                    meanings.programs[arguments["program"]] = arguments["facts"]
                else:
                    yield event
            except KeyError as error:
                raise CommandFailed(f"{part.name}: a {name} has no {error}; record it again") from error
        for number, record in enumerate(_whole(_records(part.with_suffix(RECORDS)))):
            try:
                yield _event(record, meanings)
            except (KeyError, IndexError) as error:
                where = f"{part.with_suffix(RECORDS).name}, event {number}"
                raise CommandFailed(f"{where}: nothing is known of {error}; record it again") from error


def events_of_session(trace: bytes) -> Iterator[Event]:
    """The same of what ``profiler_stop`` gave, where its backend describes programs as ours does."""
    events: list[Event] = json.loads(trace)["traceEvents"]
    described = [event["args"] for event in events if event["name"] == "flagos_program"]
    programs = {about["program"]: about["facts"] for about in described}
    for event in events:
        about = programs.get(event.get("args", {}).get("program", -1))
        if event["ph"] == "X" and about is not None:
            yield _described(event, about, event["args"].get("step", -1))
        elif event["ph"] != "M":
            yield event


def write(stream: TextIO, events: Iterable[Event], about: Mapping[str, Any]) -> None:
    """The JSON that Perfetto and Chrome read: an event a line, between what ``about`` says of the whole."""
    stream.write(f'{{"displayTimeUnit":"ns","otherData":{json.dumps(about)},"traceEvents":[')
    for number, event in enumerate(events):
        stream.write((",\n" if number else "\n") + json.dumps(event))
    stream.write("\n]}\n")


def _texts(part: Path) -> Iterator[Event]:
    lines = part.read_text(encoding="utf-8", errors="replace").split("\n")
    for number, line in enumerate(lines[:-1], 1):
        try:
            event = json.loads(line)
        except ValueError:
            event = None
        if not (isinstance(event, dict) and isinstance(event.get("name"), str) and isinstance(event.get("args"), dict)):
            raise CommandFailed(f"{part.name}, line {number}, is no trace event; record it again")
        yield event


def _whole(records: Iterable[bytes]) -> Iterator[tuple[int, ...]]:
    """Records with their fields; each step of a run is one."""
    run: list[int] | None = None
    for record in records:
        kind = int.from_bytes(record[:4], sys.byteorder)
        if kind != ENDS:
            fields = RECORD.unpack(record)
            run = [*fields] if kind == STEPS else None
            if run is None:
                yield fields
            continue
        if run is None:
            continue  # its beginning was not written
        _, count, *ends = STEP_ENDS.unpack(record)
        for end in ends[:count]:
            _, process, thread, category, name, device, program, step, begin, *_ = run
            yield SPAN, process, thread, category, name, device, program, step, begin, end, -1, 0
            run[7:9] = step + 1, end


def _records(path: Path) -> Iterator[bytes]:
    """Those that were written, in their order."""
    try:
        stream = path.open("rb")
    except OSError as error:
        raise CommandFailed(f"{path.name} cannot be read ({error.strerror}); record it again") from error
    with stream:
        if not stream.read(HEADER_BYTES).startswith(MAGIC):
            raise CommandFailed(f"{path.name} has no records of this version; record it again")
        while read := stream.read(RECORD.size * (_READ_AT_ONCE // RECORD.size)):
            for at in range(0, len(read) - RECORD.size + 1, RECORD.size):
                if any(read[at : at + 4]):
                    yield read[at : at + RECORD.size]


def _event(record: tuple[int, ...], meanings: _Meanings) -> Event:
    """Raises KeyError and IndexError for numbers that mean nothing."""
    kind, process, thread, category, name, device, program, step, begin, end, in_bytes, _ = record
    if kind == MEMORY_IN_USE:
        counter = {"ph": "C", "name": f"memory in use, device {device}", "pid": process}
        return {**counter, "ts": begin / 1e3, "args": {"bytes": in_bytes}}
    if kind != SPAN:
        raise KeyError(f"kind {kind}")
    facts = meanings.programs[program] if program >= 0 else None
    text = meanings.texts[name] if name else _name(facts, step)
    place = {"pid": process, "tid": thread, "ts": begin / 1e3, "dur": (end - begin) / 1e3}
    named = {"device": device, "bytes": in_bytes, "program": program, "step": step}
    arguments = {key: value for key, value in named.items() if value >= 0 or key == "device"}
    event = {"ph": "X", "cat": meanings.categories[category], "name": text, **place, "args": arguments}
    return event if facts is None else _described(event, facts, step)


def _name(program: Mapping[str, Any] | None, step: int) -> str:
    """Of a span that has none of its own: that of the step, or of the program."""
    if program is None:
        return ""
    if step < 0:
        return str(program["name"])
    return str(program.get("steps", {}).get(str(step), {}).get("text") or f"step {step}")


def _described(event: Event, program: Mapping[str, Any], step: int) -> Event:
    """With the names and numbers that stand for ``program`` and ``step``."""
    facts = program if event["cat"] == "execute" else program.get("steps", {}).get(str(step), {})
    shown = {"device": event["args"]["device"], "program": program["name"]}
    if step >= 0:
        shown["step"] = step
    for name in ("fingerprint", "target", "kind", "provider", "operation", "source", "flops", "bytes"):
        if facts.get(name):
            shown[name] = facts[name]
    if expected := facts.get("expected_seconds"):
        shown["expected_us"] = expected * 1e6
        if event["dur"] > 0:
            shown["roofline"] = expected * 1e6 / event["dur"]
    category = "step,collective" if shown.get("kind") == "collective" else event["cat"]
    return {**event, "cat": category, "args": shown}
