"""Equal instructions and computations become one; what is equal only by looks does not."""

import pytest
from jaxlib import _hlo

from flagos_backend.importer import import_module
from flagos_backend.ir.opcode import Opcode
from flagos_backend.ir.verifier import verify
from flagos_backend.passes.cse import eliminate_common_subexpressions


def run(text):
    module = import_module(_hlo.hlo_module_from_text(f"HloModule m\n{text}").as_serialized_hlo_module_proto())
    result = eliminate_common_subexpressions(module)
    verify(result)
    return result


def tuple_operands(body, shape):
    result = run(f"ENTRY e {{\n x = f32[4] parameter(0)\n{body}\n ROOT t = {shape} tuple(a, b)\n}}")
    return result.entry.root.operands


@pytest.mark.parametrize(
    ("body", "same"),
    [
        (" a = f32[4] sine(x)\n b = f32[4] sine(x)", True),
        (" a = f32[4] sine(x)\n b = f32[4] cosine(x)", False),
        (" c = f32[4] sine(x)\n d = f32[4] sine(x)\n a = f32[4] negate(c)\n b = f32[4] negate(d)", True),
        (" a = f32[4] slice(x), slice={[0:4]}\n b = f32[4] slice(x), slice={[0:4]}", True),
        (" y = f32[4] negate(x)\n a = f32[4] subtract(x, y)\n b = f32[4] subtract(y, x)", False),
        (" a = f32[4] constant({1, 2, 3, 4})\n b = f32[4] constant({1, 2, 3, 4})", True),
        (" a = f32[4] constant({1, 2, 3, 0})\n b = f32[4] constant({1, 2, 3, -0.0})", False),
        (
            ' a = f32[4] custom-call(x), custom_call_target="f"\n b = f32[4] custom-call(x), custom_call_target="f"',
            True,
        ),
        (
            ' a = f32[4] custom-call(x), custom_call_target="f", custom_call_has_side_effect=true\n'
            ' b = f32[4] custom-call(x), custom_call_target="f", custom_call_has_side_effect=true',
            False,
        ),
        (" a = f32[4] opt-barrier(x)\n b = f32[4] opt-barrier(x)", False),
        (
            " l = f32[] constant(0)\n h = f32[] constant(1)\n a = f32[4] rng(l, h), distribution=rng_uniform\n"
            " b = f32[4] rng(l, h), distribution=rng_uniform",
            False,
        ),
    ],
)
def test_instructions(body, same):
    first, second = tuple_operands(body, "(f32[4], f32[4])")
    assert (first is second) == same


def test_equal_reducers_make_equal_reductions():
    add = "{name} {{\n x = f32[] parameter(0)\n y = f32[] parameter(1)\n ROOT s = f32[] add(x, y)\n}}\n"
    result = run(
        add.format(name="one")
        + add.format(name="two")
        + """ENTRY e {
 x = f32[4] parameter(0)
 z = f32[] constant(0)
 a = f32[] reduce(x, z), dimensions={0}, to_apply=one
 b = f32[] reduce(x, z), dimensions={0}, to_apply=two
 ROOT t = (f32[], f32[]) tuple(a, b)
}"""
    )
    assert result.entry.root.operands[0] is result.entry.root.operands[1]
    assert len(list(result.computations())) == 2
    assert [i.opcode for i in result.entry.instructions].count(Opcode.REDUCE) == 1
