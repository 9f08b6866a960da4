"""The instruction scan is imported as a loop, with the values of a plain one in numpy; what is malformed is refused."""

import numpy as np
import pytest

from flagos_backend.errors import MalformedProgram
from flagos_backend.importer import import_module, schema
from support.against_xla import hlo_of_text, run_on_backend

# Two arrays, one output and two carries; the output is a third shape.
BODY = """
step {
  x = f32[2] parameter(0)
  n = s32[2] parameter(1)
  sum = f32[2] parameter(2)
  last = s32[2] parameter(3)
  half = f32[] constant(0.5)
  halves = f32[2] broadcast(half), dimensions={}
  decayed = f32[2] multiply(sum, halves)
  next = f32[2] add(decayed, x)
  least = s32[2] minimum(n, last)
  ROOT out = (f32[2], f32[2], s32[2]) tuple(next, next, least)
}
"""


def program(size: int, options: str = "") -> str:
    return f"""{BODY}
ENTRY main {{
  x = f32[2,{size}] parameter(0)
  n = s32[2,{size}] parameter(1)
  sum = f32[2] parameter(2)
  last = s32[2] parameter(3)
  ROOT s = (f32[2,{size}], f32[2], s32[2]) scan(x, n, sum, last), dimensions={{1}}, num_carries=2{options},
    to_apply=step
}}"""


@pytest.mark.parametrize("options", ["", ", is_reverse=true", ", is_associative=false"])
@pytest.mark.parametrize("size", [0, 1, 5])
def test_values(size: int, options: str, rng: np.random.Generator) -> None:
    x = rng.integers(-8, 8, (2, size)).astype(np.float32)
    n = rng.integers(-8, 8, (2, size)).astype(np.int32)
    total, least = np.array([1, 2], np.float32), np.array([3, -9], np.int32)
    results = run_on_backend(hlo_of_text(program(size, options)), [x, n, total, least])
    out = np.zeros((2, size), np.float32)
    for place in range(size)[:: -1 if "reverse" in options else 1]:
        total = total / 2 + x[:, place]
        least = np.minimum(n[:, place], least)
        out[:, place] = total
    for ours, expected in zip(results, [out, total, least], strict=True):
        np.testing.assert_array_equal(ours, expected)


def test_a_scan_in_a_loop_in_a_scan_keeps_its_depth() -> None:
    text = """
inner { x = f32[] parameter(0) c = f32[] parameter(1) a = f32[] add(x, c) ROOT t = (f32[], f32[]) tuple(a, a) }
outer {
  x = f32[3] parameter(0) c = f32[] parameter(1)
  s = (f32[3], f32[]) scan(x, c), dimensions={0}, num_carries=1, to_apply=inner
  o = f32[3] get-tuple-element(s), index=0
  l = f32[] get-tuple-element(s), index=1
  ROOT t = (f32[3], f32[]) tuple(o, l)
}
ENTRY main {
  x = f32[2,3] parameter(0) c = f32[] parameter(1)
  ROOT s = (f32[2,3], f32[]) scan(x, c), dimensions={0}, num_carries=1, to_apply=outer
}"""
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    out, last = run_on_backend(hlo_of_text(text), [x, np.float32(10)])
    np.testing.assert_array_equal(out, 10 + x.cumsum().reshape(2, 3))
    assert last == 25


@pytest.mark.parametrize(
    ("change", "fact"),
    [
        (lambda scan: scan.dimensions.append(0), "2 dimensions"),
        (lambda scan: scan.dimensions.__setitem__(0, 2), "no dimension 2"),
        (lambda scan: scan.dimensions.__setitem__(0, -1), "no dimension -1"),
        (lambda scan: scan.dimensions.__setitem__(0, 0), "computation"),
        (lambda scan: setattr(scan, "num_carries", -1), "-1 carries"),
        (lambda scan: setattr(scan, "num_carries", 9), "9 carries"),
        (lambda scan: setattr(scan, "num_carries", 1), "no dimension 1"),
        (lambda scan: scan.called_computation_ids.pop(), "0 computations"),
        (lambda scan: scan.operand_ids.pop(0), "computation"),
    ],
)
def test_malformed(change, fact: str) -> None:
    module = schema.HloModuleProto.FromString(hlo_of_text(program(5)))
    (scan,) = (i for c in module.computations for i in c.instructions if i.opcode == "scan")
    change(scan)
    with pytest.raises(MalformedProgram, match=fact):
        import_module(module)
