"""What fusion does grows with the size of a program, not with its square: calls of functions are counted."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest

from flagos_backend.compile.compiler import compile_program
from flagos_backend.devices import HOST
from flagos_backend.importer import schema
from support.against_xla import hlo_of_text


def _parts_of_one_array(count: int) -> str:
    slices = "".join(f"part.{i} = f32[1] slice(x), slice={{[{count - 1 - i}:{count - i}]}}\n" for i in range(count))
    parts = ", ".join(f"part.{i}" for i in range(count))
    return (
        f"ENTRY e {{ x = f32[{count}] parameter(0)\n{slices}"
        f"ROOT r = f32[{count}] concatenate({parts}), dimensions={{0}} }}"
    )


def _computed_parts(count: int) -> str:
    parts = "".join(
        f"number.{i} = f32[] constant({i}.5)\nspread.{i} = f32[8] broadcast(number.{i}), dimensions={{}}\n"
        f"part.{i} = f32[8] add(x, spread.{i})\n"
        for i in range(count)
    )
    names = ", ".join(f"part.{i}" for i in range(count))
    return (
        f"ENTRY e {{ x = f32[8] parameter(0)\n{parts}"
        f"ROOT r = f32[{8 * count}] concatenate({names}), dimensions={{0}} }}"
    )


def _sums_of_parts(count: int) -> str:
    lines = "".join(
        f"part.{i} = f32[4] slice(x), slice={{[{4 * i}:{4 * i + 4}]}}\n"
        f"sum.{i + 1} = f32[4] add({f'sum.{i}' if i else 'y'}, part.{i})\n"
        for i in range(count)
    )
    return (
        f"ENTRY e {{ x = f32[{4 * count}] parameter(0)\ny = f32[4] parameter(1)\n{lines}"
        f"ROOT r = f32[4] negate(sum.{count}) }}"
    )


def _calls(text: str) -> int:
    program = schema.Program(schema_version=1, num_replicas=1, num_partitions=1)
    program.module.ParseFromString(hlo_of_text(text))
    source, calls = program.SerializeToString(), 0

    def count(_frame: Any, event: str, _argument: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        compile_program(source, "build", can_call_host=False, target=HOST)
    finally:
        sys.setprofile(None)
    return calls


@pytest.mark.parametrize(
    "program", [_parts_of_one_array, _computed_parts, _sums_of_parts], ids=lambda p: p.__name__[1:]
)
def test_work_grows_with_the_program(program: Callable[[int], str]) -> None:
    _calls(program(8))  # what is loaded with the first one
    small, large = _calls(program(300)), _calls(program(1200))
    assert large <= 4**1.3 * small, (small, large)
