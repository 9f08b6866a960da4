"""All-reduces of constants: gone, and each device computes what it did."""

from __future__ import annotations

import numpy as np
import pytest

from flagos_backend.ir.effects import COLLECTIVES
from flagos_backend.ir.hlo import Module
from flagos_backend.passes.collectives.constant_sums import fold_constant_sums
from support.devices import transformed_on_devices

COMBINERS = """
{name} {{ a = {type}[] parameter(0)
  b = {type}[] parameter(1)
  ROOT r = {type}[] {name}(a, b) }}
"""


def folded(operand: str, reduce: str, rng: np.random.Generator, combiner: str = "add", of: str = "f32") -> Module:
    """Of four devices: the same on each, bit for bit."""
    head = COMBINERS.format(name=combiner, type=of)
    text = f"{head}ENTRY e {{ x = f32[3] parameter(0)\n {operand}\n {reduce}, to_apply={combiner} }}"
    return transformed_on_devices(fold_constant_sums, text, rng, partitions=4)


def meets(module: Module) -> bool:
    return any(i.opcode in COLLECTIVES for i in module.entry.instructions)


ALL = "channel_id=1, replica_groups={{0,1,2,3}}, use_global_device_ids=true"
PAIRS = "channel_id=1, replica_groups={{0,2},{1,3}}, use_global_device_ids=true"
UNLIKE = "channel_id=1, replica_groups={{0,2,1},{3}}, use_global_device_ids=true"


@pytest.mark.parametrize("groups", [ALL, PAIRS])
@pytest.mark.parametrize("combiner", ["add", "minimum", "maximum"])
@pytest.mark.parametrize(
    ("of", "operand"),
    [
        ("f32", "c = f32[3] constant({0.1, -inf, -0})"),
        ("s32", "c = s32[3] constant({2147483647, -5, 0})"),
        ("u32", "c = u32[3] constant({4294967295, 7, 0})"),
    ],
)
def test_a_constant(groups: str, combiner: str, of: str, operand: str, rng: np.random.Generator) -> None:
    assert not meets(folded(operand, f"ROOT r = {of}[3] all-reduce(c), {groups}", rng, combiner, of))


def test_a_scalar_that_is_spread(rng: np.random.Generator) -> None:
    operand = "s = f32[] constant(0.3)\n c = f32[2,3] broadcast(s), dimensions={}"
    assert not meets(folded(operand, f"ROOT r = f32[2,3] all-reduce(c), {PAIRS}", rng))


@pytest.mark.parametrize(
    ("operand", "shape", "groups", "combiner"),
    [
        ("c = f32[3] negate(x)", "f32[3]", ALL, "add"),
        ("c = f32[3] constant({1, 2, 3})", "f32[3]", UNLIKE, "add"),
        ("c = f32[3] constant({1, 2, 3})", "f32[3]", ALL, "multiply"),
        ("c = f32[2,3] broadcast(x), dimensions={1}", "f32[2,3]", ALL, "add"),
    ],
)
def test_what_stays(operand: str, shape: str, groups: str, combiner: str, rng: np.random.Generator) -> None:
    assert meets(folded(operand, f"ROOT r = {shape} all-reduce(c), {groups}", rng, combiner))
