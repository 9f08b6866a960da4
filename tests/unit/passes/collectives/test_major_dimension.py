"""Collectives along inner dimensions, moved to a first one: each device computes what it did, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest

from flagos_backend.importer import import_module
from flagos_backend.ir.attributes import CollectiveAttributes
from flagos_backend.ir.effects import COLLECTIVES
from flagos_backend.ir.types import ArrayShape
from flagos_backend.passes.collectives.major_dimension import make_split_dimension_major
from support.against_xla import hlo_of_text
from support.devices import transformed_on_devices

DEVICES = 4
SUM = """
sum { a = f32[] parameter(0)
  b = f32[] parameter(1)
  ROOT r = f32[] add(a, b) }
"""
ALL = "channel_id=1, replica_groups={{2,0,1,3}}"
PAIRS = "channel_id=1, replica_groups={{3,1},{0,2}}"
GLOBAL = "use_global_device_ids=true"


@pytest.mark.parametrize(
    ("collective", "parts"),
    [
        (f"f32[8,24,4] all-gather(s), {ALL}, {GLOBAL}, dimensions={{1}}", (4, 8, 6, 4)),
        (f"f32[8,6,16] all-gather(s), {ALL}, {GLOBAL}, dimensions={{2}}", (4, 8, 6, 4)),
        (f"f32[8,12,4] all-gather(s), {PAIRS}, {GLOBAL}, dimensions={{1}}", (2, 8, 6, 4)),
        (f"f32[32,6,4] all-gather(s), {ALL}, {GLOBAL}, dimensions={{0}}", (32, 6, 4)),
        (f"f32[8,6,1] reduce-scatter(s), {ALL}, {GLOBAL}, dimensions={{2}}, to_apply=sum", (1, 8, 6, 1)),
        (f"f32[8,3,4] reduce-scatter(s), {PAIRS}, {GLOBAL}, dimensions={{1}}, to_apply=sum", (1, 8, 3, 4)),
        (f"f32[2,6,4] reduce-scatter(s), {ALL}, {GLOBAL}, dimensions={{0}}, to_apply=sum", (2, 6, 4)),
        (f"f32[8,6,4] all-to-all(s), {ALL}, dimensions={{2}}", (4, 8, 6, 1)),
        ("f32[8,6,4] all-to-all(s), channel_id=1, dimensions={2}", (4, 8, 6, 1)),
        (f"f32[8,6,4] all-to-all(s), {PAIRS}, dimensions={{1}}", (2, 8, 3, 4)),
        (f"f32[8,6,4] all-to-all(s), {ALL}, dimensions={{0}}", (8, 6, 4)),
    ],
)
@pytest.mark.parametrize("is_root", [True, False])
def test_each(collective: str, parts: tuple[int, ...], is_root: bool, rng: np.random.Generator) -> None:
    made = collective.partition(" ")[0]
    rest = f"c = {collective}\n ROOT r = {made} cosine(c)"
    text = f"""{SUM}ENTRY e {{ x = f32[8,6,4] parameter(0)
      s = f32[8,6,4] sine(x)
      {f"ROOT c = {collective}" if is_root else rest} }}"""
    after = transformed_on_devices(make_split_dimension_major, text, rng, partitions=DEVICES)
    (left,) = (i for i in after.entry.instructions if i.opcode in COLLECTIVES)
    assert left.attributes_as(CollectiveAttributes).dimension == 0
    assert isinstance(left.shape, ArrayShape) and left.shape.dims == parts


def test_nothing_to_move(rng: np.random.Generator) -> None:
    """Several arrays in one, and none at all, stay as they are."""
    text = f"""ENTRY e {{ x = f32[8,0] parameter(0)
      y = f32[8,6] parameter(1)
      a = f32[8,0] all-gather(x), {ALL}, {GLOBAL}, dimensions={{1}}
      b = (f32[8,24], f32[8,24]) all-gather(y, y), {ALL}, {GLOBAL}, dimensions={{1}}
      c = f32[8,24] get-tuple-element(b), index=1
      ROOT r = (f32[8,0], f32[8,24]) tuple(a, c) }}"""
    module = import_module(hlo_of_text(text), num_partitions=DEVICES)
    assert make_split_dimension_major(module) is module


def test_replicas_that_name_no_groups(rng: np.random.Generator) -> None:
    text = """ENTRY e { x = f32[8,6,4] parameter(0)
      ROOT a = f32[8,6,4] all-to-all(x), dimensions={1} }"""
    transformed_on_devices(make_split_dimension_major, text, rng, replicas=2, partitions=2)
