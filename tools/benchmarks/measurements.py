"""The speeds in docs/measurements.md, from the kept results alone: python -m tools.benchmarks.measurements"""

from __future__ import annotations

import json
import math
import os
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from tools import marked

Content = dict[str, Any]
_ROOT = Path(__file__).resolve().parents[2]
_WRITER = "tools.benchmarks.measurements"
# What torch_speed.py measures beside Inductor's modes.
_OURS, _EAGER = "flagos", "eager"


def update(page: Path, results: Path) -> None:
    """Writes a part of ``page`` for each of PARTS from its file in the folder ``results``. ValueError where the page
    lacks a mark."""
    for name, part in PARTS.items():
        content = json.loads((results / f"{name}.json").read_text(encoding="utf-8"))
        link = f"{os.path.relpath(results, page.parent)}/{name}.txt"
        lines = [f"{_origin(content)} ([file]({link})).", "", *part(content), ""]
        marked.replace(page, *marked.marks(name, _WRITER), "\n".join(lines))


def _origin(content: Content) -> str:
    versions = content["versions"]
    frameworks = ", ".join(f"{name} {versions[name]}" for name in ("jax", "torch") if name in versions)
    return f"{content['hardware']}; {frameworks}; {content['date']}; `{content['command']}`"


def _of_jax(content: Content) -> list[str]:
    """Of JAX's programs the speedup over XLA, and over XLA where its program asks for a kernel."""
    lines = _speedups([(row["name"], _speedup(row)) for row in content["rows"]])
    asking = [(row["name"], _speedup(row)) for row in content.get("asking", ())]
    if not asking:
        return lines
    return [
        *lines,
        "",
        "Where XLA's program asks for the kernel of a library, and ours is as before:",
        "",
        *_speedups(asking),
    ]


def _speedup(row: Content) -> float | None:
    return None if row["error"] else row["peer"] / row["ours"]


def _of_torch(content: Content) -> list[str]:
    """Of PyTorch's programs the speedup over the best of Inductor's modes."""
    found = []
    for row in content["rows"]:
        peers = [seconds for name, seconds in row["seconds"].items() if name not in (_OURS, _EAGER)]
        found.append((row["name"], min(peers) / row["seconds"][_OURS] if peers and _OURS in row["seconds"] else None))
    return _speedups(found)


def _speedups(rows: Sequence[tuple[str, float | None]]) -> list[str]:
    known = [speedup for _, speedup in rows if speedup]
    mean = math.exp(statistics.fmean(map(math.log, known)))
    cells = [(name, f"{speedup:.2f}" if speedup else "not measured") for name, speedup in rows]
    cells += [("", "")] * (len(cells) % 2)
    half = len(cells) // 2
    return [
        f"Geometric mean {mean:.2f}, smallest {min(known):.2f}:",
        "",
        "| program | speedup | program | speedup |",
        "|---|---|---|---|",
        *(f"| {a} | {x} | {b} | {y} |" for (a, x), (b, y) in zip(cells[:half], cells[half:], strict=True)),
    ]


def _of_kernels(content: Content) -> list[str]:
    rows = content["rows"]
    names = [name for name in ("copy", "ours", "inductor", "xla") if name in rows[0]]
    titles = {"ours": "flagos", "inductor": "Inductor", "xla": "XLA"}
    return [
        f"| TB/s | {' | '.join(titles.get(name, name) for name in names)} |",
        "|---" * (len(names) + 1) + "|",
        *(f"| {row['name']} | {' | '.join(f'{row[name]:.2f}' for name in names)} |" for row in rows),
    ]


#: The parts of the page, by the file that each is made of.
PARTS: Final[dict[str, Callable[[Content], list[str]]]] = {
    "jax_speed_host": _of_jax,
    "jax_speed_everyday_host": _of_jax,
    "jax_speed_wild_host": _of_jax,
    "sharded_speed_host": _of_jax,
    "torch_speed_host": _of_torch,
    "fused_kernels": _of_kernels,
    "jax_speed_accelerator": _of_jax,
    "jax_speed_everyday_accelerator": _of_jax,
    "jax_speed_wild_accelerator": _of_jax,
    "torch_speed_accelerator": _of_torch,
}


if __name__ == "__main__":
    update(_ROOT / "docs" / "measurements.md", _ROOT / "tools" / "benchmarks" / "results")
