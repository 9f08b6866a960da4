"""The conformance figures of docs/measurements.md, between two marks, from the published results and nothing else."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from tools import marked
from tools.conformance.records import HOST

BEGIN, END = marked.marks("conformance", "tools.conformance publish")


def update(page: Path, folder: Path) -> None:
    """Writes a row for each suite in ``folder``. ValueError without the marks."""
    marked.replace(page, BEGIN, END, block(folder, os.path.relpath(folder, page.parent)))


def block(folder: Path, link: str) -> str:
    """Markdown: one row a suite, with the dates of its runs and a link to its table, which is in ``link``."""
    rows = [_row(json.loads(path.read_text()), f"{link}/{path.stem}.md") for path in sorted(folder.glob("*.json"))]
    return "\n".join(["| suite | passed | of what passes on | not passed | run |", "|---|---|---|---|---|", *rows, ""])


def _row(kept: dict[str, Any], link: str) -> str:
    share = 100 * kept["passed"] / kept["counted"] if kept["counted"] else 0.0
    dates = sorted({run["date"] for run in kept["runs"]})
    run = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    missing = kept["counted"] - kept["passed"]
    cells = (f"[{_name(kept)}]({link})", f"{share:.2f} %", f"{kept['peer']}: {kept['counted']}", str(missing), run)
    return f"| {' | '.join(cells)} |"


def _name(kept: dict[str, Any]) -> str:
    device = kept.get("device", HOST.kind)
    return kept["suite"] if device == HOST.kind else f"{kept['suite']}, {device}"
