"""Sums of which each device takes a part: the part is the same, bit for bit, and nobody makes the whole."""

from __future__ import annotations

import numpy as np
import pytest

from flagos_backend.ir.effects import COLLECTIVES
from flagos_backend.passes.collectives.reduce_scatter_creator import create_reduce_scatters
from support.devices import transformed_on_devices

DEVICES = 4
SUM = """
sum { a = f32[] parameter(0)
  b = f32[] parameter(1)
  ROOT r = f32[] add(a, b) }
"""
ALL = "replica_groups={{0,1,2,3}}"
START = """p = u32[] partition-id()
  table = s32[4] constant({TABLE})
  own = s32[1] dynamic-slice(table, p), dynamic_slice_sizes={1}
  start = s32[] reshape(own)
  zero = s32[] constant(0)"""


def collectives(body: str, rng: np.random.Generator, *, table: str = "0,2,4,6", groups: str = ALL) -> list[str]:
    """The opcodes of those that are left; each device's results are the same."""
    start = START.replace("TABLE", table)
    text = f"""{SUM}ENTRY e {{ x = f32[8,12] parameter(0)
      {start}
      s = f32[8,12] sine(x)
      t = f32[8,12] all-reduce(s), channel_id=1, {groups}, use_global_device_ids=true, to_apply=sum
      {body} }}"""
    after = transformed_on_devices(create_reduce_scatters, text, rng, partitions=DEVICES)
    return [str(i.opcode) for i in after.entry.instructions if i.opcode in COLLECTIVES]


ROWS = "ROOT r = f32[2,12] dynamic-slice(t, start, zero), dynamic_slice_sizes={2,12}"
COLUMNS = "ROOT r = f32[8,3] dynamic-slice(t, zero, start), dynamic_slice_sizes={8,3}"
HALF_FLOATS = "ROOT r = f32[4,12] dynamic-slice(t, start, zero), dynamic_slice_sizes={4,12}"


@pytest.mark.parametrize(
    ("body", "options"),
    [
        pytest.param(ROWS, {}, id="rows"),
        pytest.param(COLUMNS, {"table": "0,3,6,9"}, id="columns"),
        pytest.param(ROWS, {"table": "6,0,4,2", "groups": "replica_groups={{1,3,2,0}}"}, id="another order"),
        pytest.param(HALF_FLOATS, {"table": "0,4,0,4", "groups": "replica_groups={{0,1},{2,3}}"}, id="pairs"),
        pytest.param(HALF_FLOATS, {"table": "0,0,4,4", "groups": "replica_groups={{0,2},{1,3}}"}, id="other pairs"),
    ],
)
def test_parts(body: str, options: dict[str, str], rng: np.random.Generator) -> None:
    assert collectives(body, rng, **options) == ["reduce-scatter"]


@pytest.mark.parametrize(
    ("body", "options"),
    [
        pytest.param(ROWS, {"table": "0,2,6,4"}, id="parts of others"),
        pytest.param(ROWS, {"table": "0,1,2,3"}, id="parts that overlap"),
        pytest.param(HALF_FLOATS, {"table": "0,4,0,4"}, id="fewer parts than devices"),
        pytest.param(
            ROWS, {"table": "0,2,4,6", "groups": "replica_groups={{0,1},{2,3}}"}, id="more parts than devices"
        ),
        pytest.param(
            "ROOT r = f32[2,3] dynamic-slice(t, start, start), dynamic_slice_sizes={2,3}", {}, id="of two dimensions"
        ),
        pytest.param(
            "d = f32[2,12] dynamic-slice(t, start, zero), dynamic_slice_sizes={2,12}\n"
            "ROOT r = (f32[2,12], f32[8,12]) tuple(d, t)",
            {},
            id="the whole is read",
        ),
        pytest.param(
            "q = s32[] convert(p)\n ROOT r = f32[2,12] dynamic-slice(t, q, zero), dynamic_slice_sizes={2,12}",
            {},
            id="no table",
        ),
    ],
)
def test_what_stays_a_sum(body: str, options: dict[str, str], rng: np.random.Generator) -> None:
    assert collectives(body, rng, **options) == ["all-reduce"]


def test_in_a_loop(rng: np.random.Generator) -> None:
    text = f"""{SUM}
    below {{ c = (s32[], f32[8,12]) parameter(0)
      i = s32[] get-tuple-element(c), index=0
      n = s32[] constant(3)
      ROOT r = pred[] compare(i, n), direction=LT }}
    iteration {{ c = (s32[], f32[8,12]) parameter(0)
      i = s32[] get-tuple-element(c), index=0
      x = f32[8,12] get-tuple-element(c), index=1
      {START.replace("TABLE", "0,2,4,6")}
      t = f32[8,12] all-reduce(x), channel_id=1, {ALL}, use_global_device_ids=true, to_apply=sum
      d = f32[2,12] dynamic-slice(t, start, zero), dynamic_slice_sizes={{2,12}}
      g = f32[8,12] all-gather(d), channel_id=2, {ALL}, dimensions={{0}}, use_global_device_ids=true
      h = f32[8,12] tanh(g)
      one = s32[] constant(1)
      next = s32[] add(i, one)
      ROOT r = (s32[], f32[8,12]) tuple(next, h) }}
    ENTRY e {{ x = f32[8,12] parameter(0)
      i = s32[] constant(0)
      c = (s32[], f32[8,12]) tuple(i, x)
      w = (s32[], f32[8,12]) while(c), condition=below, body=iteration
      ROOT r = f32[8,12] get-tuple-element(w), index=1 }}"""
    after = transformed_on_devices(create_reduce_scatters, text, rng, partitions=DEVICES)
    found = {str(i.opcode) for computation in after.computations() for i in computation.instructions}
    assert "reduce-scatter" in found and "all-reduce" not in found
