"""Which library calls of native programs may wake PyTorch's threads, on which the loops beside them then run."""

from __future__ import annotations

import struct

import pytest

from flagos_backend.codegen.cpu.bytecode import ItemKind
from flagos_backend.codegen.cpu.emitter import emit
from flagos_backend.importer import import_module
from support.against_xla import hlo_of_text

_FUNCTIONS = """
less { a = f32[] parameter(0)
  b = f32[] parameter(1)
  k = f32[] sine(a)
  l = f32[] sine(b)
  ROOT r = pred[] compare(k, l), direction=LT }
sum { a = f32[] parameter(0)
  b = f32[] parameter(1)
  ROOT r = f32[] add(a, b) }
"""


def may_share_out(instruction: str, size: int) -> bool:
    text = f"{_FUNCTIONS}ENTRY e {{ x = f32[{size}] parameter(0)\n {instruction.format(size=size)} }}"
    code = emit(import_module(hlo_of_text(text)))
    (_,) = code.calls
    bytecode = struct.unpack(f"<{len(code.bytecode) // 8}q", code.bytecode)
    # One step: its kind, the number of the call, and what is asked here.
    (place,) = [n for n in range(len(bytecode) - 2) if bytecode[n - 1 : n + 2] == (1, ItemKind.CALL, 0)]
    return bool(bytecode[place + 2])


_CALLBACK = """custom-call(x), custom_call_target="flagos.host_callback", backend_config="{{\\"id\\": 1}}" """


@pytest.mark.parametrize(
    ("instruction", "size", "expected"),
    [
        pytest.param(f"ROOT r = f32[{{size}}] {_CALLBACK}", 100, False, id="a function of the host"),
        pytest.param(f"ROOT r = f32[{{size}}] {_CALLBACK}", 1 << 15, True, id="which gets a large array"),
        pytest.param("ROOT r = f32[{size}] all-reduce(x), to_apply=sum", 100, False, id="a collective"),
        pytest.param("ROOT r = f32[{size}] all-reduce(x), to_apply=sum", 1 << 20, True, id="a large collective"),
        pytest.param("ROOT r = f32[{size}] sort(x), dimensions={{0}}, to_apply=less", 100, False, id="a small sort"),
        pytest.param("ROOT r = f32[{size}] sort(x), dimensions={{0}}, to_apply=less", 1 << 20, True, id="a sort"),
    ],
)
def test_threads(instruction: str, size: int, expected: bool) -> None:
    assert may_share_out(instruction, size) == expected
