"""Scaling: what is counted, and the model of links."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from benchmarks.scaling.collectives import Timed
from benchmarks.scaling.model import Link, efficiency, fit

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize(
    ("name", "factor"),
    [("all-reduce", 1.5), ("all-gather", 0.75), ("reduce-scatter", 0.75), ("all-to-all", 0.75), ("permute", 1.0)],
)
def test_bus_bandwidth_is_that_of_nccl_tests(name: str, factor: float) -> None:
    assert Timed(name, 4000, 2.0).bus_bandwidth(4) == pytest.approx(2000 * factor)


def test_a_link_is_found_from_what_it_takes(rng: np.random.Generator) -> None:
    for devices in (2, 4, 8):
        link = Link(float(rng.uniform(1e-6, 1e-4)), float(rng.uniform(1e-12, 1e-9)))
        rows = [Timed("all-reduce", size, link.halving(size, devices)) for size in (1 << 10, 1 << 16, 1 << 28)]
        found = fit([*rows, Timed("permute", 1, 1.0)], devices)
        assert found.alpha == pytest.approx(link.alpha, rel=1e-6)
        assert found.beta == pytest.approx(link.beta, rel=1e-6)
    with pytest.raises(ValueError, match="two sizes"):
        fit([Timed("all-reduce", 1024, 1.0), Timed("all-reduce", 1024, 2.0), Timed("permute", 1, 1.0)], 2)


def test_one_device_reduces_nothing_and_slow_links_cost() -> None:
    fast, slow = Link(1e-6, 1e-12), Link(1e-5, 1e-10)
    assert fast.all_reduce(1e9, 1) == 0
    assert fast.all_reduce(1e9, 8) == min(fast.ring(1e9, 8), fast.halving(1e9, 8)) < slow.all_reduce(1e9, 8)
    assert efficiency(0.1, 0.0, 0.0, 1, fast, slow, 8) == 1
    found = [efficiency(0.1, 1e9, 0.0, count, fast, slow, 8) for count in (8, 64, 512, 4096)]
    assert found == sorted(found, reverse=True)
    assert efficiency(0.1, 1e9, 0.5, 64, fast, slow, 8) > found[1]


def test_the_page_says_what_the_model_gives() -> None:
    text = (ROOT / "docs" / "scaling.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|$", text, re.MULTILINE)
    assert [int(row[0]) for row in rows] == [8, 64, 256, 1024, 4096]
    within = fit([Timed("all-reduce", 16 << 10, 8.3e-6), Timed("all-reduce", 4 << 20, 34.8e-6)], 2)
    for count, *said in rows:
        beyond = [Link(10e-6, 1 / bandwidth) for bandwidth in (50e9, 12.5e9)]
        found = [
            efficiency(13.14e-3, 542e6, overlap, int(count), within, link, 8) for link in beyond for overlap in (0, 0.5)
        ]
        assert [f"{value:.2f}" for value in found] == said
