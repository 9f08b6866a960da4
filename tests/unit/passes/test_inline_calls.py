"""Bodies in place of calls, with the caller's scope in their names, and a bound on growth."""

from jaxlib import _hlo

from flagos_backend.importer import import_module
from flagos_backend.ir.builder import Builder
from flagos_backend.ir.hlo import Module
from flagos_backend.ir.opcode import Opcode
from flagos_backend.ir.types import ArrayShape, ElementType
from flagos_backend.ir.verifier import verify
from flagos_backend.passes.inline_calls import MAX_INSTRUCTIONS, inline_calls
from programs import PROGRAMS

F32 = ArrayShape(ElementType.F32)


def test_nested_calls_disappear():
    module = inline_calls(import_module(PROGRAMS["nested_calls"].hlo()))
    verify(module)
    assert len(list(module.computations())) == 1
    names = [i.name for i in module.entry.instructions]
    assert len(set(names)) == len(names)
    assert any("outer" in i.metadata and "mul" in i.metadata for i in module.entry.instructions)


def test_callee_that_returns_its_argument():
    text = """HloModule m
identity {
 p = f32[2] parameter(0)
 ROOT q = f32[2] parameter(1)
}
ENTRY e {
 x = f32[2] parameter(0)
 y = f32[2] parameter(1)
 ROOT c = f32[2] call(x, y), to_apply=identity
}"""
    module = inline_calls(import_module(_hlo.hlo_module_from_text(text).as_serialized_hlo_module_proto()))
    verify(module)
    assert module.entry.root.name == "y"


def test_doubling_calls_stop_at_the_bound():
    """40 levels, each calling the one below twice: 2 ** 40 instructions if all were inlined."""
    computation = Builder("level0")
    computation.add(Opcode.NEGATE, [computation.parameter(F32)])
    callee = computation.build()
    for level in range(1, 40):
        builder = Builder(f"level{level}")
        value = builder.parameter(F32)
        for _ in range(2):
            value = builder.add(Opcode.CALL, [value], called=[callee])
        callee = builder.build()
    module = inline_calls(Module("m", callee))
    verify(module)
    assert sum(len(c.instructions) for c in module.computations()) < 3 * MAX_INSTRUCTIONS
