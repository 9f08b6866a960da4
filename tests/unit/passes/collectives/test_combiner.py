"""Collectives that become one: each device computes what it did, bit for bit, with fewer of them."""

from __future__ import annotations

import numpy as np
import pytest

from flagos_backend.importer import import_module
from flagos_backend.ir.effects import COLLECTIVES
from flagos_backend.ir.hlo import Module
from flagos_backend.ir.opcode import Opcode
from flagos_backend.ir.types import TupleShape
from flagos_backend.passes.collectives import combiner as combining
from flagos_backend.passes.collectives.combiner import combine_collectives
from support.against_xla import hlo_of_text
from support.devices import transformed_on_devices

DEVICES = 4
SUM = """
sum { a = f32[] parameter(0)
  b = f32[] parameter(1)
  ROOT r = f32[] add(a, b) }
largest { a = f32[] parameter(0)
  b = f32[] parameter(1)
  ROOT r = f32[] maximum(a, b) }
"""
ALL = "replica_groups={{0,1,2,3}}, use_global_device_ids=true"
PAIRS = "replica_groups={{0,1},{2,3}}, use_global_device_ids=true"


def combined(body: str, rng: np.random.Generator, dims: str = "8,4") -> list[str]:
    """The collectives that are left, with how many arrays they have; the results are the same."""
    text = f"{SUM}ENTRY e {{ x = f32[{dims}] parameter(0)\n y = f32[{dims}] parameter(1)\n {body} }}"
    return collectives(transformed_on_devices(combine_collectives, text, rng, partitions=DEVICES))


def collectives(module: Module) -> list[str]:
    found = []
    for instruction in module.entry.instructions:
        if instruction.opcode in COLLECTIVES:
            count = len(instruction.shape.elements) if isinstance(instruction.shape, TupleShape) else 1
            found.append(f"{count} {instruction.opcode}")
    return found


def test_gathers_of_weights(rng: np.random.Generator) -> None:
    body = f"""a = f32[32,4] all-gather(x), channel_id=1, {ALL}, dimensions={{0}}
      s = f32[32,4] sine(a)
      b = f32[32,4] all-gather(y), channel_id=2, {ALL}, dimensions={{0}}
      c = f32[8,16] all-gather(y), channel_id=3, {ALL}, dimensions={{1}}
      t = f32[32,4] multiply(s, b)
      ROOT r = (f32[32,4], f32[8,16]) tuple(t, c)"""
    assert sorted(combined(body, rng)) == ["1 all-gather", "2 all-gather"]


def test_the_same_twice(rng: np.random.Generator) -> None:
    body = f"""a = f32[32,4] all-gather(x), channel_id=1, {ALL}, dimensions={{0}}
      b = f32[32,4] all-gather(x), channel_id=2, {ALL}, dimensions={{0}}
      s = f32[32,4] sine(b)
      ROOT r = f32[32,4] add(a, s)"""
    assert combined(body, rng) == ["1 all-gather"]


def test_gradients_and_their_norms(rng: np.random.Generator) -> None:
    """Norms wait for the gradients, and not for each other: a reduction of one of each would make a chain of all."""
    lines = []
    for n in range(5):
        lines.append(f"g{n} = f32[8,4] {'sine' if n % 2 else 'cosine'}({'x' if n < 3 else 'y'})")
        lines.append(f"d{n} = f32[8,4] add(g{n}, {f'g{n - 1}' if n else 'y'})")
        lines.append(f"r{n} = f32[8,4] all-reduce(d{n}), channel_id={2 * n + 1}, {ALL}, to_apply=sum")
        lines.append(f"q{n} = f32[8,4] multiply(r{n}, r{n})")
        lines.append(f"zero{n} = f32[] constant(0)")
        lines.append(f"n{n} = f32[] reduce(q{n}, zero{n}), dimensions={{0,1}}, to_apply=sum")
        lines.append(f"m{n} = f32[] all-reduce(n{n}), channel_id={2 * n + 2}, {ALL}, to_apply=sum")
    kinds = ", ".join(["f32[]"] * 5 + ["f32[8,4]"] * 5)
    lines.append(f"ROOT r = ({kinds}) tuple({', '.join([f'm{n}' for n in range(5)] + [f'r{n}' for n in range(5)])})")
    assert combined("\n".join(lines), rng) == ["5 all-reduce", "5 all-reduce"]


def test_what_waits_for_another(rng: np.random.Generator) -> None:
    body = f"""a = f32[8,4] all-reduce(x), channel_id=1, {ALL}, to_apply=sum
      s = f32[8,4] tanh(a)
      b = f32[8,4] all-reduce(s), channel_id=2, {ALL}, to_apply=sum
      c = f32[8,4] all-reduce(y), channel_id=3, {ALL}, to_apply=sum
      t = f32[8,4] tanh(c)
      ROOT r = (f32[8,4], f32[8,4]) tuple(b, t)"""
    assert combined(body, rng) == ["2 all-reduce", "1 all-reduce"]


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(f"b = f32[8,4] all-reduce(y), channel_id=2, {PAIRS}, to_apply=sum", id="groups"),
        pytest.param(f"b = f32[8,4] all-reduce(y), channel_id=2, {ALL}, to_apply=largest", id="functions"),
        pytest.param("b = f32[8,4] collective-permute(y), channel_id=2, source_target_pairs={{0,1},{1,0}}", id="kinds"),
    ],
)
def test_what_is_of_another_kind(other: str, rng: np.random.Generator) -> None:
    body = f"""a = f32[8,4] all-reduce(x), channel_id=1, {ALL}, to_apply=sum
      {other}
      ROOT r = (f32[8,4], f32[8,4]) tuple(a, b)"""
    assert len(combined(body, rng)) == 2


def test_no_more_bytes_than_that(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(combining, "MOST_BYTES", 3 * 8 * 4 * 4)
    lines = [f"i{n} = f32[] constant({n})\n b{n} = f32[8,4] broadcast(i{n}), dimensions={{}}" for n in range(8)]
    lines += [f"a{n} = f32[8,4] add(x, b{n})" for n in range(8)]
    lines += [f"r{n} = f32[8,4] all-reduce(a{n}), channel_id={n + 1}, {ALL}, to_apply=sum" for n in range(8)]
    kinds, names = ", ".join(["f32[8,4]"] * 8), ", ".join(f"r{n}" for n in range(8))
    left = combined("\n".join([*lines, f"ROOT r = ({kinds}) tuple({names})"]), rng)
    assert left == ["3 all-reduce", "3 all-reduce", "2 all-reduce"]


def test_scattered_sums_and_the_order_of_effects(rng: np.random.Generator) -> None:
    body = f"""a = f32[2,4] reduce-scatter(x), channel_id=1, {ALL}, dimensions={{0}}, to_apply=sum
      s = f32[8,4] sine(y)
      b = f32[2,4] reduce-scatter(s), channel_id=2, {ALL}, dimensions={{0}}, to_apply=sum
      ROOT r = (f32[2,4], f32[2,4]) tuple(a, b)"""
    assert combined(body, rng) == ["2 reduce-scatter"]
    text = f"""{SUM}ENTRY e {{ x = f32[8,4] parameter(0)
      a = f32[8,4] all-reduce(x), channel_id=1, {ALL}, to_apply=sum
      first = f32[8,4] custom-call(a), custom_call_target="draw", custom_call_has_side_effect=true
      second = f32[8,4] custom-call(x), custom_call_target="draw", custom_call_has_side_effect=true
      b = f32[8,4] all-reduce(second), channel_id=2, {ALL}, to_apply=sum
      ROOT r = (f32[8,4], f32[8,4]) tuple(first, b) }}"""
    names = [i.name for i in combine_collectives(import_module(hlo_of_text(text), num_partitions=4)).entry.instructions]
    assert names.index("first") < names.index("second")


def test_nothing_to_do() -> None:
    text = f"""{SUM}ENTRY e {{ x = f32[8,4] parameter(0)
      ROOT a = f32[8,4] all-reduce(x), channel_id=1, {ALL}, to_apply=sum }}"""
    module = import_module(hlo_of_text(text), num_partitions=4)
    assert combine_collectives(module) is module
    assert [i.opcode for i in module.entry.instructions] == [Opcode.PARAMETER, Opcode.ALL_REDUCE]
