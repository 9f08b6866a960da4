"""Message classes of proto/xla.proto and proto/flagos.proto, the graph format. First stop of the pipeline.

The classes live in a descriptor pool of their own, so TensorFlow's or XLA's registrations of the same names in this
process do not collide with them, and no generated code ties the backend to one protobuf runtime.
"""

from __future__ import annotations

from importlib import resources
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

_POOL = descriptor_pool.DescriptorPool()
for _file in descriptor_pb2.FileDescriptorSet.FromString(
    resources.files(__package__).joinpath("schema.binpb").read_bytes()
).file:
    _POOL.Add(_file)


def message_class(name: str) -> Any:
    """The class of the message with this full name, such as ``"xla.ShapeProto"``; KeyError when the schema has none."""
    return message_factory.GetMessageClass(_POOL.FindMessageTypeByName(name))


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
