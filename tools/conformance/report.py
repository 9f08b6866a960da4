"""What is kept of a run: counts a group and every test that did not pass, as JSON and as a table made from it."""

from __future__ import annotations

import dataclasses
import json
import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tools.conformance.causes import cause_of
from tools.conformance.records import HOST, Record, Status, load


def rate(records: Sequence[Record]) -> tuple[int, int]:
    """Passed, and all that count."""
    counted = [r for r in records if r.counts]
    return sum(r.status is Status.PASSED for r in counted), len(counted)


def summary(path: Path) -> str:
    """One line for a result file."""
    header, records = load(path)
    others = _others(Counter(record.status for record in records))
    return f"{title(header)}: {_share(*rate(records))}; {others}"


def missing(path: Path) -> list[str]:
    """The tests of a result file that count and did not pass, each with its cause."""
    return [f"{r.name}: {cause_of(r)}" for r in load(path)[1] if r.counts and r.status is not Status.PASSED]


def title(header: Mapping[str, Any]) -> str:
    """What a run, or what is kept of several, is about."""
    device = header.get("device", HOST.kind)  # what was kept before there was a device in it is of the host
    return f"{header['suite']} on {header['platform']}" + (f", {device}" if device != HOST.kind else "")


def publish(paths: Sequence[Path], folder: Path) -> list[Path]:
    """Writes SUITE.json and SUITE.md into ``folder``, or SUITE_DEVICE where that is not the host, for each of which
    ``paths`` has parts; later ones win."""
    parts: defaultdict[str, list[Path]] = defaultdict(list)
    for path in paths:
        header, _ = load(path)
        parts[_file_name(header)].append(path)
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, members in sorted(parts.items()):
        kept = condense(members)
        target = folder / name
        target.with_suffix(".json").write_text(json.dumps(kept, indent=1) + "\n")
        target.with_suffix(".md").write_text(table(kept))
        written += [target.with_suffix(".json"), target.with_suffix(".md")]
    return written


def renew(paths: Sequence[Path], folder: Path) -> list[Path]:
    """As publish, but keeps what is in ``folder`` and takes from ``paths`` only the tests that had not passed there: of
    the others no more than their number is kept. Raises ValueError where one of those counts and has not passed now."""
    written = []
    for path in paths:
        header, records = load(path)
        target = (folder / _file_name(header)).with_suffix(".json")
        kept = _renewed(json.loads(target.read_text()), header, records)
        target.write_text(json.dumps(kept, indent=1) + "\n")
        target.with_suffix(".md").write_text(table(kept))
        written += [target, target.with_suffix(".md")]
    return written


def _file_name(header: Mapping[str, str]) -> str:
    return "_".join(header["suite"].split() + ([header["device"]] if header["device"] != HOST.kind else []))


def _renewed(kept: dict[str, Any], header: Mapping[str, str], records: Sequence[Record]) -> dict[str, Any]:
    before = {fields["name"]: fields["status"] for fields in kept["not passed"]}
    now = {record.name: record for record in records if record.name in before}
    lost = [r.name for r in records if r.name not in before and r.counts and r.status is not Status.PASSED]
    if lost or kept["platform"] != header["platform"]:
        raise ValueError(f"they are of another platform, or had passed where they count: publish all of {lost}")
    groups = {group: Counter(counts) for group, counts in kept["groups"].items()}
    for name, record in now.items():
        groups[record.group].subtract([before[name]])
        groups[record.group].update([record.status])
    totals = sum(groups.values(), Counter[str]())
    failures = [now[f["name"]] if f["name"] in now else _record(f) for f in kept["not passed"]]
    not_applicable = Counter(_first_line(r.message) for r in now.values() if r.status is Status.NOT_APPLICABLE)
    return {
        **kept,
        "passed": totals[Status.PASSED],
        "counted": sum(count for status, count in totals.items() if Status(status).counts),
        "others": _others(totals),
        "runs": [*kept["runs"], {**header, "command": _without_folders(header["command"])}],
        "groups": {group: {s: n for s, n in counts.items() if n} for group, counts in groups.items()},
        "not passed": [_kept(r) for r in failures if r.counts and r.status is not Status.PASSED],
        "not applicable": dict((Counter(kept["not applicable"]) + not_applicable).most_common()),
    }


def _record(fields: Mapping[str, Any]) -> Record:
    return Record(**{**fields, "status": Status(fields["status"])})


def _kept(record: Record) -> dict[str, Any]:
    return dataclasses.asdict(dataclasses.replace(record, message=_without_folders(record.message)))


def condense(paths: Sequence[Path]) -> dict[str, Any]:
    """The result files of one suite as one object; of tests that passed, were skipped or do not apply only counts, with
    what is to be said of those that passed."""
    headers, merged = [], {}
    for path in paths:
        header, records = load(path)
        headers.append({**header, "command": _without_folders(header["command"])})
        for record in records:
            merged[record.name] = dataclasses.replace(record, message=_without_folders(record.message))
    if len({header["platform"] for header in headers}) > 1:
        raise ValueError(f"these files are of different platforms, publish each alone: {', '.join(map(str, paths))}")
    records = list(merged.values())
    groups: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for record in records:
        groups[record.group][record.status] += 1
    passed, counted = rate(records)
    not_applicable, refused = (
        Counter(_first_line(r.message) for r in records if r.status is status)
        for status in (Status.NOT_APPLICABLE, Status.REFUSED)
    )
    return {
        "suite": headers[0]["suite"],
        "platform": headers[0]["platform"],
        "device": headers[0]["device"],
        "peer": headers[0]["peer"],
        "passed": passed,
        "counted": counted,
        "others": _others(Counter(record.status for record in records)),
        "runs": headers,
        "groups": {group: dict(counts) for group, counts in sorted(groups.items())},
        "not passed": [dataclasses.asdict(r) for r in records if r.counts and r.status is not Status.PASSED],
        "not applicable": dict(not_applicable.most_common()),
        "refused": dict(refused.most_common()),
        "remarks": dict(Counter(r.message for r in records if r.status is Status.PASSED and r.message)),
    }


def table(kept: dict[str, Any]) -> str:
    """Markdown: totals, the runs, a row a group, a row a cause, and every test that did not pass."""
    lines = [
        f"# {title(kept)}: {_share(kept['passed'], kept['counted'])}",
        "",
        "Generated by `python -m tools.conformance publish`. "
        f"Only what {kept['peer']} passes on the same machine counts.",
        f"Beside these: {kept['others']}.",
        "",
    ]
    for remark, count in kept.get("remarks", {}).items():
        lines[-1:] = [f"Of what passed, {count} are {remark}.", ""]
    lines += [
        "- {date}: `{command}`, jax {jax}, torch {torch}, Python {python}, {machine}".format(**r) for r in kept["runs"]
    ]
    lines += ["", "| group | passed | of |", "|---|---|---|"]
    for group, counts in kept["groups"].items():
        counted = sum(n for status, n in counts.items() if Status(status).counts)
        lines.append(f"| {group} | {counts.get(Status.PASSED, 0)} | {counted} |")
    if kept.get("refused"):
        lines += ["", "| refused | tests |", "|---|---|"]
        lines += [f"| {_cell(reason)} | {count} |" for reason, count in kept["refused"].items()]
    failures = [_record(fields) for fields in kept["not passed"]]
    causes = Counter(cause_of(record) for record in failures)
    lines += ["", "| cause | tests |", "|---|---|"]
    lines += [f"| {_cell(cause)} | {count} |" for cause, count in causes.most_common()]
    lines += ["", "| not passed | status | cause |", "|---|---|---|"]
    lines += [f"| {_cell(record.name)} | {record.status} | {_cell(cause_of(record))} |" for record in failures]
    return "\n".join(lines) + "\n"


def _share(passed: int, counted: int) -> str:
    return f"{passed} of {counted} ({100 * passed / counted if counted else 0:.2f} %)"


def _others(counts: Mapping[str, int]) -> str:
    told = [s for s in Status if s is not Status.PASSED and (counts.get(s) or s is not Status.REFUSED)]
    return ", ".join(f"{counts.get(status, 0)} {status}" for status in told)


def _without_folders(text: str) -> str:
    """Where files lay on the machine of the run says nothing to others: their names are kept."""
    return re.sub(r"(?<![\w./:])/(?:[\w.+@-]+/)+", "", text)


def _first_line(message: str) -> str:
    return message.strip().split("\n")[0][:200]


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
