"""What explain says of a program: work and memory counted by hand, and the same sizes that the executable states."""

from __future__ import annotations

import json

import pytest
import torch
from jaxlib import _hlo  # type: ignore[attr-defined]

from flagos_backend.compile.accelerator_plan import build
from flagos_backend.compile.compiler import CompiledProgram, compile_program
from flagos_backend.compile.explanation import explanation_of, source_of
from flagos_backend.devices.target import SIMULATED
from flagos_backend.importer import import_module, schema
from flagos_backend.importer.program import SCHEMA_VERSION
from flagos_backend.ir.opcode import Opcode
from flagos_backend.ir.types import ArrayShape, ElementType
from flagos_backend.loop_ir.parser import parse_nest
from flagos_backend.loop_ir.printer import print_nest
from flagos_backend.loop_ir.region import Apply
from support.passes import for_accelerator

DENSE = """HloModule dense
add { a = f32[] parameter(0) b = f32[] parameter(1) ROOT c = f32[] add(a, b) }
ENTRY main {
  x = f32[64,32] parameter(0)
  y = f32[32,48] parameter(1)
  d = f32[64,48] dot(x, y), lhs_contracting_dims={1}, rhs_contracting_dims={0}, \
metadata={op_name="jit(f)/dot" source_file="model.py" source_line=7}
  t = f32[64,48] tanh(d)
  z = f32[] constant(0)
  ROOT r = f32[64] reduce(t, z), dimensions={1}, to_apply=add
}"""

LOOP = """HloModule loop
body { s = (s32[], f32[8192]) parameter(0) n = s32[] get-tuple-element(s), index=0
  v = f32[8192] get-tuple-element(s), index=1
  one = s32[] constant(1) m = s32[] add(n, one) w = f32[8192] sine(v) ROOT t = (s32[], f32[8192]) tuple(m, w) }
condition { s = (s32[], f32[8192]) parameter(0) n = s32[] get-tuple-element(s), index=0 five = s32[] constant(5)
  ROOT c = pred[] compare(n, five), direction=LT }
ENTRY main { v = f32[8192] parameter(0) zero = s32[] constant(0) s = (s32[], f32[8192]) tuple(zero, v)
  l = (s32[], f32[8192]) while(s), condition=condition, body=body
  ROOT r = f32[8192] get-tuple-element(l), index=1 }"""

VIEWED = """HloModule viewed
ENTRY main { x = f32[16,16] parameter(0) y = f32[16,16] parameter(1) a = f32[16,16] sine(x)
  d = f32[16,16] dot(a, y), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  v = f32[4,64] reshape(a) s = f32[4,4] dot(v, v), lhs_contracting_dims={1}, rhs_contracting_dims={1}
  c = f32[4,4] cosine(s) ROOT t = (f32[16,16], f32[4,4]) tuple(d, c) }"""

SORTED = """HloModule sorted
less { a = f32[] parameter(0) b = f32[] parameter(1) k = f32[] sine(a) l = f32[] sine(b)
  ROOT r = pred[] compare(k, l), direction=LT }
ENTRY main { x = f32[256] parameter(0) a = f32[256] sine(x) b = f32[256] cosine(a) c = f32[256] multiply(a, b)
  r = f32[256] sort(c), dimensions={0}, to_apply=less
  s = f32[256] sine(r) t = f32[256] cosine(s) ROOT u = f32[256] multiply(s, t) }"""


def compiled(text: str) -> CompiledProgram:
    module = _hlo.hlo_module_from_text(text).as_serialized_hlo_module_proto()
    program = schema.Program(
        schema_version=SCHEMA_VERSION, producer="test", num_replicas=1, num_partitions=1, device_assignment=[0]
    )
    program.module.MergeFromString(module)
    return compile_program(program.SerializeToString(), "test", can_call_host=False)


def test_products_and_loops_are_counted_by_what_they_compute_and_move() -> None:
    explanation = explanation_of(compiled(DENSE))
    product, *loops = explanation.steps
    assert (product.kind, product.provider) == ("product", "blas")
    assert (product.operation, product.source) == ("jit(f)/dot", "model.py:7")
    assert product.flops == 2 * 64 * 48 * 32
    assert product.bytes == 4 * (64 * 32 + 32 * 48 + 64 * 48)
    # tanh and the sum are one nest or two, of at least one operation each an element.
    assert sum(step.flops for step in loops) >= 2 * 64 * 48
    assert sum(step.bytes for step in loops) >= 4 * (64 * 48 + 64)
    assert all(step.kind in ("loop", "reduction") and not step.fallback for step in loops)
    assert not explanation.fallbacks


def test_sizes_and_costs_are_those_of_the_executable() -> None:
    program = compiled(DENSE)
    explanation = explanation_of(program)
    assert explanation.temporary_bytes == program.temporary_bytes
    assert explanation.peak_bytes == program.peak_bytes
    costs = dict(program.cost.properties(program.target.roofline))
    assert (explanation.flops, explanation.bytes_accessed) == (costs["flops"], costs["bytes accessed"])
    assert explanation.argument_bytes == 4 * (64 * 32 + 32 * 48) and explanation.output_bytes == 4 * 64
    assert 4 * 64 * 48 <= sum(buffer.bytes for buffer in explanation.alive_at_peak()) <= explanation.temporary_bytes


def test_the_expected_time_is_the_steps_at_the_roofline() -> None:
    explanation = explanation_of(compiled(DENSE))
    assert explanation.flops_per_second > 0
    for step in explanation.steps:
        by_arithmetic, by_memory = step.flops / explanation.flops_per_second, step.bytes / explanation.bytes_per_second
        assert step.seconds == max(by_arithmetic, by_memory)
    assert explanation.seconds == sum(step.seconds for step in explanation.steps)


def test_loop_nests_are_shown_as_text_that_reads_back() -> None:
    steps = explanation_of(compiled(DENSE)).steps
    nests = [parse_nest(step.nest) for step in steps if step.nest]
    assert [bool(step.nest) for step in steps] == [step.kind in ("loop", "reduction") for step in steps]
    assert {e.opcode for nest in nests for e in nest.expressions() if isinstance(e, Apply)} == {Opcode.TANH}
    assert [print_nest(nest) for nest in nests] == [step.nest for step in steps if step.nest]


def test_steps_of_generated_kernels_have_their_nest_and_no_others() -> None:
    module = import_module(_hlo.hlo_module_from_text(DENSE).as_serialized_hlo_module_proto())
    plan = build(for_accelerator(module).entry, (), torch.device("cpu"), SIMULATED)
    nests = [step.nest for step in plan.steps if step.nest]
    opcodes = [e.opcode for nest in nests for e in nest.expressions() if isinstance(e, Apply)]
    assert opcodes == [Opcode.TANH]
    assert [bool(step.nest) for step in plan.steps] == ["[triton " in step.text for step in plan.steps]


def test_memory_of_generated_kernels_lives_as_long_as_what_lies_in_it() -> None:
    """A view of it counts."""
    module = import_module(_hlo.hlo_module_from_text(VIEWED).as_serialized_hlo_module_proto())
    plan = build(for_accelerator(module).entry, (), torch.device("cpu"), SIMULATED)
    enqueued = [number for number, step in enumerate(plan.steps) if step.enqueues]
    sine, _, product, _ = enqueued[:4]
    # The last kernel writes its result over the product, which is no memory beside results then.
    (allocation,) = plan.allocations
    assert plan.shapes[allocation.slot] == ArrayShape(ElementType.F32, (16, 16))
    assert (allocation.first, allocation.last) == (sine, product)


def test_a_loop_counts_its_iterations() -> None:
    steps = explanation_of(compiled(LOOP)).steps
    (loop,) = [step for step in steps if step.kind == "control"]
    assert loop.flops >= 5 * 8192
    assert 5 * 8192 * 8 <= loop.bytes <= 5 * (8192 * 8 + 64)


def test_a_library_call_is_a_fallback_that_says_why() -> None:
    program = compiled(SORTED)
    explanation = explanation_of(program)
    if program.native is None:
        assert any("library call" in reason for reason in explanation.fallbacks)
        return
    (call,) = [step for step in explanation.steps if step.kind == "call"]
    assert call.provider == "torch"
    assert call.fallback.startswith("sort of ") and "no native form" in call.fallback
    assert explanation.library_bytes == 4 * 256


def test_the_explanation_is_json() -> None:
    explanation = explanation_of(compiled(DENSE))
    read = json.loads(explanation.to_json())
    assert read["name"] == "dense"
    assert read["steps"][0]["source"] == "model.py:7"


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        ("jit(f)/dot_general (/home/u/my model.py:12)", ("jit(f)/dot_general", "/home/u/my model.py:12")),
        ("jit(f)/add", ("jit(f)/add", "")),
        ("add_3", ("add_3", "")),
        ("", ("", "")),
        ("odd (no line)", ("odd (no line)", "")),
    ],
)
def test_the_line_of_the_user_is_told_from_the_name(metadata: str, expected: tuple[str, str]) -> None:
    assert source_of(metadata) == expected
