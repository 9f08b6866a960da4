"""The .proto files against what XLA itself says, and the shipped descriptor set against the .proto files."""

import importlib.metadata
import importlib.util
from pathlib import Path

import jaxlib
import pytest
from google.protobuf import descriptor_pb2

from flagos_backend.importer import schema

ROOT = Path(__file__).resolve().parents[3]
XLA_FILES = ("xla/xla_data.proto", "xla/service/hlo.proto", "xla/pjrt/proto/compile_options.proto")
# Declared as bytes here, as packed repeated fields there: the same bytes on the wire. See proto/README.md.
JAXLIB = tuple(int(part) for part in importlib.metadata.version("jaxlib").split(".")[:2])
SINCE_0_11 = {"HloInstructionProto.comparison_order"}
READ_AS_BYTES = {f"LiteralProto.{field}" for field in ("preds", "f32s", "f64s", "c64s", "c128s")}
Field = descriptor_pb2.FieldDescriptorProto


def compile_module():
    spec = importlib.util.spec_from_file_location("flagos_proto_compile", ROOT / "proto" / "compile.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def our_files():
    shipped = (ROOT / "flagos_backend" / "importer" / "schema.binpb").read_bytes()
    return {file.name: file for file in descriptor_pb2.FileDescriptorSet.FromString(shipped).file}


def embedded_descriptor(library: bytes, name: str) -> descriptor_pb2.FileDescriptorProto:
    """A FileDescriptorProto inside a native library: its fields are read until the last one, ``syntax``."""
    start = library.index(bytes([0x0A, len(name)]) + name.encode())
    position = start
    while True:
        number, position = library[position] >> 3, position + 1
        length = shift = 0
        while True:
            byte = library[position]
            length, shift, position = length | (byte & 0x7F) << shift, shift + 7, position + 1
            if byte < 0x80:
                break
        position += length
        if number == 12:
            return descriptor_pb2.FileDescriptorProto.FromString(library[start:position])


@pytest.fixture(scope="module")
def xla_messages():
    library = Path(jaxlib.__file__).parent / "libjax_common.so"
    if not library.exists():
        pytest.skip("this jaxlib keeps its descriptors in another library than libjax_common.so")
    data = library.read_bytes()
    files = [embedded_descriptor(data, name) for name in XLA_FILES]
    messages, enums = {}, {}
    for file in files:
        collect(file.message_type, file.enum_type, "", messages, enums)
    return messages, enums


def collect(message_types, enum_types, prefix, messages, enums):
    for enum_type in enum_types:
        enums[prefix + enum_type.name] = {value.name: value.number for value in enum_type.value}
    for message in message_types:
        messages[prefix + message.name] = message
        collect(message.nested_type, message.enum_type, f"{prefix}{message.name}.", messages, enums)


def our_messages():
    messages, enums = {}, {}
    file = our_files()["xla.proto"]
    collect(file.message_type, file.enum_type, "", messages, enums)
    return messages, enums


def test_shipped_descriptor_set_is_a_fresh_compile():
    shipped = (ROOT / "flagos_backend" / "importer" / "schema.binpb").read_bytes()
    fresh = compile_module().compile_schema()
    assert descriptor_pb2.FileDescriptorSet.FromString(fresh) == descriptor_pb2.FileDescriptorSet.FromString(shipped)


@pytest.mark.parametrize("name", sorted(our_messages()[0]))
def test_fields_have_xlas_names_numbers_and_types(name, xla_messages):
    theirs = {field.name: field for field in xla_messages[0][name].field}
    for ours in our_messages()[0][name].field:
        if f"{name}.{ours.name}" in SINCE_0_11 and JAXLIB < (0, 11):
            continue
        field = theirs[ours.name]
        assert ours.number == field.number
        if f"{name}.{ours.name}" in READ_AS_BYTES:
            assert (ours.type, ours.label) == (Field.TYPE_BYTES, Field.LABEL_OPTIONAL)
            assert field.label == Field.LABEL_REPEATED
            assert field.type in (Field.TYPE_BOOL, Field.TYPE_FLOAT, Field.TYPE_DOUBLE)
        else:
            assert (ours.type, ours.label, ours.type_name) == (field.type, field.label, field.type_name)
            assert ours.HasField("oneof_index") == field.HasField("oneof_index")


@pytest.mark.parametrize("name", sorted(our_messages()[1]))
def test_enumerators_have_xlas_names_and_numbers(name, xla_messages):
    assert our_messages()[1][name].items() <= xla_messages[1][name].items()


def test_messages_do_not_collide_with_other_registrations():
    from google.protobuf import descriptor_pool

    with pytest.raises(KeyError):
        descriptor_pool.Default().FindMessageTypeByName("xla.HloModuleProto")
    assert schema.HloModuleProto.DESCRIPTOR.full_name == "xla.HloModuleProto"


def test_fields_left_out_of_the_schema_survive():
    unknown = b"\xfa\x3e\x03abc"  # field 1007, three bytes
    message = schema.HloModuleProto.FromString(b"\x0a\x01m" + unknown)
    assert message.name == "m"
    assert unknown in message.SerializeToString()
