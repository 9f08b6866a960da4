"""Where the time of a trace went, for a terminal. Called by cli/trace.py with the events of trace_file.py."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from flagos_backend.cli.explanation_text import quantity, seconds, size, table
from flagos_backend.cli.trace_file import Event

Interval = tuple[float, float]


@dataclass(slots=True)
class Total:
    """Of the events of one kind. Times in seconds; ``expected`` is 0 where nobody states the roofline."""

    times: int = 0
    seconds: float = 0.0
    expected: float = 0.0
    flops: float = 0.0
    bytes: float = 0.0

    def add(self, event: Event) -> None:
        arguments = event["args"]
        self.times += 1
        self.seconds += event["dur"] / 1e6
        self.expected += arguments.get("expected_us", 0.0) / 1e6
        self.flops += arguments.get("flops", 0.0)
        self.bytes += arguments.get("bytes", 0.0)


@dataclass(slots=True)
class Summary:
    """What ``add`` was given, by who ran it, what it is, and where it comes from. Devices are (process, number)."""

    events: int = 0
    processes: set[int] = field(default_factory=set)
    on_accelerator: bool = False
    launches: dict[tuple[int, int], list[Interval]] = field(default_factory=dict)
    programs: dict[tuple[str, str], Total] = field(default_factory=dict)
    steps: dict[tuple[str, str, str], Total] = field(default_factory=dict)
    compiles: dict[str, Total] = field(default_factory=dict)
    stages: dict[str, Total] = field(default_factory=dict)
    transfers: dict[str, Total] = field(default_factory=dict)
    waits: dict[str, Total] = field(default_factory=dict)
    peaks: dict[tuple[int, str], float] = field(default_factory=dict)

    def all(self, events: Iterable[Event]) -> Iterator[Event]:
        """The events, each of which is added."""
        for event in events:
            self.add(event)
            yield event

    def add(self, event: Event) -> None:
        """Counts one event in."""
        self.events += 1
        self.processes.add(event["pid"])
        if event["ph"] == "C":
            key = event["pid"], event["name"]
            self.peaks[key] = max(self.peaks.get(key, 0.0), event["args"]["bytes"])
        elif event["ph"] == "X":
            self._add_span(event)

    def _add_span(self, event: Event) -> None:
        name, arguments = event["name"], event["args"]
        source = arguments.get("source", "")
        match event["cat"].partition(",")[0]:
            case "execute":
                _count(self.programs, (name, source), event)
                device = event["pid"], arguments["device"]
                begin = event["ts"] / 1e6
                self.launches.setdefault(device, []).append((begin, begin + event["dur"] / 1e6))
                self.on_accelerator |= arguments.get("target", "the host CPU") != "the host CPU"
            case "step":
                _count(self.steps, (arguments.get("program", ""), name, source), event)
            case "compile":
                _count(self.compiles, name, event)
            case "compile stage":
                _count(self.stages, name, event)
            case "transfer":
                _count(self.transfers, name, event)
            case "wait":
                _count(self.waits, name, event)


def _count(totals: dict[Any, Total], key: Any, event: Event) -> None:
    totals.setdefault(key, Total()).add(event)


def text_of(summary: Summary, top: int, width: int | None) -> str:
    """At most ``top`` rows in each table, lines of at most ``width`` characters, if any. No colours."""
    return "\n".join(_cut(_printable(line), width) for line in _lines(summary, top))


def _lines(summary: Summary, top: int) -> Iterator[str]:
    for (process, device), launches in sorted(summary.launches.items()):
        yield f"  device {device} of process {process}: {_occupation(launches)}"
    if summary.on_accelerator:
        yield "  times of launches and steps are the host's, which enqueues them: an accelerator computes them later"
    longest = max(summary.compiles.items(), key=lambda item: item[1].seconds, default=None)
    if longest is not None:
        named = f"; longest: {longest[0]}, {seconds(longest[1].seconds)}"
        yield f"  compiling  {_times(summary.compiles)}{named}"
    if summary.stages:
        yield f"    stages   {_each(summary.stages, with_bytes=False)}"
    if summary.transfers:
        yield f"  transfers  {_each(summary.transfers, with_bytes=True)}"
    if summary.waits:
        yield f"  waits      {_each(summary.waits, with_bytes=False)}"
    for (process, name), peak in sorted(summary.peaks.items()):
        yield f"  {name} of process {process}: {size(peak)} at most"
    if summary.programs:
        yield from _table("program", summary.programs, top)
    if summary.steps:
        yield from _table("step", summary.steps, top)


def _occupation(launches: Sequence[Interval]) -> str:
    """How much of the time from the first launch to the last it ran, and how long it waited for the next one."""
    busy: list[Interval] = []
    for begin, end in sorted(launches):
        if busy and begin <= busy[-1][1]:
            busy[-1] = busy[-1][0], max(end, busy[-1][1])
        else:
            busy.append((begin, end))
    spent = sum(end - begin for begin, end in busy)
    whole = busy[-1][1] - busy[0][0]
    gaps = [after[0] - before[1] for before, after in pairwise(busy)]
    text = f"{_counted(len(launches), 'launch', 'launches')} in {seconds(whole)}, busy {_share(spent, whole)}"
    if gaps:
        text += f"; {_counted(len(gaps), 'gap', 'gaps')}: {seconds(sum(gaps))}, the longest {seconds(max(gaps))}"
    return text


def _table(what: str, totals: Mapping[Any, Total], top: int) -> Iterator[str]:
    whole = sum(total.seconds for total in totals.values())
    ranked = sorted(totals.items(), key=lambda item: -item[1].seconds)
    rows = [("share", "total", "times", "each", "flop/s", "bytes/s", "roofline", what)]
    for key, total in ranked[:top]:
        *names, source = key
        spent = total.seconds
        rows.append(
            (
                _share(spent, whole),
                seconds(spent),
                str(total.times),
                seconds(spent / total.times),
                quantity(total.flops / spent).strip() if total.flops and spent else "",
                f"{size(total.bytes / spent)}" if total.bytes and spent else "",
                _share(total.expected, spent) if total.expected else "",
                ": ".join(filter(None, names)) + (f", {source}" if source else ""),
            )
        )
    yield ""
    yield from (f"  {line}" for line in table(rows))
    if len(ranked) > top:
        yield f"  and {len(ranked) - top} more, {_share(sum(t.seconds for _, t in ranked[top:]), whole)}"


def _each(totals: Mapping[str, Total], *, with_bytes: bool) -> str:
    ranked = sorted(totals.items(), key=lambda item: -item[1].seconds)
    return "; ".join(
        f"{name} {seconds(total.seconds)} ({total.times}x{f', {size(total.bytes)}' if with_bytes else ''})"
        for name, total in ranked
    )


def _times(totals: Mapping[str, Total]) -> str:
    count = sum(total.times for total in totals.values())
    spent = sum(total.seconds for total in totals.values())
    return f"{_counted(count, 'program', 'programs')} in {seconds(spent)}"


def _counted(number: int, one: str, several: str) -> str:
    return f"{number} {one if number == 1 else several}"


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.0%}" if whole else ""


def _printable(line: str) -> str:
    """Names come from programs, and must not move the terminal's cursor."""
    return "".join(character if character.isprintable() else "?" for character in line)


def _cut(line: str, width: int | None) -> str:
    return line if width is None or len(line) <= width else line[: max(width - 3, 0)] + "..."
