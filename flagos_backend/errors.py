"""The backend's catalogue of errors: class, number, status code, message template (fact, place, cure).

Each class states its facts as template fields; ``payloads`` hands them to the host as named bytes.
"""

from __future__ import annotations

import enum
import string
from typing import TYPE_CHECKING, ClassVar, Self

if TYPE_CHECKING:
    from flagos_backend.ir.hlo import Instruction


class StatusCode(enum.IntEnum):
    """absl's status codes, as the plugin ABI numbers them."""

    OK = 0
    CANCELLED = 1
    UNKNOWN = 2
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    ALREADY_EXISTS = 6
    PERMISSION_DENIED = 7
    RESOURCE_EXHAUSTED = 8
    FAILED_PRECONDITION = 9
    ABORTED = 10
    OUT_OF_RANGE = 11
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14
    DATA_LOSS = 15
    UNAUTHENTICATED = 16


CATALOGUE: dict[int, type[FlagosBackendError]] = {}


class FlagosBackendError(Exception):
    """Base of every error that the backend raises on purpose.

    Subclasses set ``number`` (unique, 100 a stage), ``code`` and ``template``; the constructor takes exactly the
    template's fields. Numbers: 1xx graph format and importer, 2xx IR and passes, 3xx kernels, 4xx runtime,
    5xx collectives, 6xx front ends.
    """

    number: ClassVar[int]
    code: ClassVar[StatusCode]
    template: ClassVar[str]
    fields: ClassVar[frozenset[str]]

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls.fields = frozenset(name for _, name, _, _ in string.Formatter().parse(cls.template) if name)
        other = CATALOGUE.setdefault(cls.number, cls)
        if other is not cls and other.__qualname__ != cls.__qualname__:
            raise TypeError(f"{cls.__qualname__} and {other.__qualname__} share the error number {cls.number}")

    def __init__(self, **facts: object) -> None:
        if facts.keys() != self.fields:
            raise TypeError(f"{type(self).__name__} takes {sorted(self.fields)}, got {sorted(facts)}")
        self.facts = {name: _printable(str(value)) for name, value in facts.items()}
        super().__init__(f"{self.template.format(**self.facts)} [FLAGOS-{self.number}]")

    @classmethod
    def at(cls, instruction: Instruction, **facts: object) -> Self:
        """The error with ``place`` filled in from an instruction of the IR."""
        return cls(place=place_of(instruction), **facts)

    @property
    def payloads(self) -> dict[str, bytes]:
        """The facts for the host's error object: ``flagos.error`` is the class, the rest the template's fields."""
        named = {"flagos.error": type(self).__name__, "flagos.error_number": str(self.number), **self._prefixed()}
        return {name: value.encode() for name, value in named.items()}

    def _prefixed(self) -> dict[str, str]:
        return {f"flagos.{name}": value for name, value in self.facts.items()}


def _printable(text: str) -> str:
    """Names come out of untrusted bytes, and go into logs and C strings."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)


def place_of(instruction: Instruction) -> str:
    """``%name = f32[2] opcode(f32[2], s32[]), from the framework's own name``."""
    operands = ", ".join(str(operand.shape) for operand in instruction.operands)
    source = f", from {instruction.metadata}" if instruction.metadata else ""
    return f"%{instruction.name} = {instruction.shape} {instruction.opcode}({operands}){source}"


# 1xx: the graph format and the importer. ``place`` names the instruction, its operands' shapes and its source.


class MalformedProgram(FlagosBackendError):
    number = 101
    code = StatusCode.INVALID_ARGUMENT
    template = (
        "The program is malformed: {fact}. At {place}. Have its producer serialize it again, and report it there."
    )


class UnsupportedOpcode(FlagosBackendError):
    number = 102
    code = StatusCode.UNIMPLEMENTED
    template = "The instruction {opcode} is not supported: {reason}. At {place}. Express the program without it."


class UnsupportedElementType(FlagosBackendError):
    number = 103
    code = StatusCode.UNIMPLEMENTED
    template = "The element type {element_type} is not supported. At {place}. Convert to another type before it."


class UnsupportedShape(FlagosBackendError):
    number = 104
    code = StatusCode.UNIMPLEMENTED
    template = "The shape is not supported: {reason}. At {place}. Give every dimension a fixed size, and have fewer."


class UnsupportedLayout(FlagosBackendError):
    number = 105
    code = StatusCode.UNIMPLEMENTED
    template = "The layout {layout} is not supported: arrays are row major. At {place}. Ask for the default layout."


class UnsupportedAttribute(FlagosBackendError):
    number = 106
    code = StatusCode.UNIMPLEMENTED
    template = "The attribute {attribute} = {value} is not supported. At {place}. Leave it at its default."


class UnsupportedSchemaVersion(FlagosBackendError):
    number = 107
    code = StatusCode.FAILED_PRECONDITION
    template = (
        "The program has schema version {version}; this backend reads up to {supported}. At {place}. "
        "Update the backend, or the host to a release that writes the older schema."
    )


class ProgramTooDeep(FlagosBackendError):
    number = 108
    code = StatusCode.RESOURCE_EXHAUSTED
    template = (
        "Computations call each other {depth} levels deep; the limit is {limit}. At {place}. "
        "Turn nested calls into a loop."
    )


# 2xx: the IR and its passes.


class VerificationFailed(FlagosBackendError):
    number = 201
    code = StatusCode.INVALID_ARGUMENT
    template = "The graph breaks a rule of the IR: {rule}. At {place}. See flagos_backend/ir/SPEC.md for the rule."


class PassFailed(FlagosBackendError):
    number = 202
    code = StatusCode.INTERNAL
    template = (
        "The pass {name} made an invalid graph: {reason}. At {place}. {dump}. This is a bug of the backend: please "
        "report it."
    )


class PassOptionInvalid(FlagosBackendError):
    number = 203
    code = StatusCode.INVALID_ARGUMENT
    template = "{variable} holds '{value}', which is not {wanted}. Correct it or leave it out."


class LoopNestInvalid(FlagosBackendError):
    number = 204
    code = StatusCode.INTERNAL
    template = "A loop nest breaks the rule: {rule}. At {place}. This is a bug of the backend: please report it."


class LoopNestTextInvalid(FlagosBackendError):
    number = 205
    code = StatusCode.INVALID_ARGUMENT
    template = (
        "The text of a loop nest is wrong: {reason}. At line {line}, column {column}. See "
        "flagos_backend/loop_ir/SPEC.md for the text form."
    )


# 3xx: kernels.


class UnknownCustomCall(FlagosBackendError):
    number = 301
    code = StatusCode.UNIMPLEMENTED
    template = (
        "No kernel is registered for the custom call {target}. At {place}. Express the program without it, or call one "
        "of: {known}."
    )


class AtenCallFailed(FlagosBackendError):
    number = 302
    code = StatusCode.INVALID_ARGUMENT
    template = "PyTorch's operator refused its arguments, {exception}: {message}. At {place}. Give it what it takes."


class KernelRefused(FlagosBackendError):
    number = 303
    code = StatusCode.FAILED_PRECONDITION
    template = (
        "No kernel is left for {operation}: {reasons}. At {place}. Loosen FLAGOS_PREFER, FLAGOS_PER_OP, FLAGOS_STRICT "
        "or FLAGOS_DENY_VENDORS, or install what is missing."
    )


class KernelPolicyInvalid(FlagosBackendError):
    number = 304
    code = StatusCode.INVALID_ARGUMENT
    template = "{variable} holds '{value}', which is not {wanted}. Correct the variable or unset it."


class ConfigInvalid(FlagosBackendError):
    number = 305
    code = StatusCode.INVALID_ARGUMENT
    template = "The file of {variable}, {path}, cannot be used: {reason}. Correct the file, or unset the variable."


class KernelBuildFailed(FlagosBackendError):
    number = 311
    code = StatusCode.INTERNAL
    template = (
        "The source of the generated kernel [{kernel}] does not load, {reason}. At {source}. See that Triton is "
        "installed and works with this device; if it does, this is a defect of the backend: please report it with that "
        "file."
    )


class KernelLaunchFailed(FlagosBackendError):
    number = 312
    code = StatusCode.INTERNAL
    template = (
        "The generated kernel [{kernel}] did not compile or start, {reason}. At {source}. Unless the device itself "
        "failed before, this is a bug of the backend or of the device's Triton: please report it with that file."
    )


# 4xx: the runtime.


class SerializedExecutableInvalid(FlagosBackendError):
    number = 401
    code = StatusCode.INVALID_ARGUMENT
    template = (
        "These bytes are no serialized executable: {reason}. At executable_load. Pass what executable_artifact gave."
    )


class SerializedExecutableForeign(FlagosBackendError):
    number = 402
    code = StatusCode.FAILED_PRECONDITION
    template = (
        "The serialized executable is of another build of the backend, {theirs}, and this is {ours}. "
        "At executable_load. Compile the program again."
    )


class SerializedExecutableDamaged(FlagosBackendError):
    number = 403
    code = StatusCode.DATA_LOSS
    template = (
        "The serialized executable is damaged: {reason}. At executable_load. Remove it and compile the program again."
    )


class HostCallbackMissing(FlagosBackendError):
    number = 404
    code = StatusCode.FAILED_PRECONDITION
    template = (
        "The program calls back into the host, but this host gave no host_callback when it created "
        "the context. At {place}. Create the context with one, or compile the program without callbacks."
    )


class ProgramTooLarge(FlagosBackendError):
    number = 405
    code = StatusCode.RESOURCE_EXHAUSTED
    template = (
        "With its calls inlined the program has more than {limit} instructions. At {place}. "
        "Turn repeated calls into a loop."
    )


class DeviceMissing(FlagosBackendError):
    number = 406
    code = StatusCode.NOT_FOUND
    template = (
        "FLAGOS_DEVICE names '{name}', but torch {torch} drives no such device here: {reason}. Unset FLAGOS_DEVICE, or "
        "install a torch for that device."
    )


class DeviceMemoryExhausted(FlagosBackendError):
    number = 407
    code = StatusCode.RESOURCE_EXHAUSTED
    template = (
        "{device} has no memory for {wanted} bytes: {free} of {total} bytes are free. Free buffers, donate arguments, "
        "or run a smaller program."
    )


class CaptureRefused(FlagosBackendError):
    number = 408
    code = StatusCode.UNIMPLEMENTED
    template = (
        "These steps cannot be captured as a graph: {reason}. They run one by one: slower, with the same results."
    )
    #: The number of the step that the capture broke in, if it was one.
    step: int | None = None


class Interrupted(FlagosBackendError):
    """Ctrl-C. The front ends raise KeyboardInterrupt where it ended a compile."""

    number = 409
    code = StatusCode.CANCELLED
    template = "Ctrl-C ended what flagos was doing. Nothing of it is kept: call it again."


# 5xx: collectives.


class CollectiveAborted(FlagosBackendError):
    number = 501
    code = StatusCode.ABORTED
    template = (
        "Another device of this launch failed, so its collectives cannot complete: {reason}. At participant "
        "{participant}. Look for that device's own error."
    )


class CollectiveTimeout(FlagosBackendError):
    number = 502
    code = StatusCode.DEADLINE_EXCEEDED
    template = (
        "The collective {channel} waited {seconds} s for the participants {missing}. At participant {participant}. See "
        "that they run the same program and that none of them hangs."
    )


class CollectiveGroupMismatch(FlagosBackendError):
    number = 503
    code = StatusCode.INVALID_ARGUMENT
    template = (
        "The collective's groups do not fit the launch of {replicas} replicas and {partitions} partitions: {fact}. "
        "At {place}. Launch the program on the devices that it was compiled for."
    )


class CollectiveFailed(FlagosBackendError):
    number = 504
    code = StatusCode.UNAVAILABLE
    template = (
        "The collective {channel} among the {members} failed in the group {group} ({backend}): {reason}. "
        "At {member}. See which of them ended, and start them all again."
    )


class CollectiveOverdue(FlagosBackendError):
    number = 505
    code = StatusCode.DEADLINE_EXCEEDED
    template = (
        "The collective {channel} among the {members} gave up after {seconds} s in the group {group} "
        "({backend}): {reason}. At {member}. See that all of them run the same program and that none hangs."
    )


class ProcessGroupMissing(FlagosBackendError):
    number = 506
    code = StatusCode.FAILED_PRECONDITION
    template = (
        "The collective {channel} has no process group '{group}': {reason}. At its launch. Initialize "
        "torch.distributed with the groups that the program was compiled with."
    )


class RendezvousFailed(FlagosBackendError):
    number = 507
    code = StatusCode.UNAVAILABLE
    template = (
        "The {members} did not come together over {backend} for the collective {channel}: {reason}. At "
        "{member}. See that all of them run the same program, and that they reach each other's addresses."
    )


class CollectiveTimeoutInvalid(FlagosBackendError):
    number = 508
    code = StatusCode.INVALID_ARGUMENT
    template = (
        "{variable} is '{value}', which is no number of seconds above 0. In the environment. Correct or unset it."
    )
