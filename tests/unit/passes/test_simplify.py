"""Each identity with an input that shows it, and each tempting non-identity left alone."""

import pytest
from jaxlib import _hlo

from flagos_backend.importer import import_module
from flagos_backend.ir.printer import print_instruction
from flagos_backend.ir.verifier import verify
from flagos_backend.passes.simplify import simplify


def simplified(body):
    """The root after the pass, printed; %x: f32[2,3], %i: s32[4], %p: pred[2,3]."""
    text = f"""HloModule m
ENTRY e {{
  x = f32[2,3] parameter(0)
  i = s32[4] parameter(1)
  p = pred[2,3] parameter(2)
  zero = f32[] constant(0)
  minus_zero = f32[] constant(-0.0)
  one = f32[] constant(1)
  zeros = f32[2,3] broadcast(zero), dimensions={{}}
  minus_zeros = f32[2,3] broadcast(minus_zero), dimensions={{}}
  ones = f32[2,3] broadcast(one), dimensions={{}}
  i0 = s32[] constant(0)
  i1 = s32[] constant(1)
  im = s32[] constant(-1)
  i0s = s32[4] broadcast(i0), dimensions={{}}
  i1s = s32[4] broadcast(i1), dimensions={{}}
  ims = s32[4] broadcast(im), dimensions={{}}
  yes = pred[] constant(true)
  trues = pred[2,3] broadcast(yes), dimensions={{}}
{body}
}}"""
    module = simplify(import_module(_hlo.hlo_module_from_text(text).as_serialized_hlo_module_proto()))
    verify(module)
    return print_instruction(module.entry.root).split(" = ", 1)[1]


X, INTEGERS, P = "f32[2,3] parameter(), number=0", "s32[4] parameter(), number=1", "pred[2,3] parameter(), number=2"

IDENTITIES = {
    "x + -0": ("ROOT r = f32[2,3] add(x, minus_zeros)", X),
    "-0 + x": ("ROOT r = f32[2,3] add(minus_zeros, x)", X),
    "x - 0": ("ROOT r = f32[2,3] subtract(x, zeros)", X),
    "x * 1": ("ROOT r = f32[2,3] multiply(ones, x)", X),
    "x / 1": ("ROOT r = f32[2,3] divide(x, ones)", X),
    "i + 0": ("ROOT r = s32[4] add(i, i0s)", INTEGERS),
    "i * 1": ("ROOT r = s32[4] multiply(i, i1s)", INTEGERS),
    "i * 0": ("ROOT r = s32[4] multiply(i, i0s)", "s32[4] broadcast(%i0), dimensions={}"),
    "i & -1": ("ROOT r = s32[4] and(i, ims)", INTEGERS),
    "i & 0": ("ROOT r = s32[4] and(i0s, i)", "s32[4] broadcast(%i0), dimensions={}"),
    "i | 0": ("ROOT r = s32[4] or(i0s, i)", INTEGERS),
    "i | -1": ("ROOT r = s32[4] or(i, ims)", "s32[4] broadcast(%im), dimensions={}"),
    "i ^ 0": ("ROOT r = s32[4] xor(i, i0s)", INTEGERS),
    "i & i": ("ROOT r = s32[4] and(i, i)", INTEGERS),
    "i << 0": ("ROOT r = s32[4] shift-left(i, i0s)", INTEGERS),
    "p & true": ("ROOT r = pred[2,3] and(p, trues)", P),
    "--x": ("n = f32[2,3] negate(x)\nROOT r = f32[2,3] negate(n)", X),
    "!!p": ("n = pred[2,3] not(p)\nROOT r = pred[2,3] not(n)", P),
    "select(true, x, ones)": ("ROOT r = f32[2,3] select(trues, x, ones)", X),
    "select(p, x, x)": ("ROOT r = f32[2,3] select(p, x, x)", X),
    "real(complex)": ("c = c64[2,3] complex(x, ones)\nROOT r = f32[2,3] real(c)", X),
    "imag(complex)": ("c = c64[2,3] complex(ones, x)\nROOT r = f32[2,3] imag(c)", X),
    "copy": ("ROOT r = f32[2,3] copy(x)", X),
    "convert to the same type": ("ROOT r = f32[2,3] convert(x)", X),
    "convert there and back": ("w = f64[2,3] convert(x)\nROOT r = f32[2,3] convert(w)", X),
    "convert through a wider type": (
        "w = s64[4] convert(i)\nROOT r = f32[4] convert(w)",
        "f32[4] convert(%i)",
    ),
    "bitcast there and back": ("b = u32[2,3] bitcast-convert(x)\nROOT r = f32[2,3] bitcast-convert(b)", X),
    "reshape of reshape": ("a = f32[6] reshape(x)\nROOT r = f32[3,2] reshape(a)", "f32[3,2] reshape(%x)"),
    "reshape there and back": ("a = f32[6] reshape(x)\nROOT r = f32[2,3] reshape(a)", X),
    "reshape of a broadcast scalar": (
        "ROOT r = f32[6] reshape(ones)",
        "f32[6] broadcast(%one), dimensions={}",
    ),
    "transpose that changes nothing": ("ROOT r = f32[2,3] transpose(x), dimensions={0,1}", X),
    "transpose there and back": (
        "a = f32[3,2] transpose(x), dimensions={1,0}\nROOT r = f32[2,3] transpose(a), dimensions={1,0}",
        X,
    ),
    "transpose of a dimension of size 1": (
        "a = f32[2,1,3] reshape(x)\nROOT r = f32[1,2,3] transpose(a), dimensions={1,0,2}",
        "f32[1,2,3] reshape(%x)",
    ),
    "transpose of a broadcast": (
        "a = f32[4,2] broadcast(i), dimensions={0}\nROOT r = f32[2,4] transpose(a), dimensions={1,0}".replace(
            "f32", "s32"
        ),
        "s32[2,4] broadcast(%i), dimensions={1}",
    ),
    "transpose of a stack to the end": (
        "a = s32[1,4] reshape(i)\nb = s32[1,4] reshape(ims)\nc = s32[2,4] concatenate(a, b), dimensions={0}\n"
        "ROOT r = s32[4,2] transpose(c), dimensions={1,0}",
        "s32[4,2] concatenate(%r, %r), dimension=1",
    ),
    "broadcast of broadcast": (
        "a = f32[5,2,3] broadcast(x), dimensions={1,2}\nROOT r = f32[5,6,2,3] broadcast(a), dimensions={0,2,3}",
        "f32[5,6,2,3] broadcast(%x), dimensions={2,3}",
    ),
    "broadcast that only adds size 1": (
        "ROOT r = f32[2,1,3] broadcast(x), dimensions={0,2}",
        "f32[2,1,3] reshape(%x)",
    ),
    "whole slice": ("ROOT r = f32[2,3] slice(x), slice={[0:2], [0:3]}", X),
    "whole dynamic-slice": (
        "ROOT r = f32[2,3] dynamic-slice(x, i1, i0), dynamic_slice_sizes={2,3}",
        X,
    ),
    "whole dynamic-update-slice": ("ROOT r = f32[2,3] dynamic-update-slice(ones, x, i1, i0)", X),
    "empty pad": ("ROOT r = f32[2,3] pad(x, zero), padding=0_0x0_0", X),
    "concatenate of one": ("ROOT r = f32[2,3] concatenate(x), dimensions={1}", X),
    "reverse of size 1": (
        "a = f32[1,6] reshape(x)\nROOT r = f32[1,6] reverse(a), dimensions={0}",
        "f32[1,6] reshape(%x)",
    ),
    "reversed twice": (
        "a = f32[2,3] reverse(x), dimensions={0,1}\nROOT r = f32[2,3] reverse(a), dimensions={1,0}",
        X,
    ),
    "element of a tuple": ("t = (s32[4], f32[2,3]) tuple(i, x)\nROOT r = f32[2,3] get-tuple-element(t), index=1", X),
    "scalars first": (
        "a = s32[4] add(i1s, ims)\nROOT r = s32[4] multiply(i, a)",
        "s32[4] multiply(%i, %a)",
    ),
}
LEFT_ALONE = {
    "x + 0 changes -0": "ROOT r = f32[2,3] add(x, zeros)",
    "x - -0 changes -0": "ROOT r = f32[2,3] subtract(x, minus_zeros)",
    "0 - x is not -x": "ROOT r = f32[2,3] subtract(zeros, x)",
    "x * 0 may be NaN": "ROOT r = f32[2,3] multiply(x, zeros)",
    "x - x may be NaN": "ROOT r = f32[2,3] subtract(x, x)",
    "x == x may be false": "ROOT r = pred[2,3] compare(x, x), direction=EQ",
    "1 / x": "ROOT r = f32[2,3] divide(ones, x)",
    "i ^ i is not i": "ROOT r = s32[4] xor(i, i)",
    "narrowing rounds": "w = f16[2,3] convert(x)\nROOT r = f32[2,3] convert(w)",
    "a float cannot hold every integer": "w = f32[4] convert(i)\nROOT r = s32[4] convert(w)",
    "barrier": "ROOT r = f32[2,3] opt-barrier(x)",
    "transpose of a stack, not to the end": "a = f32[1,2,3] reshape(x)\nb = f32[1,2,3] reshape(ones)\n"
    "c = f32[2,2,3] concatenate(a, b), dimensions={0}\nROOT r = f32[2,3,2] transpose(c), dimensions={0,2,1}",
    "transpose of a concatenation": "c = f32[4,3] concatenate(x, ones), dimensions={0}\n"
    "ROOT r = f32[3,4] transpose(c), dimensions={1,0}",
    "transpose": "ROOT r = f32[3,2] transpose(x), dimensions={1,0}",
    "reversed in two ways": "a = f32[2,3] reverse(x), dimensions={0}\nROOT r = f32[2,3] reverse(a), dimensions={1}",
    "select": "ROOT r = f32[2,3] select(p, x, ones)",
}


@pytest.mark.parametrize("case", IDENTITIES)
def test_identity(case):
    body, expected = IDENTITIES[case]
    assert simplified(body) == expected


@pytest.mark.parametrize("case", LEFT_ALONE)
def test_left_alone(case):
    opcode = LEFT_ALONE[case].rsplit("ROOT r = ", 1)[1].split(" ", 1)[1].split("(")[0]
    assert f" {opcode}(" in simplified(LEFT_ALONE[case])


def test_whole_tuple_rebuilt_is_the_tuple():
    text = """HloModule m
ENTRY e {
  t = (f32[2], s32[]) parameter(0)
  a = f32[2] get-tuple-element(t), index=0
  b = s32[] get-tuple-element(t), index=1
  ROOT r = (f32[2], s32[]) tuple(a, b)
}"""
    module = simplify(import_module(_hlo.hlo_module_from_text(text).as_serialized_hlo_module_proto()))
    assert print_instruction(module.entry.root) == "%t = (f32[2], s32[]) parameter(), number=0"


def test_nothing_to_do_gives_the_same_module():
    text = "HloModule m\nENTRY e {\n x = f32[2] parameter(0)\n ROOT y = f32[2] sine(x)\n}"
    module = import_module(_hlo.hlo_module_from_text(text).as_serialized_hlo_module_proto())
    assert simplify(module) is module


@pytest.mark.parametrize("dims", ["{0}", "{1}", "{0,1}"])
def test_a_reduction_of_nothing_is_what_it_begins_with(dims):
    rest = {"{0}": "3", "{1}": "0", "{0,1}": ""}[dims]
    text = f"""HloModule m
least {{
  a = f32[] parameter(0)
  i = s32[] parameter(1)
  b = f32[] parameter(2)
  j = s32[] parameter(3)
  first = pred[] compare(a, b), direction=LT
  c = f32[] select(first, a, b)
  k = s32[] select(first, i, j)
  ROOT r = (f32[], s32[]) tuple(c, k)
}}
sum {{
  a = f32[] parameter(0)
  b = f32[] parameter(1)
  ROOT r = f32[] add(a, b)
}}
ENTRY e {{
  x = f32[0,3] parameter(0)
  n = s32[0,3] parameter(1)
  y = f32[] parameter(2)
  m = s32[] parameter(3)
  two = (f32[{rest}], s32[{rest}]) reduce(x, n, y, m), dimensions={dims}, to_apply=least
  one = f32[{rest}] reduce(x, y), dimensions={dims}, to_apply=sum
  ROOT r = ((f32[{rest}], s32[{rest}]), f32[{rest}]) tuple(two, one)
}}"""
    module = simplify(import_module(_hlo.hlo_module_from_text(text).as_serialized_hlo_module_proto()))
    verify(module)
    two, one = module.entry.root.operands
    texts = [print_instruction(part).split(" = ", 1)[1] for part in (*two.operands, one)]
    if rest:
        y, m = f"f32[{rest}] broadcast(%y), dimensions={{}}", f"s32[{rest}] broadcast(%m), dimensions={{}}"
    else:
        y, m = "f32[] parameter(), number=2", "s32[] parameter(), number=3"
    assert texts == [y, m, y]
