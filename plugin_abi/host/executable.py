"""Executables: compile, load, describe, execute, and the artifacts that a compiled program can give.

Part of the host client; programs are serialized flagos.Program messages, which this never looks into.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from plugin_abi.errors import FlagosStatusError, StatusCode
from plugin_abi.host import callbacks
from plugin_abi.host.api import ElementType, Value
from plugin_abi.host.buffer import Buffer, Event, Handle
from plugin_abi.host.context import Context, Device


class Artifact(enum.IntEnum):
    """The texts and bytes that are made of an executable on demand."""

    SERIALIZED = 0
    OPTIMIZED_PROGRAM = 1
    EXPLANATION = 2
    COMPILE_OPTIONS = 3


@dataclass(frozen=True)
class TensorSpec:
    """Shape, type and place of an output. `sharding`: a serialized OpSharding, or None: not sharded."""

    dims: tuple[int, ...]
    element_type: ElementType
    memory_kind: str
    sharding: bytes | None


@dataclass(frozen=True)
class ExecutableDescription:
    """What a backend says of an executable; sizes in bytes, of one device."""

    name: str
    fingerprint: str
    num_replicas: int
    num_partitions: int
    devices: tuple[Device, ...]
    device_assignment: tuple[int, ...]
    num_arguments: int
    outputs: tuple[TensorSpec, ...]
    argument_memory_kinds: tuple[str, ...]
    argument_shardings: tuple[bytes | None, ...]
    #: For each argument the output that may take over its storage, or -1.
    argument_aliases: tuple[int, ...]
    generated_code_bytes: int
    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    temporary_bytes: int
    peak_bytes: int
    cost_analysis: Mapping[str, Value]


_listening: list[list[Executable]] = []


@contextmanager
def made_meanwhile() -> Iterator[list[Executable]]:
    """Every executable that this client compiles or loads within, in any thread, in order; kept as long as the list."""
    made: list[Executable] = []
    _listening.append(made)
    try:
        yield made
    finally:
        _listening[:] = [one for one in _listening if one is not made]


def _noted(executable: Executable) -> Executable:
    for made in _listening:
        made.append(executable)
    return executable


@contextmanager
def _interruptible() -> Iterator[None]:
    """What the backend cancels is what Ctrl-C ended: nobody else can."""
    try:
        yield
    except FlagosStatusError as error:
        if error.code is StatusCode.CANCELLED:
            raise KeyboardInterrupt from error
        raise


class Executable(Handle):
    """A compiled program."""

    def __init__(self, context: Context, pointer: Any) -> None:
        super().__init__(context.api, "executable_destroy", pointer, context.life)
        context.adopt(self)
        self.context = context

    @classmethod
    def compile(cls, context: Context, program: bytes) -> Executable:
        """Compile a serialized flagos.Program. Raises FlagosStatusError, which names what is not supported, and
        KeyboardInterrupt where Ctrl-C ended the compile."""
        source = context.api.ffi.from_buffer(program)
        args = context.api.new("FlagosCompileArgs", context=context.pointer, program=source, program_size=len(program))
        with _interruptible():
            pointer = context.api.call("compile", args).executable
        return _noted(cls(context, pointer))

    @classmethod
    def load(cls, context: Context, serialized: bytes, assignment: Sequence[int] | None = None) -> Executable:
        """Load what Artifact.SERIALIZED gave, for the same devices or for others."""
        api = context.api
        source = api.ffi.from_buffer(serialized)
        args = api.new("FlagosExecutableLoadArgs", context=context.pointer, serialized=source)
        args.serialized_size = len(serialized)
        ids = api.ffi.NULL if assignment is None else api.int64s(assignment)
        args.device_assignment, args.num_assigned = ids, len(assignment or ())
        with _interruptible():
            pointer = api.call("executable_load", args).executable
        return _noted(cls(context, pointer))

    def describe(self) -> ExecutableDescription:
        api = self.api
        args = api.call("executable_describe", api.new("FlagosExecutableDescribeArgs", executable=self.pointer))
        direct = (
            *("num_replicas", "num_partitions", "num_arguments", "generated_code_bytes", "argument_bytes"),
            *("output_bytes", "alias_bytes", "temporary_bytes", "peak_bytes"),
        )
        return ExecutableDescription(
            **{name: int(getattr(args, name)) for name in direct},
            name=api.read_text(args.name),
            fingerprint=api.read_text(args.fingerprint),
            devices=tuple(self.context.device(device) for device in api.read_list(args.devices, args.num_devices)),
            device_assignment=tuple(api.read_list(args.device_assignment, args.num_replicas * args.num_partitions)),
            outputs=self._outputs(args),
            argument_memory_kinds=tuple(
                api.read_text(kind) for kind in api.read_list(args.argument_memory_kinds, args.num_arguments)
            ),
            argument_shardings=self._shardings(args.argument_shardings, args.num_arguments),
            argument_aliases=tuple(api.read_list(args.argument_aliases, args.num_arguments)),
            cost_analysis=api.named_values(args.cost_analysis, args.num_cost_analysis),
        )

    def _shardings(self, pointer: Any, count: int) -> tuple[bytes | None, ...]:
        if pointer == self.api.ffi.NULL:
            return (None,) * count
        values = (pointer[index] for index in range(count))
        return tuple(self.api.read_bytes(v.data, v.size) if v.data != self.api.ffi.NULL else None for v in values)

    def _outputs(self, args: Any) -> tuple[TensorSpec, ...]:
        count = args.num_outputs
        ranks = self.api.read_list(args.output_ranks, count)
        extents = iter(self.api.read_list(args.output_dims, sum(ranks)))
        types = self.api.read_list(args.output_types, count)
        kinds = [self.api.read_text(kind) for kind in self.api.read_list(args.output_memory_kinds, count)]
        shardings = self._shardings(args.output_shardings, count)
        return tuple(
            TensorSpec(tuple(next(extents) for _ in range(rank)), ElementType(type_), kind, sharding)
            for rank, type_, kind, sharding in zip(ranks, types, kinds, shardings, strict=True)
        )

    def artifact(self, kind: Artifact) -> bytes:
        """The bytes of one artifact."""

        def make(sink: Any, sink_data: Any) -> None:
            args = self.api.new("FlagosExecutableArtifactArgs", executable=self.pointer, kind=int(kind))
            args.sink, args.sink_data = sink, sink_data
            self.api.call("executable_artifact", args)

        return callbacks.receive(make)

    def execute(
        self,
        arguments: Sequence[Sequence[Buffer]],
        *,
        non_donatable: Sequence[int] = (),
        device: Device | None = None,
        launch_id: int = 0,
    ) -> tuple[list[list[Buffer]], list[Event]]:
        """Launch with `arguments[device][index]`; gives `outputs[device][index]` and each device's event of the end.

        Returns before the work is done. Raises FlagosStatusError for arguments that do not fit the program.
        """
        api, ffi = self.api, self.api.ffi
        num_devices = len(arguments)
        num_outputs = self._num_outputs()
        num_arguments = len(arguments[0]) if arguments else 0
        if any(len(row) != num_arguments for row in arguments):
            raise ValueError(f"each device takes {num_arguments} arguments, as the first one does")
        rows = [ffi.new("FlagosBuffer*[]", [buffer.pointer for buffer in row]) for row in arguments]
        results: list[Any] = [ffi.new("FlagosBuffer*[]", max(num_outputs, 1)) for _ in arguments]
        lists = (ffi.new("FlagosBuffer**[]", rows), ffi.new("FlagosBuffer**[]", results))
        events: Any = ffi.new("FlagosEvent*[]", max(num_devices, 1))
        kept = api.int64s(non_donatable)
        args = api.new("FlagosExecuteArgs", executable=self.pointer, num_devices=num_devices, launch_id=launch_id)
        args.num_arguments, args.arguments, args.outputs, args.done = num_arguments, *lists, events
        args.non_donatable, args.num_non_donatable = kept, len(non_donatable)
        args.device = ffi.NULL if device is None else device.pointer
        api.call("execute", args)
        outputs = [[Buffer(self.context, row[index]) for index in range(num_outputs)] for row in results]
        return outputs, [Event(self.context, events[index]) for index in range(num_devices)]

    def _num_outputs(self) -> int:
        args = self.api.new("FlagosExecutableDescribeArgs", executable=self.pointer)
        return int(self.api.call("executable_describe", args).num_outputs)
