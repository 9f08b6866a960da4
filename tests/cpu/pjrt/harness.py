"""A PJRT client over the built backend, with the few steps that most tests of the adapter begin with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from flagos_backend.frontends.jax import trampolines
from flagos_backend.importer import schema
from programs import hlo_bytes
from support import pjrt
from support.against_xla import hlo_of_text
from support.pjrt import Pjrt, ffi

IMMUTABLE_ONLY_DURING_CALL, IMMUTABLE_UNTIL_TRANSFER, IMMUTABLE_ZERO_COPY, MUTABLE_ZERO_COPY = range(4)


def compile_options(replicas: int = 1, devices: Sequence[int] | None = None) -> bytes:
    """A serialized CompileOptionsProto; devices[replica] is a device id."""
    options = schema.CompileOptionsProto()
    build = options.executable_build_options
    build.num_replicas, build.num_partitions = replicas, 1
    build.device_assignment.replica_count, build.device_assignment.computation_count = replicas, 1
    ids = build.device_assignment.computation_devices.add().replica_device_ids
    ids.extend(devices if devices is not None else range(replicas))
    return options.SerializeToString()


class Client:
    """One PJRT_Client. Buffers, executables and events are raw pointers; the test destroys them, or nobody does."""

    def __init__(self, api: Pjrt, table_address: int, **options: Any) -> None:
        self.api = api
        values = {"flagos_api": table_address, "flagos_converter": trampolines.converter_address(), **options}
        array, self.kept = api.named_values(values)
        created = api.call("PJRT_Client_Create", create_options=array, num_options=len(values))
        self.pointer = created.client
        self.devices = self._list("Devices", "devices", "num_devices")
        self.memories = self._list("AddressableMemories", "addressable_memories", "num_addressable_memories")

    def _list(self, function: str, field: str, count: str) -> list[Any]:
        args = self.call(f"PJRT_Client_{function}")
        return ffi().unpack(getattr(args, field), getattr(args, count))

    def call(self, function: str, **fields: Any) -> Any:
        return self.api.call(function, client=self.pointer, **fields)

    def close(self) -> None:
        self.call("PJRT_Client_Destroy")

    # ---- Memories ----

    def default_memory(self, device: int = 0) -> Any:
        return self.api.call("PJRT_Device_DefaultMemory", device=self.devices[device]).memory

    def memory(self, kind: str, device: int = 0) -> Any:
        args = self.api.call("PJRT_Device_AddressableMemories", device=self.devices[device])
        for memory in ffi().unpack(args.memories, args.num_memories):
            if self.memory_kind(memory) == kind:
                return memory
        raise LookupError(kind)

    def memory_kind(self, memory: Any) -> str:
        args = self.api.call("PJRT_Memory_Kind", memory=memory)
        return pjrt.text(args.kind, args.kind_size)

    # ---- Buffers ----

    def put_args(self, array: np.ndarray, memory: Any = None, **fields: Any) -> Any:
        """Arguments of PJRT_Client_BufferFromHostBuffer, and what must live as long as they."""
        dims, strides = pjrt.int64s(array.shape), pjrt.int64s(array.strides)
        defaults = {
            "client": self.pointer,
            "data": pjrt.pointer_to(array),
            "type": pjrt.buffer_type(array.dtype),
            "dims": dims,
            "num_dims": array.ndim,
            "byte_strides": strides,
            "num_byte_strides": array.ndim,
            "memory": memory if memory is not None else self.default_memory(),
        }
        return self.api.new("PJRT_Client_BufferFromHostBuffer_Args", **(defaults | fields)), (dims, strides)

    def put(self, array: np.ndarray, memory: Any = None, semantics: int = IMMUTABLE_ONLY_DURING_CALL) -> Any:
        args, _kept = self.put_args(array, memory, host_buffer_semantics=semantics)
        self.api.call_with("PJRT_Client_BufferFromHostBuffer", args)
        self.api.call("PJRT_Event_Destroy", event=args.done_with_host_buffer)
        return args.buffer

    def get(self, buffer: Any, dtype: Any) -> np.ndarray:
        array = np.empty(self.dims(buffer), dtype)
        args = self.api.call("PJRT_Buffer_ToHostBuffer", src=buffer, dst=pjrt.pointer_to(array), dst_size=array.nbytes)
        self.api.wait(args.event)
        return array

    def dims(self, buffer: Any) -> tuple[int, ...]:
        args = self.api.call("PJRT_Buffer_Dimensions", buffer=buffer)
        return tuple(ffi().unpack(args.dims, args.num_dims)) if args.num_dims else ()

    def is_deleted(self, buffer: Any) -> bool:
        return bool(self.api.call("PJRT_Buffer_IsDeleted", buffer=buffer).is_deleted)

    def await_buffer(self, buffer: Any) -> None:
        self.api.wait(self.api.call("PJRT_Buffer_ReadyEvent", buffer=buffer).event)

    def destroy(self, *buffers: Any) -> None:
        for buffer in buffers:
            self.api.call("PJRT_Buffer_Destroy", buffer=buffer)

    def allocate(self, dims: Sequence[int], dtype: Any, memory: Any = None) -> Any:
        return self.call(
            "PJRT_Client_CreateUninitializedBuffer",
            shape_dims=pjrt.int64s(dims),
            shape_num_dims=len(dims),
            shape_element_type=pjrt.buffer_type(dtype),
            memory=memory if memory is not None else self.default_memory(),
        ).buffer

    # ---- Executables ----

    def compile_bytes(self, code: bytes, format: str = "hlo", options: bytes | None = None) -> Any:
        program = Program(self.api, code, format)
        given = options if options is not None else compile_options()
        content = ffi().from_buffer(given)
        return self.call(
            "PJRT_Client_Compile",
            program=program.pointer,
            compile_options=ffi().cast("char*", content),
            compile_options_size=len(given),
        ).executable

    def compile(self, function: Callable[..., Any], *specs: Any, options: bytes | None = None) -> Any:
        """A loaded executable of a JAX function."""
        return self.compile_bytes(hlo_bytes(function, *specs), options=options)

    def compile_text(self, hlo: str, options: bytes | None = None) -> Any:
        return self.compile_bytes(hlo_of_text(hlo), options=options)

    def executable(self, loaded: Any) -> Any:
        return self.api.call("PJRT_LoadedExecutable_GetExecutable", loaded_executable=loaded).executable

    def execute(self, loaded: Any, *argument_lists: Sequence[Any], **fields: Any) -> list[list[Any]]:
        """Outputs of each device; waits for the devices' completion events.

        Raises:
            PjrtError: the launch was refused or failed.
        """
        launch = Launch(self, loaded, argument_lists, **fields)
        self.api.call_with("PJRT_LoadedExecutable_Execute", launch.args)
        for event in launch.events:
            self.api.wait(event)
        return launch.outputs()


class Program:
    """A PJRT_Program over Python bytes."""

    def __init__(self, api: Pjrt, code: bytes, format: str) -> None:
        self.kept = (ffi().from_buffer(code), ffi().from_buffer(format.encode()))
        self.pointer = api.new(
            "PJRT_Program",
            code=ffi().cast("char*", self.kept[0]),
            code_size=len(code),
            format=ffi().cast("char*", self.kept[1]),
            format_size=len(format),
        )


class Launch:
    """The arguments of one PJRT_LoadedExecutable_Execute."""

    def __init__(self, client: Client, loaded: Any, argument_lists: Sequence[Sequence[Any]], **options: Any) -> None:
        api = client.api
        executable = client.executable(loaded)
        self.num_outputs = api.call("PJRT_Executable_NumOutputs", executable=executable).num_outputs
        api.call("PJRT_Executable_Destroy", executable=executable)
        count = len(argument_lists)
        inputs = [ffi().new("PJRT_Buffer*[]", list(buffers)) for buffers in argument_lists]
        self.lists = [ffi().new("PJRT_Buffer*[]", max(self.num_outputs, 1)) for _ in range(count)]
        self.events = ffi().new("PJRT_Event*[]", count)
        kept_fields = {"execute_device": options.pop("execute_device", ffi().NULL)}
        non_donatable = pjrt.int64s(options.pop("non_donatable", ()))
        self.options = api.new(
            "PJRT_ExecuteOptions",
            non_donatable_input_indices=non_donatable,
            num_non_donatable_input_indices=len(non_donatable),
            **options,
        )
        outer_inputs = ffi().new("PJRT_Buffer* const*[]", inputs)
        outer_outputs = ffi().new("PJRT_Buffer**[]", self.lists)
        self.kept = (inputs, outer_inputs, outer_outputs, non_donatable)
        self.args = api.new(
            "PJRT_LoadedExecutable_Execute_Args",
            executable=loaded,
            options=self.options,
            argument_lists=outer_inputs,
            num_devices=count,
            num_args=len(argument_lists[0]),
            output_lists=outer_outputs,
            device_complete_events=self.events,
            **kept_fields,
        )

    def outputs(self) -> list[list[Any]]:
        return [ffi().unpack(outputs, self.num_outputs) if self.num_outputs else [] for outputs in self.lists]
