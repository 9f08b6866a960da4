"""An explanation for people: first half a page, then what they ask for. For the command line and Python."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from flagos_backend.cli.measuring import Measured
from flagos_backend.compile.explanation import Explanation, Step

_SLOWEST = 5
_FALLBACKS = 4
_SIZES = ("bytes", "KiB", "MiB", "GiB", "TiB")
_NOUNS = {"": "step", "control": "control-flow step", "call": "library call", "collective": "collective"}
_PROVIDERS = {
    "native": "native",
    "compiled": "compiled by LLVM",
    "blas": "BLAS",
    "torch": "PyTorch",
    "triton": "Triton",
    "flagos": "FlagGems",
    "vendor": "the vendor's library",
    "reference": "the reference kernels",
}


def summary(explanation: Explanation, measured: Measured | None = None) -> str:
    """Half a page: what runs where, memory, time, what is slow and why, what fell back and how to change it."""
    return "\n".join(_summary_lines(explanation, measured))


def _summary_lines(program: Explanation, measured: Measured | None) -> Iterator[str]:
    yield (
        f"{program.name} on {program.target}: {_count(program.arguments, 'argument')}, "
        f"{_count(program.outputs, 'output')}" + _spread(program)
    )
    yield f"  runs      {program.form}"
    yield f"  steps     {_kinds(program.steps)}"
    yield (
        f"  memory    at most {size(program.peak_bytes)}: arguments {size(program.argument_bytes)}, outputs "
        f"{size(program.output_bytes)}, temporaries {size(program.temporary_bytes + program.library_bytes)}"
        + (f"; {size(program.alias_bytes)} of outputs lie in arguments" if program.alias_bytes else "")
    )
    flops = sum(step.flops for step in program.steps)
    moved = sum(step.bytes for step in program.steps)
    yield f"  work      {quantity(flops)}flop and {size(moved)} moved ({size(program.bytes_accessed)} before fusion)"
    yield f"  expected  {_expected(program)}"
    if measured is not None:
        yield f"  measured  {_measured(program, measured)}"
    slowest = list(_slowest(program))
    if slowest:
        yield "  slowest   by expected time"
        yield from (f"    {line}" for line in slowest)
    fallbacks = fallbacks_of(program)
    yield f"  fell back {'nothing' if not fallbacks else ''}".rstrip()
    yield from (f"    {line}" for line in fallbacks[:_FALLBACKS])
    if len(fallbacks) > _FALLBACKS:
        yield f"    and {len(fallbacks) - _FALLBACKS} more: --kernels"


def kernels(explanation: Explanation) -> str:
    """A line for each step: expected time, provider, work, what it computes, and where the user wrote it."""
    rows = [("step", "expected", "by", "flop", "moved", "what", "where")]
    for step in explanation.steps:
        rows.append(
            (
                str(step.number),
                seconds(step.seconds) if step.seconds else "",
                step.provider,
                quantity(step.flops).strip() if step.flops else "",
                size(step.bytes) if step.bytes else "",
                step.text,
                _where(step),
            )
        )
    lines = table(rows)
    reasons = dict.fromkeys(step.fallback for step in explanation.steps if step.fallback)
    return "\n".join((*lines, *(f"fell back: {reason}" for reason in reasons)))


def nests(explanation: Explanation) -> str:
    """The loop nests in the text form of loop_ir/SPEC.md, each below a comment that says which step it is."""
    return "\n\n".join(
        f"// step {step.number}, {step.provider}: {_where(step)}".rstrip(": ") + f"\n{step.nest}"
        for step in explanation.steps
        if step.nest
    )


def memory(explanation: Explanation) -> str:
    """What lives at the peak of the temporaries, and every buffer with its life."""
    alive = explanation.alive_at_peak()
    total = explanation.temporary_bytes + explanation.library_bytes
    head = f"temporaries: {size(total)}; at their peak live {size(sum(b.bytes for b in alive))}"
    rows = [("bytes", "buffer", "from step", "through", "at the peak")]
    for buffer in sorted(explanation.buffers, key=lambda b: -b.bytes):
        mark = "yes" if buffer in alive else ""
        rows.append((size(buffer.bytes), buffer.name, str(buffer.first), str(buffer.last), mark))
    return "\n".join((head, *(table(rows) if len(rows) > 1 else ())))


def matches(explanation: Explanation) -> str:
    """What was matched and measured while compiling."""
    return "\n".join(explanation.notes) or "nothing was matched"


def fallbacks_of(explanation: Explanation) -> list[str]:
    """Each way in which the program runs slower than it could, with how often and what to do about it."""
    counts = Counter(step.fallback for step in explanation.steps if step.fallback)
    steps = [f"{reason}{f' ({count} times)' if count > 1 else ''}" for reason, count in counts.items()]
    return [*explanation.fallbacks, *steps]


def size(count: float) -> str:
    """Bytes with a binary unit, three digits."""
    unit = 0
    while count >= 1024 and unit < len(_SIZES) - 1:
        count, unit = count / 1024, unit + 1
    return f"{count:.{0 if unit == 0 else _decimals(count)}f} {_SIZES[unit]}"


def quantity(count: float) -> str:
    """A number with a metric prefix and a space behind it, three digits."""
    for prefix, scale in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= scale:
            return f"{count / scale:.{_decimals(count / scale)}f} {prefix}"
    return f"{count:.0f} "


def seconds(count: float) -> str:
    """A time with a unit, three digits."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if count >= scale:
            return f"{count / scale:.{_decimals(count / scale)}f} {unit}"
    return f"{count / 1e-9:.0f} ns"


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns beside each other; the last is not filled up."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _decimals(count: float) -> int:
    return 2 if count < 10 else 1 if count < 100 else 0


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _spread(program: Explanation) -> str:
    total = program.replicas * program.partitions
    return f", on {total} devices ({program.replicas} replicas x {program.partitions} partitions)" if total > 1 else ""


def _kinds(steps: Iterable[Step]) -> str:
    counts = Counter((step.kind, step.provider) for step in steps if step.kind != "view")
    parts = [
        f"{_count(count, _NOUNS.get(kind, kind))} ({_PROVIDERS.get(provider, provider)})"
        for (kind, provider), count in counts.most_common()
    ]
    return ", ".join(parts) or "none"


def _expected(program: Explanation) -> str:
    if not program.flops_per_second:
        return "unknown: nobody stated the roofline of this device"
    roofline = f"{quantity(program.flops_per_second)}flop/s and {size(program.bytes_per_second)}/s"
    return f"at least {seconds(program.seconds)}, each step by itself, of a device of {roofline}"


def _measured(program: Explanation, measured: Measured) -> str:
    share = f", of which the expected time is {program.seconds / measured.seconds:.0%}" if program.seconds else ""
    return f"{seconds(measured.seconds)}, median of {measured.rounds} launches on random arguments{share}"


def _slowest(program: Explanation) -> Iterator[str]:
    steps = sorted((step for step in merged(program.steps) if step.seconds), key=lambda step: -step.seconds)
    for step in steps[:_SLOWEST]:
        where = f", {_where(step)}" if _where(step) else ""
        share = step.seconds / program.seconds
        yield f"{share:4.0%} {seconds(step.seconds)}: {step.text}{where} ({_reason(program, step)})"


def _where(step: Step) -> str:
    """The user's line, from here on if it is below here; else what the framework calls the operation."""
    return step.source.removeprefix(f"{Path.cwd()}{os.sep}") or step.operation


def merged(steps: Iterable[Step]) -> list[Step]:
    """The steps, those of one number, which are one kernel and have one time, as one."""
    found: dict[int, Step] = {}
    for step in steps:
        before = found.get(step.number)
        found[step.number] = (
            step
            if before is None
            else replace(
                before,
                text=f"{before.text}; {step.text}",
                flops=before.flops + step.flops,
                bytes=before.bytes + step.bytes,
                seconds=before.seconds + step.seconds,
            )
        )
    return list(found.values())


def _reason(program: Explanation, step: Step) -> str:
    """What bounds the time of a step."""
    if step.flops / program.flops_per_second > step.bytes / program.bytes_per_second:
        return f"arithmetic: {quantity(step.flops)}flop"
    return f"memory: {size(step.bytes)} moved"
