"""The builder infers what JAX infers, and refuses what breaks a rule."""

from dataclasses import replace

import numpy as np
import pytest

from flagos_backend.errors import VerificationFailed
from flagos_backend.importer import export_module
from flagos_backend.ir.attributes import (
    CompareAttributes,
    DimensionsAttributes,
    DotAttributes,
    GatherAttributes,
    SliceAttributes,
    WhileAttributes,
)
from flagos_backend.ir.builder import Builder
from flagos_backend.ir.hlo import Module
from flagos_backend.ir.opcode import Comparison, Opcode
from flagos_backend.ir.types import ArrayShape, ElementType, TupleShape
from flagos_backend.ir.verifier import verify
from programs import run_on_xla

F32, S32 = ElementType.F32, ElementType.S32


def f32(*dims):
    return ArrayShape(F32, dims)


def binary(opcode, element_type=F32):
    builder = Builder(opcode.value)
    lhs, rhs = (builder.parameter(ArrayShape(element_type)) for _ in range(2))
    return builder.build(builder.add(opcode, [lhs, rhs]))


def test_built_program_runs_on_xla(rng):
    builder = Builder("main")
    x, w = builder.parameter(f32(4, 5)), builder.parameter(f32(5, 3))
    product = builder.add(Opcode.DOT, [x, w], DotAttributes((1,), (0,)))
    shifted = builder.add(Opcode.ADD, [product, builder.broadcast(builder.scalar(0.5, F32), (4, 3))])
    zero = builder.scalar(0, F32)
    total = builder.add(Opcode.REDUCE, [shifted, zero], DimensionsAttributes((1,)), called=[binary(Opcode.ADD)])
    module = Module("built", builder.build(builder.tuple([shifted, total])))
    verify(module)
    arguments = rng.standard_normal((4, 5), np.float32), rng.standard_normal((5, 3), np.float32)
    shifted_values, totals = run_on_xla(export_module(module), arguments)
    np.testing.assert_allclose(shifted_values, arguments[0] @ arguments[1] + 0.5, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(totals, (arguments[0] @ arguments[1] + 0.5).sum(1), rtol=1e-5, atol=1e-5)


def test_counted_loop_runs_on_xla():
    carried = TupleShape((ArrayShape(S32), f32(3)))
    condition = Builder("condition")
    state = condition.parameter(carried)
    below = condition.add(
        Opcode.COMPARE, [condition.element(state, 0), condition.scalar(4, S32)], CompareAttributes(Comparison.LT)
    )
    body = Builder("body")
    state = body.parameter(carried)
    step = body.add(Opcode.ADD, [body.element(state, 0), body.scalar(1, S32)])
    doubled = body.add(Opcode.ADD, [body.element(state, 1)] * 2)
    main = Builder("main")
    init = main.tuple([main.scalar(0, S32), main.constant(np.array([1, 2, 3], np.float32))])
    loop = main.add(
        Opcode.WHILE,
        [init],
        WhileAttributes(4),
        called=[condition.build(below), body.build(body.tuple([step, doubled]))],
    )
    module = Module("loop", main.build(main.element(loop, 1)))
    verify(module)
    np.testing.assert_array_equal(run_on_xla(export_module(module), [])[0], [16, 32, 48])


@pytest.mark.parametrize(
    ("element_type", "value", "data"),
    [
        (ElementType.BF16, 1.0, b"\x80\x3f"),
        (ElementType.BF16, 1.00390625, b"\x80\x3f"),  # half way: to even
        (ElementType.BF16, 1.01171875, b"\x82\x3f"),
        (ElementType.F16, -2.0, b"\x00\xc0"),
        (ElementType.S4, -3, b"\xfd"),
        (ElementType.U64, 2**64 - 1, b"\xff" * 8),
        (ElementType.PRED, 1, b"\x01"),
        (ElementType.C64, 1 + 2j, np.array(1 + 2j, np.complex64).tobytes()),
    ],
)
def test_scalar(element_type, value, data):
    constant = Builder("b").scalar(value, element_type)
    assert constant.attributes.data == data
    assert constant.shape == ArrayShape(element_type)


@pytest.mark.parametrize(
    ("element_type", "value"), [(ElementType.U8, 256), (ElementType.S4, 8), (ElementType.F8E5M2, 1.0)]
)
def test_scalar_that_the_type_cannot_hold(element_type, value):
    with pytest.raises(ValueError):
        Builder("b").scalar(value, element_type)


def test_shape_that_operands_contradict():
    builder = Builder("b")
    x = builder.parameter(f32(4, 5))
    with pytest.raises(VerificationFailed, match=r"keeps the number of elements, f32\[4,5\] has 20"):
        builder.reshape(x, (3, 7))
    with pytest.raises(VerificationFailed, match=r"does not make f32\[4\]"):
        builder.add(Opcode.NEGATE, [x], shape=f32(4))
    with pytest.raises(VerificationFailed, match="needs a declared"):
        builder.add(Opcode.CONVERT, [x])
    with pytest.raises(VerificationFailed, match=r"slice \[0:9:1\] does not fit a dimension of 4"):
        builder.add(Opcode.SLICE, [x], SliceAttributes((0, 0), (9, 5), (1, 1)))
    with pytest.raises(VerificationFailed, match="carries SliceAttributes, not NoAttributes"):
        builder.add(Opcode.SLICE, [x])


@pytest.mark.parametrize("rows", [0, 4])
def test_gathers_of_windows_of_nothing(rows):
    """They make no element: none is there to be read."""
    builder = Builder("b")
    x, indices = builder.parameter(f32(rows, 5)), builder.parameter(ArrayShape(ElementType.S32, (3, 1)))
    none = builder.parameter(ArrayShape(ElementType.S32, (0, 1)))
    attributes = GatherAttributes((1,), (0,), (0,), index_vector_dim=1, slice_sizes=(0, 5))
    with pytest.raises(VerificationFailed, match="hold no element to gather"):
        builder.add(Opcode.GATHER, [x, indices], attributes)
    assert builder.add(Opcode.GATHER, [x, none], attributes).shape == f32(0, 5)
    empty = replace(attributes, slice_sizes=(0, 0))
    assert builder.add(Opcode.GATHER, [x, indices], empty).shape == f32(3, 0)


def test_empty_computation_is_refused():
    with pytest.raises(ValueError, match="no instruction"):
        Builder("empty").build()
