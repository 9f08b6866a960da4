"""The generated sources of typical programs are what the files ``*.expected`` say.

FLAGOS_TEST_REFRESH=1 writes the files anew; the difference is then for a reader to judge.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from flagos_backend.codegen.triton import prepare, schedule
from flagos_backend.importer import import_module
from flagos_backend.loop_ir.flat import flatten
from flagos_backend.loop_ir.region import Region
from programs import hlo_bytes
from support.passes import for_accelerator
from support.triton_programs import CASES


@pytest.mark.parametrize("name", CASES)
def test_source(name: str) -> None:
    target, function, shapes = CASES[name]
    flat = flatten(for_accelerator(import_module(hlo_bytes(function, *shapes))).entry)
    items = schedule(flat, target).items
    sources = [prepare(item, target).source if isinstance(item, Region) else f"# {item}\n" for item in items]
    content = "\n\n".join(sources)
    path = Path(__file__).with_name(f"{name}.expected")
    if os.environ.get("FLAGOS_TEST_REFRESH") == "1":
        path.write_text(content)
    assert content == path.read_text(), f"differs from {path.name}"
