"""What nobody needs goes; parameters and side effects stay, inside loops too."""

from jaxlib import _hlo

from flagos_backend.importer import import_module
from flagos_backend.ir.verifier import verify
from flagos_backend.passes.dce import eliminate_dead_code


def run(text):
    module = import_module(_hlo.hlo_module_from_text(f"HloModule m\n{text}").as_serialized_hlo_module_proto())
    result = eliminate_dead_code(module)
    verify(result)
    return module, result


def names(computation):
    return [i.name for i in computation.instructions]


def test_dead_chain_goes_and_parameters_stay():
    _, result = run(
        """ENTRY e {
 x = f32[4] parameter(0)
 unused = f32[4] parameter(1)
 a = f32[4] sine(unused)
 b = f32[4] negate(a)
 ROOT r = f32[4] cosine(x)
}"""
    )
    assert sorted(names(result.entry)) == ["r", "unused", "x"]


def test_side_effects_stay():
    module, result = run(
        """ENTRY e {
 x = f32[4] parameter(0)
 a = f32[4] custom-call(x), custom_call_target="print", custom_call_has_side_effect=true
 g = f32[4] collective-permute(x), source_target_pairs={{0,0}}
 ROOT r = f32[4] cosine(x)
}"""
    )
    assert result is module


LOOP = """condition {
 p = s32[] parameter(0)
 n = s32[] constant(3)
 ROOT lt = pred[] compare(p, n), direction=LT
}
body {
 q = s32[] parameter(0)
 dead = s32[] negate(q)
 CALL
 one = s32[] constant(1)
 ROOT next = s32[] add(q, one)
}
ENTRY e {
 zero = s32[] constant(0)
 loop = s32[] while(zero), condition=condition, body=body
 ROOT r = s32[] constant(7)
}"""


def test_dead_loop_goes():
    _, result = run(LOOP.replace(" CALL\n", ""))
    assert names(result.entry) == ["r"]


def test_loop_with_a_side_effect_stays_without_its_dead_part():
    call = ' c = () custom-call(q), custom_call_target="print", custom_call_has_side_effect=true\n'
    _, result = run(LOOP.replace(" CALL\n", call))
    assert "loop" in names(result.entry)
    body = next(c for c in result.computations() if c.name == "body")
    assert "dead" not in names(body)
    assert "c" in names(body)
