"""Collectives of devices that are alone in their groups: gone, and each device computes what it did, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest

from flagos_backend.errors import CollectiveGroupMismatch
from flagos_backend.importer import import_module
from flagos_backend.ir.effects import COLLECTIVES
from flagos_backend.ir.hlo import Module
from flagos_backend.passes.collectives.single_participant import eliminate_trivial_collectives
from support.against_xla import hlo_of_text
from support.devices import run_module_on_devices, transformed_on_devices

SUM = """
sum { a = f32[] parameter(0)
  b = f32[] parameter(1)
  ROOT r = f32[] add(a, b) }
"""
EACH = "channel_id=1, replica_groups={{0},{1}}"
GLOBAL = "use_global_device_ids=true"


def single(body: str, partitions: int, rng: np.random.Generator) -> Module:
    """The program after it; it computes the same."""
    text = f"{SUM}ENTRY e {{ x = f32[4,6] parameter(0)\n {body} }}"
    return transformed_on_devices(eliminate_trivial_collectives, text, rng, partitions=partitions)


def left(module: Module) -> list[str]:
    return [str(i.opcode) for i in module.entry.instructions if i.opcode in COLLECTIVES]


@pytest.mark.parametrize(
    ("collective", "partitions"),
    [
        ("f32[4,6] all-reduce(s), to_apply=sum", 1),
        ("f32[4,6] all-reduce(s), channel_id=1, to_apply=sum", 1),
        (f"f32[4,6] all-reduce(s), {EACH}, {GLOBAL}, to_apply=sum", 2),
        (f"f32[4,6] all-gather(s), {EACH}, {GLOBAL}, dimensions={{1}}", 2),
        (f"f32[4,6] reduce-scatter(s), {EACH}, {GLOBAL}, dimensions={{1}}, to_apply=sum", 2),
        (f"f32[4,6] all-to-all(s), {EACH}, dimensions={{0}}", 2),
        ("f32[4,6] all-to-all(s), channel_id=1, dimensions={0}", 1),
        ("f32[4,6] collective-permute(s), channel_id=1, source_target_pairs={{1,1},{0,0}}", 2),
        ("f32[4,6] collective-broadcast(s), channel_id=1, replica_groups={{1},{0}}", 2),
    ],
)
@pytest.mark.parametrize("is_root", [True, False])
def test_each(collective: str, partitions: int, is_root: bool, rng: np.random.Generator) -> None:
    end = f"ROOT c = {collective}" if is_root else f"c = {collective}\n ROOT r = f32[4,6] cosine(c)"
    after = single(f"s = f32[4,6] sine(x)\n {end}", partitions, rng)
    assert not left(after)


def test_several_arrays(rng: np.random.Generator) -> None:
    body = f"""s = f32[4,6] sine(x)
      a = (f32[4,6], f32[4,6]) all-reduce(x, s), {EACH}, {GLOBAL}, to_apply=sum
      t = (f32[4,6]) all-to-all(s), {EACH}
      b = f32[4,6] get-tuple-element(a), index=1
      c = f32[4,6] get-tuple-element(t), index=0
      ROOT r = f32[4,6] subtract(b, c)"""
    after = single(body, 2, rng)
    assert not left(after)


@pytest.mark.parametrize(
    ("collective", "partitions"),
    [
        ("f32[4,6] all-reduce(s), channel_id=1, to_apply=sum", 2),
        ("f32[4,6] all-reduce(s), channel_id=1, replica_groups={{0,1}}, use_global_device_ids=true, to_apply=sum", 2),
        (
            "f32[4,12] all-gather(s), channel_id=1, replica_groups={{0,1}}, use_global_device_ids=true, dimensions={1}",
            2,
        ),
        ("f32[4,6] collective-permute(s), channel_id=1, source_target_pairs={{1,0},{0,1}}", 2),
        ("f32[4,6] collective-permute(s), channel_id=1, source_target_pairs={{1,1}}", 2),
        ("f32[4,6] collective-permute(s), channel_id=1, source_target_pairs={}", 1),
    ],
)
def test_devices_that_meet(collective: str, partitions: int) -> None:
    text = f"{SUM}ENTRY e {{ x = f32[4,6] parameter(0)\n s = f32[4,6] sine(x)\n ROOT c = {collective} }}"
    module = import_module(hlo_of_text(text), num_partitions=partitions)
    assert eliminate_trivial_collectives(module) is module


def test_the_number_of_the_only_device(rng: np.random.Generator) -> None:
    body = """p = u32[] partition-id()
      r = u32[] replica-id()
      n = u32[] add(p, r)
      f = f32[] convert(n)
      b = f32[4,6] broadcast(f), dimensions={}
      ROOT s = f32[4,6] add(x, b)"""
    for partitions in (1, 2):
        after = single(body, partitions, rng)
        numbers = [str(i.opcode) for i in after.entry.instructions if str(i.opcode).endswith("-id")]
        assert numbers == (["partition-id"] if partitions > 1 else [])


def test_a_device_that_is_in_no_group_is_told(rng: np.random.Generator) -> None:
    text = f"""{SUM}ENTRY e {{ x = f32[4,6] parameter(0)
      ROOT c = f32[4,6] all-reduce(x), channel_id=1, replica_groups={{{{0}}}}, {GLOBAL}, to_apply=sum }}"""
    module = import_module(hlo_of_text(text), num_partitions=2)
    assert eliminate_trivial_collectives(module) is module
    with pytest.raises(CollectiveGroupMismatch):
        run_module_on_devices(module, [[np.zeros((4, 6), np.float32)]] * 2, partitions=2)
