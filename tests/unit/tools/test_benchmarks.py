"""The speeds in docs/measurements.md: from kept results, and those that are kept."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tools import marked
from tools.benchmarks import crossings, measurements

ROOT = Path(__file__).resolve().parents[3]
ORIGIN = {
    "date": "2026-01-02",
    "command": "tools/bench x",
    "hardware": "a chip",
    "versions": {"jax": "0.1", "numpy": "2"},
}


def jax_row(name: str, ours: float, peer: float, error: str = "") -> dict[str, object]:
    return {"name": name, "ours": ours, "peer": peer, "error": error}


@pytest.fixture
def page(tmp_path: Path) -> Path:
    """One with the marks of every part, in a folder with results."""
    found = tmp_path / "README.md"
    parts = [line for name in measurements.PARTS for line in marked.marks(name, "tools.benchmarks.measurements")]
    found.write_text("\n".join(["before", *parts, "after", ""]))
    of_jax = {"rows": [jax_row("a", 1, 2), jax_row("b", 0, 0, "failed"), jax_row("c", 2, 1)]}
    of_torch = {
        "rows": [
            {"name": "d", "seconds": {"flagos": 1.0, "eager": 9.0, "default": 3.0, "reduce-overhead": 2.5}},
            {"name": "e", "seconds": {"eager": 9.0, "default": 3.0}},
        ]
    }
    of_kernels = {"rows": [{"name": "f", "unit": "TB/s", "copy": 4.0, "ours": 3.5, "torch": 1.0, "xla": 2.0}]}
    of_pytorch = {name: of_torch for name in measurements.PARTS if name.startswith("torch")}
    contents = dict.fromkeys(measurements.PARTS, of_jax) | of_pytorch
    contents |= {"fused_kernels": of_kernels, "jax_speed_accelerator": {**of_jax, "asking": [jax_row("g", 1, 1.5)]}}
    (tmp_path / "results").mkdir()
    for name, content in contents.items():
        (tmp_path / "results" / f"{name}.json").write_text(json.dumps(ORIGIN | content))
    return found


def part(page: Path, name: str) -> str:
    begin, end = marked.marks(name, "tools.benchmarks.measurements")
    return page.read_text().partition(begin)[2].partition(end)[0]


def test_parts_say_what_was_measured(page: Path) -> None:
    for _ in range(2):  # again over what it has written
        measurements.update(page, page.parent / "results")
        assert page.read_text().startswith("before\n") and page.read_text().endswith("after\n")
        of_jax = part(page, "jax_speed_host")
        assert "a chip; jax 0.1; 2026-01-02; `tools/bench x` ([file](results/jax_speed_host.txt))." in of_jax
        assert "Geometric mean 1.00, smallest 0.50:" in of_jax
        assert "| a | 2.00 | c | 0.50 |\n| b | not measured |  |  |" in of_jax
        assert "| g | 1.50 |  |  |" in part(page, "jax_speed_accelerator")
        assert "| d | 2.50 | e | not measured |" in part(page, "torch_speed_host")
        assert "| TB/s | copy | flagos | XLA |\n|---|---|---|---|\n| f | 4.00 | 3.50 | 2.00 |" in part(
            page, "fused_kernels"
        )


def test_a_page_without_marks(page: Path) -> None:
    page.write_text("nothing\n")
    with pytest.raises(ValueError, match=r"put the lines '<!-- jax_speed_host: written by tools\.benchmarks\."):
        measurements.update(page, page.parent / "results")


def test_the_page_says_what_is_kept(tmp_path: Path) -> None:
    before = (ROOT / "docs" / "measurements.md").read_text()
    results = tmp_path / "tools" / "benchmarks" / "results"
    results.mkdir(parents=True)
    for name in measurements.PARTS:
        kept = (ROOT / "tools" / "benchmarks" / "results" / f"{name}.json").read_text()
        (results / f"{name}.json").write_text(kept)
    page = tmp_path / "docs" / "measurements.md"
    page.parent.mkdir()
    page.write_text(before)
    measurements.update(page, results)
    assert page.read_text() == before


def test_crossings_are_counted_by_pairs_of_folders() -> None:
    counts = {"passes ir": 5, "compile passes": 2, "codegen passes": 1, "passes codegen": 3}
    assert crossings.Crossings.of(counts) == crossings.Crossings(folders=4, pairs=4, mutual=1, calls=11)


def test_crossings_of_a_program_are_those_of_its_stages(tmp_path: Path) -> None:
    sources = {"training step": crossings.program_sources()["training step"]}
    (found,) = crossings.count(sources, Path(measurements.__file__).resolve().parents[2]).values()
    assert found.folders >= len({"compile", "importer", "passes", "fusion", "loop_ir", "codegen", "ir"})
    assert found.calls > found.pairs > found.mutual
