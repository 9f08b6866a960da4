"""Whatever the bytes, the importer gives one of its own errors, with the fact and the place."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jaxlib import _hlo

from flagos_backend import errors
from flagos_backend.importer import import_module, schema
from programs import PROGRAMS
from support.against_xla import hlo_of_text

SEEDS = (
    "while_counted_and_dynamic",
    "gather_fancy",
    "convolutions_grouped",
    "sorts",
    "constants_of_every_type",
    "ffts",
)


def program():
    """sum(x * 2 for the last axis), as a message to damage: computations [add, main]."""
    text = """HloModule m
add {
  a = f32[] parameter(0)
  b = f32[] parameter(1)
  ROOT c = f32[] add(a, b)
}
ENTRY main {
  x = f32[3,4] parameter(0)
  y = f32[3,4] parameter(1)
  m = f32[3,4] multiply(x, y)
  z = f32[] constant(0)
  ROOT r = f32[3] reduce(m, z), dimensions={1}, to_apply=add
}"""
    return schema.HloModuleProto.FromString(_hlo.hlo_module_from_text(text).as_serialized_hlo_module_proto())


def named(proto, name):
    return next(i for c in proto.computations for i in c.instructions if i.name == name)


def damage(name, field, value):
    def apply(proto):
        setattr(named(proto, name), field, value)

    return apply


def extend(name, field, values):
    def apply(proto):
        getattr(named(proto, name), field)[:] = values

    return apply


def each(*actions):
    def apply(proto):
        for action in actions:
            action(proto)

    return apply


MALFORMED = {
    "dangling operand": (extend("m", "operand_ids", [7777, 1]), "7777"),
    "operand after use": (lambda p: p.computations[-1].instructions.reverse(), "not an instruction before it"),
    "operand of itself": (lambda p: named(p, "m").operand_ids.__setitem__(0, named(p, "m").id), "before it"),
    "duplicate id": (lambda p: damage("m", "id", named(p, "x").id)(p), "two instructions have the id"),
    "missing root": (lambda p: setattr(p.computations[-1], "root_id", 123456), "no root"),
    "missing entry": (lambda p: setattr(p, "entry_computation_id", 99), "no entry computation"),
    "unknown callee": (extend("r", "called_computation_ids", [424242]), "424242"),
    "self call": (
        lambda p: named(p, "r").called_computation_ids.__setitem__(0, p.computations[-1].id),
        "not defined before its caller",
    ),
    "duplicate computation": (lambda p: p.computations.add().CopyFrom(p.computations[0]), "two computations"),
    "short literal": (lambda p: named(p, "z").literal.ClearField("f32s"), "0 bytes"),
    "literal of another shape": (lambda p: named(p, "z").literal.shape.dimensions.append(5), "another shape"),
    "negative dimension": (lambda p: named(p, "m").shape.dimensions.__setitem__(0, -3), "impossible"),
    "overflowing dimensions": (
        lambda p: named(p, "m").shape.dimensions.__setitem__(slice(None), [2**40, 2**40]),
        "impossible",
    ),
    "signature with other shapes": (lambda p: p.host_program_shape.parameters[0].dimensions.append(2), "has f32[3,4]"),
    "signature with fewer parameters": (lambda p: p.host_program_shape.parameters.pop(), "states 1 parameters"),
    "layout that is no order": (
        lambda p: p.host_program_shape.parameters[0].layout.minor_to_major.__setitem__(0, 7),
        "no order",
    ),
}
BROKEN_RULES = {
    "wrong result shape": (lambda p: named(p, "m").shape.dimensions.__setitem__(0, 9), "multiply"),
    "too few operands": (lambda p: named(p, "m").operand_ids.pop(), "takes 2 operands"),
    "no operands": (extend("m", "operand_ids", []), "takes 2 operands"),
    "missing reducer": (extend("r", "called_computation_ids", []), "calls 1 computations"),
    "two parameters with one number": (damage("y", "parameter_number", 0), "one parameter 0"),
    "parameter numbers with a gap": (
        each(damage("y", "parameter_number", 5), lambda p: p.ClearField("host_program_shape")),
        "numbered from 0",
    ),
    "dimension out of range": (extend("r", "dimensions", [8]), "[0, 2)"),
    "dimension named twice": (extend("r", "dimensions", [1, 1]), "distinct"),
    "alias of a parameter that is not there": (
        lambda p: p.input_output_alias.entries.add(parameter_number=3),
        "names no parameter",
    ),
    "donor that is not there": (lambda p: p.buffer_donor.entries.add(parameter_number=-1), "no parameter -1"),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_malformed_program(case):
    apply, fact = MALFORMED[case]
    proto = program()
    apply(proto)
    with pytest.raises(errors.MalformedProgram) as caught:
        import_module(proto.SerializeToString())
    assert fact in str(caught.value)
    assert caught.value.code is errors.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize("case", BROKEN_RULES)
def test_program_that_breaks_a_rule(case):
    apply, rule = BROKEN_RULES[case]
    proto = program()
    apply(proto)
    with pytest.raises(errors.VerificationFailed) as caught:
        import_module(proto.SerializeToString())
    assert rule in str(caught.value)


def custom(body: str, change=lambda proto: None):
    text = f"HloModule m\nENTRY main {{\n x = f32[2,3] parameter(0)\n{body}\n}}"
    proto = schema.HloModuleProto.FromString(_hlo.hlo_module_from_text(text).as_serialized_hlo_module_proto())
    change(proto)
    return proto.SerializeToString()


def on_root(**fields):
    def change(proto):
        for name, value in fields.items():
            setattr(proto.computations[0].instructions[-1], name, value)

    return change


def unknown_field(proto):
    root = proto.computations[0].instructions[-1]
    root.MergeFromString(b"\xfa\x3e\x01\x01")  # field 1007


REFUSED = {
    "unknown opcode": (
        custom(" ROOT y = f32[2,3] negate(x)", on_root(opcode="frobnicate")),
        errors.UnsupportedOpcode,
        ["'frobnicate'", "f32[2,3]", "%y"],
    ),
    "asynchronous": (
        custom(
            " c = (f32[2,3], f32[2,3], u32[]) copy-start(x)\n ROOT y = f32[2,3] copy-done(c)",
        ),
        errors.UnsupportedOpcode,
        ["copy-start", "scheduled"],
    ),
    "infeed": (
        custom(" t = token[] after-all()\n ROOT y = (f32[3], token[]) infeed(t)"),
        errors.UnsupportedOpcode,
        ["infeed", "callbacks"],
    ),
    "dynamic size": (
        custom(" n = s32[] constant(2)\n ROOT y = f32[<=2,3] set-dimension-size(x, n), dimensions={0}"),
        errors.UnsupportedShape,
        ["dynamic", "set-dimension-size"],
    ),
    "element type": (
        custom(
            " ROOT y = f32[2,3] negate(x)",
            lambda p: setattr(p.computations[0].instructions[-1].shape, "element_type", 35),
        ),
        errors.UnsupportedElementType,
        ["F6E3M2FN"],
    ),
    "unknown element type": (
        custom(
            " ROOT y = f32[2,3] negate(x)",
            lambda p: setattr(p.computations[0].instructions[-1].shape, "element_type", 999),
        ),
        errors.UnsupportedElementType,
        ["number 999"],
    ),
    "unknown field": (
        custom(" ROOT y = f32[2,3] negate(x)", unknown_field),
        errors.UnsupportedAttribute,
        ["1007", "%y"],
    ),
    "unknown enum": (
        custom(" ROOT y = c64[2,2] fft(x), fft_type=RFFT, fft_length={3}", on_root(fft_type=9)),
        errors.UnsupportedAttribute,
        ["fft_type = 9"],
    ),
    "comparison": (
        custom(" ROOT y = pred[2,3] compare(x, x), direction=LT", on_root(comparison_direction="ALMOST")),
        errors.UnsupportedAttribute,
        ["comparison_direction = ALMOST"],
    ),
    "bitcast that moves data": (
        custom(" ROOT y = f32[3,2]{0,1} bitcast(x)"),
        errors.UnsupportedLayout,
        ["{0,1}", "bitcast"],
    ),
    "parameter layout": (
        custom(
            " ROOT y = f32[2,3] negate(x)",
            lambda p: p.host_program_shape.parameters[0].layout.minor_to_major.__setitem__(slice(None), [0, 1]),
        ),
        errors.UnsupportedLayout,
        ["{0,1}", "parameter 0"],
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_by_name(case):
    data, kind, words = REFUSED[case]
    with pytest.raises(kind) as caught:
        import_module(data)
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert caught.value.payloads["flagos.error"] == kind.__name__.encode()


def test_error_names_the_users_source_line():
    proto = schema.HloModuleProto.FromString(PROGRAMS["adam_update"].hlo())
    root = next(i for i in proto.computations[-1].instructions if i.opcode == "sqrt")
    root.opcode = "square-root"
    with pytest.raises(errors.UnsupportedOpcode, match=r"from jit\(adam_update\)/sqrt \(.*models\.py:\d+\)"):
        import_module(proto.SerializeToString())


def test_nesting_is_bounded():
    proto = program()
    depth = 200
    for level in range(depth):
        outer = proto.computations.add(name=f"level{level}", id=1000 + level, root_id=2)
        parameter = outer.instructions.add(name="p", opcode="parameter", id=1)
        parameter.shape.CopyFrom(named(proto, "z").shape)
        call = outer.instructions.add(name="q", opcode="call", id=2, operand_ids=[1])
        call.shape.CopyFrom(named(proto, "z").shape)
        if level:
            call.called_computation_ids.append(1000 + level - 1)
        else:
            call.opcode = "negate"
    with pytest.raises(errors.ProgramTooDeep):
        import_module(proto.SerializeToString())


@pytest.mark.parametrize("data", [b"", b"\xff", b"\x0a", b"HloModule m", b"\x1a\x04\x12\x02\x12\xff"])
def test_bytes_that_are_no_program(data):
    with pytest.raises(errors.MalformedProgram):
        import_module(data)


def import_or_own_error(data):
    try:
        import_module(data)
    except errors.FlagosBackendError as error:
        assert str(error).replace("\n", "").isprintable()


@pytest.mark.parametrize("name", SEEDS)
def test_every_truncation(name):
    data = PROGRAMS[name].hlo()
    for length in range(0, len(data), max(1, len(data) // 300)):
        import_or_own_error(data[:length])


@settings(max_examples=300, suppress_health_check=list(HealthCheck))
@given(
    name=st.sampled_from(SEEDS),
    edits=st.lists(
        st.tuples(st.floats(0, 1, exclude_max=True), st.binary(min_size=1, max_size=3)), min_size=1, max_size=6
    ),
)
def test_mutated_bytes(name, edits):
    data = bytearray(PROGRAMS[name].hlo())
    for where, replacement in edits:
        position = int(where * len(data))
        data[position : position + len(replacement)] = replacement
    import_or_own_error(bytes(data))


@settings(max_examples=300, suppress_health_check=list(HealthCheck))
@given(name=st.sampled_from(SEEDS), choice=st.data())
def test_mutated_fields(name, choice):
    """Well-formed protobuf with a few integers changed reaches deeper than mutated bytes do."""
    proto = schema.HloModuleProto.FromString(PROGRAMS[name].hlo())
    for _ in range(choice.draw(st.integers(1, 3))):
        mutate(proto, choice)
    import_or_own_error(proto.SerializeToString())


def mutate(message, choice):
    fields = [
        (field, value)
        for field, value in message.ListFields()
        if field.message_type is None or not field.message_type.GetOptions().map_entry
    ]
    if not fields:
        return
    field, value = choice.draw(st.sampled_from(fields))
    number = choice.draw(st.sampled_from([-1, 0, 1, 2, 3, 2**31 - 1, -(2**31)]))
    if field.message_type is not None:
        if not field.is_repeated:
            mutate(value, choice)
        elif choice.draw(st.booleans()):
            mutate(choice.draw(st.sampled_from(list(value))), choice)
        else:
            del value[choice.draw(st.integers(0, len(value) - 1))]
    elif field.type in (field.TYPE_STRING, field.TYPE_BYTES):
        if not field.is_repeated:
            setattr(message, field.name, value[:-1])
    elif field.type not in (field.TYPE_FLOAT, field.TYPE_DOUBLE):
        number = number % 2 if field.type == field.TYPE_BOOL else number
        if field.is_repeated:
            value[choice.draw(st.integers(0, len(value) - 1))] = number
        else:
            setattr(message, field.name, number)


def test_a_shape_of_too_many_dimensions_is_refused_before_any_work() -> None:
    dims = ",".join(["1"] * 30_000)
    hlo = hlo_of_text(f"ENTRY e {{ x = f32[{dims}] parameter(0) ROOT r = f32[{dims}] negate(x) }}")
    with pytest.raises(errors.UnsupportedShape, match="30000 dimensions"):
        import_module(hlo)
