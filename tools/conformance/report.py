"""Tables from result files."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

from tools.conformance.results import Record, Status, load


def rate(records: list[Record]) -> tuple[int, int]:
    """Passed, and all that count."""
    counted = [r for r in records if r.counts]
    return sum(r.status is Status.PASSED for r in counted), len(counted)


def table(path: Path, *, failures: bool = True) -> str:
    """Markdown: totals, a row a group with failures, and every failure with the first line of its cause."""
    header, records = load(path)
    passed, counted = rate(records)
    share = 100 * passed / counted if counted else 0.0
    others = {s: sum(r.status is s for r in records) for s in Status if s is not Status.PASSED}
    summary = ", ".join(f"{count} {status}" for status, count in others.items() if count)
    lines = [
        f"## {header['suite']} on {header['platform']}: {passed} of {counted} ({share:.2f} %)",
        "",
        "{date}, jax {jax}, torch {torch}, Python {python}, {machine}".format(**header),
        f"`{header['command']}`" + (f"; {summary}" if summary else ""),
        "",
        "| group | passed | of |",
        "|---|---|---|",
    ]
    groups: defaultdict[str, list[Record]] = defaultdict(list)
    for record in records:
        groups[record.group].append(record)
    for group, members in sorted(groups.items()):
        good, total = rate(members)
        if good != total:
            lines.append(f"| {group} | {good} | {total} |")
    if failures:
        lines += ["", "| failure | status | cause |", "|---|---|---|"]
        for record in records:
            if record.counts and record.status is not Status.PASSED:
                cause = record.message.strip().split("\n")[0][:200].replace("|", "\\|")
                lines.append(f"| {record.name} | {record.status} | {cause} |")
    return "\n".join(lines) + "\n"
