"""Contexts, their devices and memories, and how buffers come into being in them.

Part of the host client; begins with a Backend that the loader accepted.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from plugin_abi.errors import FlagosStatusError
from plugin_abi.host import callbacks
from plugin_abi.host.api import Api, ElementType, HostCallback, KeyValueStore, Value
from plugin_abi.host.buffer import Buffer, Event, Handle, HostBufferSemantics
from plugin_abi.loader import Backend


@dataclass(frozen=True)
class MemoryStats:
    """A device's counters in bytes, but for num_allocations; -1: the device does not know."""

    bytes_in_use: int
    peak_bytes_in_use: int
    num_allocations: int
    largest_allocation: int
    bytes_limit: int


@dataclass(frozen=True)
class Device:
    """A device of a context."""

    context: Context
    pointer: Any
    id: int
    process_index: int
    local_hardware_id: int
    is_addressable: bool
    is_host_memory: bool
    kind: str
    debug_string: str
    to_string: str
    attributes: Mapping[str, Value]

    def _describe(self) -> Any:
        api = self.context.api
        return api.call("device_describe", api.new("FlagosDeviceDescribeArgs", device=self.pointer))

    @property
    def memories(self) -> tuple[Memory, ...]:
        args = self._describe()
        return tuple(self.context.memory(m) for m in self.context.api.read_list(args.memories, args.num_memories))

    @property
    def default_memory(self) -> Memory:
        return self.context.memory(self._describe().default_memory)

    def memory_stats(self, *, clear_peaks: bool = False) -> MemoryStats:
        api = self.context.api
        args = api.new("FlagosDeviceMemoryStatsArgs", device=self.pointer, clear_peaks=int(clear_peaks))
        api.call("device_memory_stats", args)
        return MemoryStats(**{name: getattr(args, name) for name in MemoryStats.__dataclass_fields__})

    def synchronize(self) -> None:
        """Wait until all work that is enqueued on the device now is done."""
        api = self.context.api
        api.call("device_synchronize", api.new("FlagosDeviceSynchronizeArgs", device=self.pointer))


@dataclass(frozen=True)
class Memory:
    """A memory of a context, and the ways to make buffers in it."""

    context: Context
    pointer: Any
    id: int
    kind: str
    kind_id: int
    debug_string: str
    to_string: str

    @property
    def devices(self) -> tuple[Device, ...]:
        api = self.context.api
        args = api.call("memory_describe", api.new("FlagosMemoryDescribeArgs", memory=self.pointer))
        return tuple(self.context.device(device) for device in api.read_list(args.devices, args.num_devices))

    def _new(self, struct: str, dims: Sequence[int], element_type: ElementType) -> tuple[Any, Any]:
        api = self.context.api
        extents = api.int64s(dims)
        args = api.new(struct, context=self.context.pointer, memory=self.pointer, dims=extents, rank=len(dims))
        args.element_type = int(element_type)
        return args, extents

    def allocate(self, dims: Sequence[int], element_type: ElementType) -> Buffer:
        """A buffer whose contents are undefined."""
        args, _extents = self._new("FlagosBufferAllocateArgs", dims, element_type)
        return Buffer(self.context, self.context.api.call("buffer_allocate", args).buffer)

    def from_host(
        self,
        data: Any,
        dims: Sequence[int] | None = None,
        element_type: ElementType | None = None,
        *,
        byte_strides: Sequence[int] | None = None,
        semantics: HostBufferSemantics = HostBufferSemantics.IMMUTABLE_ONLY_DURING_CALL,
    ) -> Buffer:
        """A buffer from any object with the buffer protocol, or from an address, with dims and type then given.

        An object is kept alive until the backend says that it is done with it; memory behind an address is the
        caller's care.
        """
        buffer, done = self.from_host_async(data, dims, element_type, byte_strides=byte_strides, semantics=semantics)
        if not isinstance(data, int):
            done.on_ready(lambda _error, _data=data: None)  # type: ignore[misc]
        done.close()
        return buffer

    def from_host_async(
        self,
        data: Any,
        dims: Sequence[int] | None = None,
        element_type: ElementType | None = None,
        *,
        byte_strides: Sequence[int] | None = None,
        semantics: HostBufferSemantics = HostBufferSemantics.IMMUTABLE_ONLY_DURING_CALL,
    ) -> tuple[Buffer, Event]:
        """As from_host, with the event after which the host memory is the caller's again; he keeps it until then."""
        api = self.context.api
        if isinstance(data, int):
            if dims is None or element_type is None:
                raise ValueError("memory that is given by its address needs dims and element_type")
            source = api.ffi.cast("void*", data)
        else:
            view = memoryview(data)
            dims = view.shape if dims is None else dims
            element_type = ElementType.of_format(view.format) if element_type is None else element_type
            source = api.ffi.from_buffer(data)
        assert dims is not None
        args, _extents = self._new("FlagosBufferFromHostArgs", dims, element_type)
        strides = api.ffi.NULL if byte_strides is None else api.int64s(byte_strides)
        args.data, args.byte_strides, args.semantics = source, strides, int(semantics)
        api.call("buffer_from_host", args)
        return Buffer(self.context, args.buffer), Event(self.context, args.done_with_host)

    def view(
        self,
        address: int,
        dims: Sequence[int],
        element_type: ElementType,
        release: Callable[[], None] | None = None,
    ) -> Buffer:
        """A buffer over dense memory that somebody else owns; `release` is called when it is no longer used."""
        args, _extents = self._new("FlagosBufferViewArgs", dims, element_type)
        args.data = self.context.api.ffi.cast("void*", address)
        if release is None:
            return Buffer(self.context, self.context.api.call("buffer_view", args).buffer)
        args.release = callbacks.callback("FlagosReleaseCallback")
        args.release_user_data = callbacks.pending_handle(release)
        try:
            return Buffer(self.context, self.context.api.call("buffer_view", args).buffer)
        except FlagosStatusError:
            callbacks.take(args.release_user_data)
            raise

    def promise(self, dims: Sequence[int], element_type: ElementType, error: BaseException | None = None) -> Buffer:
        """A buffer whose contents come with Buffer.fulfill; with an error, one that has failed from the start."""
        args, _extents = self._new("FlagosBufferPromiseArgs", dims, element_type)
        args.error = self.context.api.make_error(error)
        return Buffer(self.context, self.context.api.call("buffer_promise", args).buffer)


class _Life(Handle):
    """The context's handle itself, and what the backend may call as long as it lives."""


class Context:
    """A backend at work: its devices and memories, and the root of all buffers, events and executables.

    close(), or the end of a with block, first closes every buffer, event and executable that is still open.
    """

    def __init__(
        self,
        backend: Backend,
        options: Mapping[str, Value] | None = None,
        *,
        process_index: int = 0,
        num_processes: int = 1,
        key_value_store: KeyValueStore | None = None,
        host_callback: HostCallback | None = None,
    ) -> None:
        """Create a context; `options` win over the manifest's. Raises FlagosStatusError."""
        self.api = api = Api(backend)
        array, kept = api.make_named_values({**backend.options, **(options or {})})
        args = api.new("FlagosContextCreateArgs", options=array, process_index=process_index)
        args.num_options = len({**backend.options, **(options or {})})
        args.num_processes = num_processes
        if key_value_store is not None:
            kept.append(api.ffi.new_handle(key_value_store))
            args.key_value_user_data = kept[-1]
            args.key_value_get = callbacks.callback("FlagosKeyValueGet")
            args.key_value_put = callbacks.callback("FlagosKeyValuePut")
        if host_callback is not None:
            kept.append(api.ffi.new_handle(callbacks.HostCallbackData(api, host_callback)))
            args.host_callback_user_data = kept[-1]
            args.host_callback = callbacks.callback("FlagosHostCallback")
        self.pointer = api.call("context_create", args).context
        #: Whatever is made in the context holds this, so that the context is destroyed last.
        self.life = _Life(api, "context_destroy", self.pointer, kept)
        self._open: weakref.WeakSet[Handle] = weakref.WeakSet()
        self._devices: dict[Any, Device] = {}
        self._memories: dict[Any, Memory] = {}

    def adopt(self, handle: Handle) -> None:
        """Have a handle closed before the context is."""
        self._open.add(handle)

    def close(self) -> None:
        for handle in list(self._open):
            handle.close()
        self.life.close()

    def __enter__(self) -> Context:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- What it has ----

    def _describe(self) -> Any:
        return self.api.call("context_describe", self.api.new("FlagosContextDescribeArgs", context=self.pointer))

    @property
    def platform_name(self) -> str:
        return self.api.read_text(self._describe().platform_name)

    @property
    def platform_version(self) -> str:
        return self.api.read_text(self._describe().platform_version)

    @property
    def devices(self) -> tuple[Device, ...]:
        """The devices of all processes, by id."""
        args = self._describe()
        return tuple(self.device(pointer) for pointer in self.api.read_list(args.devices, args.num_devices))

    @property
    def addressable_devices(self) -> tuple[Device, ...]:
        """The devices of this process."""
        args = self._describe()
        pointers = self.api.read_list(args.addressable_devices, args.num_addressable_devices)
        return tuple(self.device(pointer) for pointer in pointers)

    @property
    def memories(self) -> tuple[Memory, ...]:
        """The memories of this process."""
        args = self._describe()
        return tuple(self.memory(pointer) for pointer in self.api.read_list(args.memories, args.num_memories))

    def device(self, pointer: Any) -> Device:
        """The object for a device handle of this context."""
        known = self._devices.get(pointer)
        if known is not None:
            return known
        api = self.api
        args = api.call("device_describe", api.new("FlagosDeviceDescribeArgs", device=pointer))
        device = Device(
            context=self,
            pointer=pointer,
            id=args.id,
            process_index=args.process_index,
            local_hardware_id=args.local_hardware_id,
            is_addressable=bool(args.is_addressable),
            is_host_memory=bool(args.is_host_memory),
            kind=api.read_text(args.kind),
            debug_string=api.read_text(args.debug_string),
            to_string=api.read_text(args.to_string),
            attributes=api.named_values(args.attributes, args.num_attributes),
        )
        return self._devices.setdefault(pointer, device)

    def memory(self, pointer: Any) -> Memory:
        """The object for a memory handle of this context."""
        known = self._memories.get(pointer)
        if known is not None:
            return known
        api = self.api
        args = api.call("memory_describe", api.new("FlagosMemoryDescribeArgs", memory=pointer))
        texts = (api.read_text(args.debug_string), api.read_text(args.to_string))
        memory = Memory(self, pointer, args.id, api.read_text(args.kind), args.kind_id, *texts)
        return self._memories.setdefault(pointer, memory)

    # ---- What can be made in it ----

    def create_event(self) -> Event:
        """An event that this host completes with Event.set."""
        args = self.api.call("event_create", self.api.new("FlagosEventCreateArgs", context=self.pointer))
        return Event(self, args.event)

    def profiler_start(self) -> None:
        self.api.call("profiler_start", self.api.new("FlagosProfilerStartArgs", context=self.pointer))

    def profiler_stop(self) -> bytes:
        """What ran since profiler_start, as Chrome trace-event JSON."""

        def stop(sink: Any, sink_data: Any) -> None:
            args = self.api.new("FlagosProfilerStopArgs", context=self.pointer, sink=sink, sink_data=sink_data)
            self.api.call("profiler_stop", args)

        return callbacks.receive(stop)
