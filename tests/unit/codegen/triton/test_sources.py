"""The loop nests of typical programs, and the sources generated for them, are what the files ``*.expected`` say. A nest
stands above its source, as comments.

FLAGOS_TEST_REFRESH=1 writes the files anew; the difference is then for a reader to judge.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from flagos_backend.codegen.triton import RegionKernel, prepare, schedule
from flagos_backend.importer import import_module
from flagos_backend.loop_ir.flat import flatten
from flagos_backend.loop_ir.printer import print_nest
from flagos_backend.loop_ir.region import Region
from programs import hlo_bytes
from support.passes import for_accelerator
from support.triton_programs import CASES


def with_nest(kernel: RegionKernel) -> str:
    """Arrays have the names that they have in the source, which are the same in all versions of JAX."""
    names = {array: f"in{number}" for number, array in enumerate(kernel.inputs)}
    names |= {array: f"out{number}" for number, array in enumerate(kernel.outputs)}
    return "".join(f"# {line}\n" for line in print_nest(kernel.region, names).splitlines()) + f"\n{kernel.source}"


@pytest.mark.parametrize("name", CASES)
def test_source(name: str) -> None:
    target, function, shapes = CASES[name]
    flat = flatten(for_accelerator(import_module(hlo_bytes(function, *shapes))).entry)
    items = schedule(flat, target).items
    sources = [with_nest(prepare(item, target)) if isinstance(item, Region) else f"# {item}\n" for item in items]
    content = "\n\n".join(sources)
    path = Path(__file__).with_name(f"{name}.expected")
    if os.environ.get("FLAGOS_TEST_REFRESH") == "1":
        path.write_text(content)
    assert content == path.read_text(), f"differs from {path.name}"
