"""Message classes of proto/xla.proto and proto/flagos.proto, the graph format. First stop of the pipeline.

The classes live in a descriptor pool of their own, so TensorFlow's or XLA's registrations of the same names in this
process do not collide with them, and no generated code ties the backend to one protobuf runtime.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from importlib import resources
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.descriptor import Descriptor


def _classes(descriptors: Iterable[Descriptor]) -> Iterator[tuple[str, Any]]:
    for descriptor in descriptors:
        yield descriptor.full_name, message_factory.GetMessageClass(descriptor)
        yield from _classes(descriptor.nested_types)


_FILES = descriptor_pb2.FileDescriptorSet.FromString(
    resources.files(__package__).joinpath("schema.binpb").read_bytes()
).file
_POOL = descriptor_pool.DescriptorPool()
for _file in _FILES:
    _POOL.Add(_file)
# All of them, and kept: protobuf makes a class when it first reads a field of that type, and forgets it after its last
# use.
_CLASSES = {
    name: message
    for file in _FILES
    for name, message in _classes(_POOL.FindFileByName(file.name).message_types_by_name.values())
}


def message_class(name: str) -> Any:
    """The class of the message with this full name, such as ``"xla.ShapeProto"``; KeyError when the schema has none."""
    return _CLASSES[name]


Program = message_class("flagos.Program")
HloModuleProto = message_class("xla.HloModuleProto")
HloComputationProto = message_class("xla.HloComputationProto")
HloInstructionProto = message_class("xla.HloInstructionProto")
ShapeProto = message_class("xla.ShapeProto")
LiteralProto = message_class("xla.LiteralProto")
OpSharding = message_class("xla.OpSharding")
CompileOptionsProto = message_class("xla.CompileOptionsProto")
ExecutableBuildOptionsProto = message_class("xla.ExecutableBuildOptionsProto")
DeviceAssignmentProto = message_class("xla.DeviceAssignmentProto")
WhileLoopBackendConfig = message_class("xla.WhileLoopBackendConfig")
