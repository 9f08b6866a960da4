"""FlagGems' kernels, through the provider that programs use, against ATen's on the host."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from flagos_backend.ir.attributes import ConvolutionAttributes, WindowDimension
from flagos_backend.ir.builder import Builder
from flagos_backend.ir.custom_calls.attention import FORWARD, Attention
from flagos_backend.ir.opcode import Opcode
from flagos_backend.ir.torch_dtypes import TORCH_DTYPE
from flagos_backend.ir.types import ArrayShape, ElementType
from flagos_backend.kernels.flaggems import loading
from flagos_backend.kernels.implementation import operation_of
from support.attention import assert_close, calls_of, oracle, problem
from support.flaggems import SIMULATED, aten_call, check, dot, refusal
from tools.conformance.flaggems_worker import flaggems_of

E = ElementType
_ELEMENT = {dtype: element for element, dtype in TORCH_DTYPE.items()}


# Operators of one tensor [6, 20], then their other arguments.
UNARY = {
    "abs": (),
    "cos": (),
    "exp": (),
    "exp2": (),
    "gelu": (),
    "isfinite": (),
    "isnan": (),
    "log_sigmoid": (),
    "logical_not": (),
    "neg": (),
    "relu": (),
    "rsqrt": (),
    "sigmoid": (),
    "silu": (),
    "sin": (),
    "sqrt": (),
    "tanh": (),
    "sum": (),
    "mean": (),
    "amax": ([1],),
    "any": (),
    "all": (),
    "cumsum": (1,),
    "prod": (),
    "sum.dim_IntList": ([1],),
    "mean.dim": ([1],),
    "_softmax": (1, False),
    "_log_softmax": (1, False),
    "triu": (1,),
    "constant_pad_nd": ([1, 2, 0, 1], 0.5),
    "repeat": ([2, 1],),
}
BINARY = [
    "add.Tensor",
    "sub.Tensor",
    "mul.Tensor",
    "div.Tensor",
    "maximum",
    "minimum",
    "eq.Tensor",
    "ge.Tensor",
    "lt.Tensor",
]


@pytest.mark.parametrize("name", UNARY)
def test_unary(flag_gems, draw, name):
    x = draw(6, 20)
    check(*aten_call(name, x.abs() + 0.1 if name in ("rsqrt", "sqrt", "prod") else x, *UNARY[name]))


@pytest.mark.parametrize("name", BINARY)
def test_binary(flag_gems, draw, name):
    rows = 6 if name == "mul.Tensor" else 1  # test_products_of_unequal_arrays says why
    check(*aten_call(name, draw(6, 20), draw(rows, 20)))


@pytest.mark.parametrize("name", ["gelu", "silu", "add.Tensor", "mul.Tensor"])
def test_half_floats(flag_gems, draw, name):
    """Of f16; the interpreter computes on the raw bits of bf16."""
    tensors = [draw(6, 20, dtype=torch.float16) for _ in range(2 if "." in name else 1)]
    check(*aten_call(name, *tensors), tolerance=1e-2)


def test_products(flag_gems, draw):
    check(*aten_call("mm", draw(24, 17), draw(17, 9)))
    check(*aten_call("addmm", draw(9), draw(24, 17), draw(17, 9)))
    check(*aten_call("bmm", draw(2, 8, 17), draw(2, 17, 9)))


def test_normalizations(flag_gems, draw):
    check(*aten_call("native_layer_norm", draw(5, 24), [24], draw(24), draw(24), 1e-5))
    check(*aten_call("native_group_norm", draw(2, 6, 5), draw(6), draw(6), 2, 6, 5, 3, 1e-5))
    check(*aten_call("native_group_norm", draw(2, 6, 5), draw(6), draw(6), 2, 6, 5, 1, 1e-5))


def test_norms_of_vectors(flag_gems, draw):
    for order in (0.0, 1.0, 2.0, 3.0):
        check(*aten_call("linalg_vector_norm", draw(6, 20), order, [1]))


def test_pools(flag_gems, draw):
    check(*aten_call("avg_pool2d", draw(1, 2, 8, 9), [3, 2], [2, 1], [1, 0]))
    check(*aten_call("avg_pool2d", draw(1, 2, 8, 9), [3, 2], [2, 1], [1, 0], False, False))


def test_indexing(flag_gems, draw, index):
    check(*aten_call("index_select", draw(6, 20), 0, index(6, 4)))
    check(*aten_call("gather", draw(6, 20), 1, index(20, 6, 3)))
    check(*aten_call("embedding", draw(10, 8), index(10, 3, 4)))
    check(*aten_call("cat", [draw(6, 3), draw(6, 5)], 1))
    check(*aten_call("masked_fill.Scalar", draw(6, 20), index(2, 6, 20).bool(), 7.0))


# ---- HLO's own instructions ----


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_dot(flag_gems, draw, dtype):
    check(dot(_ELEMENT[dtype]), [draw(24, 17, dtype=dtype), draw(17, 9, dtype=dtype)], tolerance=1e-2)


def test_convolution(flag_gems, draw):
    builder = Builder("convolution")
    operands = [builder.parameter(ArrayShape(E.F32, dims)) for dims in ((2, 7, 8, 4), (3, 2, 2, 6))]
    window = (WindowDimension(3, 2, 1, 0), WindowDimension(2, 1, 0, 2, window_dilation=2))
    attributes = ConvolutionAttributes(window, 0, 3, (1, 2), 2, 3, (0, 1), 0, 3, (1, 2), feature_group_count=2)
    call = builder.add(Opcode.CONVOLUTION, operands, attributes)
    check(call, [draw(2, 7, 8, 4), draw(3, 2, 2, 6)])


@pytest.mark.parametrize("upper", [None, 0])
def test_attention(flag_gems, rng, upper):
    attention = Attention("bthd", "bshd", "bshe", "bthe", 0.3, upper=upper)
    sizes = {"b": 1, "h": 1, "t": 128, "s": 128, "d": 32, "e": 32}
    p = problem(attention, E.F16, int(rng.integers(1 << 30)), sizes=sizes)
    implementation = flaggems_of(p.calls[0])
    assert implementation.unsupported(p.calls[0], SIMULATED) == ""
    ours = p.forward(implementation.variants(p.calls[0], SIMULATED)[0].kernel)
    exact, _ = oracle(p)
    assert_close(ours[0], exact[0], E.F16)
    assert_close(ours[1], exact[1], E.F16)


# ---- what it must not be given: its operators in test_flaggems_guards.py ----


def test_attention_that_it_lacks(flag_gems):
    sizes = {"b": 1, "h": 2, "t": 24, "s": 30, "d": 32, "e": 32}
    base = ("bthd", "bshd", "bshe", "bthe")
    for attention, element, reason in (
        (Attention(*base), E.F32, "f16 or bf16"),
        (Attention(*base, bias="ts"), E.F16, "no bias"),
        (Attention(*base, upper=0), E.F16, "aligned to the last key"),
        (Attention(*base, scale=0.0), E.F16, "scale of 0"),
        (Attention(*base, cap=30.0), E.F16, "no soft cap"),
        (Attention(*base, sink="h"), E.F16, "no sink"),
        (Attention("bthd", "bshd", "bshd", "bthd"), E.F16, ""),
    ):
        call, _ = calls_of(attention, element, sizes)
        assert reason in refusal(call)
        assert operation_of(call) == FORWARD
    call, _ = calls_of(Attention(*base, upper=0), E.F16, {**sizes, "s": 24})
    assert "no multiple of 128" in refusal(call)


def test_nothing_is_registered_with_torch(flag_gems, draw):
    """FlagGems is called, never enabled: programs beside ours keep their kernels."""
    check(*aten_call("exp", draw(4)))
    assert flag_gems.current_work_registrar is None


def test_its_operators_are_known_without_loading_it(flag_gems):
    """What is left out for a condition on torch's version is decided by loading."""
    listed, functions = loading.listed(), loading.functions()
    assert {name for name, entry in listed.items() if entry.always} <= functions.keys() <= listed.keys()
    assert all(functions[name].__name__ == listed[name].function for name in functions)
    assert len(listed) > 300


CHOOSES_WITHOUT_LOADING = """
import sys
from flagos_backend.devices.target import Target
from flagos_backend.ir.attributes import CustomCallAttributes, DotAttributes
from flagos_backend.ir.builder import Builder
from flagos_backend.ir.opcode import Opcode
from flagos_backend.ir.types import ArrayShape, ElementType
from flagos_backend.kernels.choice import choose
from flagos_backend.kernels.policy import Policy

builder, target = Builder("c"), Target("cuda", vendor="nvidia")
square = ArrayShape(ElementType.F32, (4, 4))
x = builder.parameter(square)
dot = choose(builder.add(Opcode.DOT, [x, x], DotAttributes((1,), (0,)), shape=square), target, Policy(tune_seconds=0))
config = b'{"arguments": [{"tensor": 0}], "keywords": {}, "results": null}'
exp = builder.add(Opcode.CUSTOM_CALL, [x], CustomCallAttributes("aten::exp.default", config), shape=square)
print(dot.provider, choose(exp, target, Policy(tune_seconds=0)).provider, "flag_gems" in sys.modules)
"""


def test_choosing_does_not_load_it(flag_gems):
    """Importing it takes seconds."""
    done = subprocess.run([sys.executable, "-c", CHOOSES_WITHOUT_LOADING], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["triton", "flagos", "False"]
