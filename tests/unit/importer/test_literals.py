"""Literals of every type, against XLA's own encoding."""

import ml_dtypes
import numpy as np
import pytest
from jaxlib import _hlo

from flagos_backend import errors
from flagos_backend.importer import export_module, import_module, schema
from flagos_backend.importer.literals import read_literal, write_literal
from flagos_backend.importer.shapes import write_shape
from flagos_backend.ir.hlo import Module
from flagos_backend.ir.opcode import Opcode
from flagos_backend.ir.types import ArrayShape, ElementType

ARRAY_TYPES = [t for t in ElementType if t is not ElementType.TOKEN]


def import_constant(text):
    module = _hlo.hlo_module_from_text(f"HloModule m\nENTRY e {{\n ROOT c = {text}\n}}")
    return import_module(module.as_serialized_hlo_module_proto())


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("pred[3] constant({1, 0, 1})", np.array([1, 0, 1], bool)),
        ("s8[2] constant({-128, 127})", np.array([-128, 127], np.int8)),
        ("u16[2] constant({65535, 1})", np.array([65535, 1], np.uint16)),
        ("s32[2,2] constant({{1, -2}, {3, 4}})", np.array([[1, -2], [3, 4]], np.int32)),
        ("u32[1] constant({4294967295})", np.array([2**32 - 1], np.uint32)),
        ("s64[2] constant({-9223372036854775808, 9})", np.array([-(2**63), 9])),
        ("u64[1] constant({18446744073709551615})", np.array([2**64 - 1], np.uint64)),
        ("f16[2] constant({-0.0, 65504})", np.array([-0.0, 65504], np.float16)),
        ("bf16[2] constant({1.5, -inf})", np.array([1.5, -np.inf], ml_dtypes.bfloat16)),
        ("f32[3] constant({nan, -0.0, 1e-45})", np.array([np.nan, -0.0, 1e-45], np.float32)),
        ("f64[] constant(0.1)", np.array(0.1)),
        ("c64[1] constant({(1, -2)})", np.array([1 - 2j], np.complex64)),
        ("c128[1] constant({(0.1, 2)})", np.array([0.1 + 2j])),
        ("s4[5] constant({1, -2, 3, -8, 7})", np.array([1, -2, 3, -8, 7], np.int8)),
        ("u4[3] constant({1, 15, 8})", np.array([1, 15, 8], np.uint8)),
        ("s2[3] constant({1, -2, -1})", np.array([1, -2, -1], np.int8)),
        ("u2[5] constant({1, 2, 3, 0, 1})", np.array([1, 2, 3, 0, 1], np.uint8)),
        ("s1[3] constant({-1, 0, -1})", np.array([-1, 0, -1], np.int8)),
        ("u1[9] constant({1, 0, 1, 1, 1, 1, 1, 0, 1})", np.array([1, 0, 1, 1, 1, 1, 1, 0, 1], np.uint8)),
        ("f4e2m1fn[3] constant({1, 2, -0.5})", np.array([0x2, 0x4, 0x9], np.uint8)),
        ("f8e5m2[2] constant({1, -inf})", np.array([1, -np.inf], ml_dtypes.float8_e5m2)),
        ("f8e4m3fn[2] constant({1, nan})", np.array([1, np.nan], ml_dtypes.float8_e4m3fn)),
        ("s32[2,3]{0,1} constant({{1, 2, 3}, {4, 5, 6}})", np.array([[1, 2, 3], [4, 5, 6]], np.int32)),
        ("f32[0,4] constant({})", np.zeros((0, 4), np.float32)),
    ],
)
def test_bytes_of_a_constant(text, expected):
    constant = import_constant(text).entry.root
    assert constant.shape.dims == expected.shape
    assert constant.attributes.data == expected.tobytes()


def test_three_dimensional_layouts():
    rows = "{{{0, 1}, {2, 3}, {4, 5}}, {{6, 7}, {8, 9}, {10, 11}}}"
    for layout in ("{2,1,0}", "{0,1,2}", "{1,2,0}", "{0,2,1}", "{2,0,1}", "{1,0,2}"):
        constant = import_constant(f"s16[2,3,2]{layout} constant({rows})").entry.root
        assert constant.attributes.data == np.arange(12, dtype=np.int16).tobytes(), layout


def test_tuple_constant_becomes_constants_and_tuples():
    module = import_constant("(f32[], (s32[2], pred[])) constant((1.5, ({2, -3}, true)))")
    assert [i.opcode for i in module.entry.instructions] == [
        *(Opcode.CONSTANT, Opcode.CONSTANT, Opcode.CONSTANT, Opcode.TUPLE, Opcode.TUPLE),
    ]
    assert str(module.entry.root.shape) == "(f32[], (s32[2], pred[]))"
    assert isinstance(import_module(export_module(module)), Module)


@pytest.mark.parametrize("element_type", ARRAY_TYPES, ids=lambda t: t.name)
@pytest.mark.parametrize("dims", [(), (0,), (1,), (3, 5), (64, 64)])
def test_write_then_read(element_type, dims, rng):
    """Every bit pattern survives, NaN payloads included."""
    shape = ArrayShape(element_type, dims)
    data = rng.integers(0, 256, shape.num_bytes, np.uint8)
    if element_type is ElementType.PRED:
        data &= 1
    elif element_type.bits < 8:
        data &= (1 << element_type.bits) - 1
        if element_type.is_signed:
            data = (data << (8 - element_type.bits)).view(np.int8) >> (8 - element_type.bits)
    proto = schema.LiteralProto()
    write_literal(data.tobytes(), shape, proto)
    copied = schema.LiteralProto.FromString(proto.SerializeToString())
    assert read_literal(copied, shape, "here") == data.tobytes()


@pytest.mark.parametrize("element_type", [ElementType.S4, ElementType.U4, ElementType.S2, ElementType.F4E2M1FN])
@pytest.mark.parametrize("count", [1, 2, 5, 16])
def test_packed_elements_are_read_as_well(element_type, count, rng):
    """Some producers put several elements into a byte, the first in the low bits."""
    bits = element_type.bits
    values = rng.integers(0, 1 << bits, count, np.uint8)
    packed = bytearray(-(-count * bits // 8))
    for index, value in enumerate(values):
        packed[index * bits // 8] |= int(value) << (index * bits % 8)
    shape = ArrayShape(element_type, (count,))
    proto = schema.LiteralProto()
    write_shape(shape, proto.shape)
    setattr(proto, f"{element_type.name.lower()}s", bytes(packed))
    read = np.frombuffer(read_literal(proto, shape, "here"), np.uint8)
    assert (read & ((1 << bits) - 1)).tolist() == values.tolist()


@pytest.mark.parametrize(("field", "data"), [("f32s", b"1234567"), ("s32s", [1]), ("u8s", b"12")])
def test_literal_of_the_wrong_size(field, data):
    element_type = {"f32s": ElementType.F32, "s32s": ElementType.S32, "u8s": ElementType.U8}[field]
    shape = ArrayShape(element_type, (3,))
    proto = schema.LiteralProto()
    write_shape(shape, proto.shape)
    if isinstance(data, bytes):
        setattr(proto, field, data)
    else:
        getattr(proto, field).extend(data)
    with pytest.raises(errors.MalformedProgram, match=f"not {shape.num_bytes}. At here"):
        read_literal(proto, shape, "here")


def test_pred_bytes_other_than_one_are_true():
    shape = ArrayShape(ElementType.PRED, (3,))
    proto = schema.LiteralProto(preds=b"\x00\x07\x01")
    write_shape(shape, proto.shape)
    assert read_literal(proto, shape, "here") == b"\x00\x01\x01"
