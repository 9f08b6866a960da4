"""LightX2V itself on the platform flagos, from the checkout that LIGHTX2V_SOURCE names."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tools.conformance import lightx2v

_SOURCE = os.environ.get("LIGHTX2V_SOURCE", "")


@pytest.mark.skipif(not _SOURCE, reason="LIGHTX2V_SOURCE names no checkout of LightX2V")
def test_blocks_and_operators(tmp_path: Path) -> None:
    results = lightx2v.run(tmp_path / "out.json", Path(_SOURCE), only="", resume=False, timeout=120)
    assert [f"{r.name}: {r.message}" for r in results.records.values() if r.counts and r.status != "passed"] == []
