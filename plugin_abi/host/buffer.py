"""Buffers and events of a context: moving bytes in and out, waiting for them, and giving them away.

Part of the host client; contexts and executables make these objects.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from plugin_abi.errors import FlagosStatusError
from plugin_abi.finalizer import Finalizer
from plugin_abi.host import callbacks
from plugin_abi.host.api import Api, ElementType

if TYPE_CHECKING:
    from types import TracebackType

    from plugin_abi.host.context import Context, Device, Memory


class HostBufferSemantics(enum.IntEnum):
    """How long a backend may use host memory, from the weakest promise to the strongest."""

    IMMUTABLE_ONLY_DURING_CALL = 0
    IMMUTABLE_UNTIL_TRANSFER = 1
    IMMUTABLE_ZERO_COPY = 2
    MUTABLE_ZERO_COPY = 3


class Handle:
    """An object that the backend owns for us: destroyed by close(), at the end of a with block, or when collected."""

    def __init__(self, api: Api, destroy: str, pointer: Any, *keep_alive: object) -> None:
        self.api = api
        self.pointer = pointer
        # The finalizer also keeps what must outlive the handle, first of all its context.
        self._finalizer = Finalizer(self, _destroy, api.function(destroy), pointer, keep_alive)

    def close(self) -> None:
        """Destroy the handle; a second call does nothing."""
        self._finalizer()

    @property
    def is_closed(self) -> bool:
        return not self._finalizer.alive

    def __enter__(self) -> Any:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _destroy(function: Any, pointer: Any, _keep_alive: tuple[object, ...]) -> None:
    function(pointer)


class Event(Handle):
    """Something that will have happened."""

    def __init__(self, context: Context, pointer: Any) -> None:
        super().__init__(context.api, "event_destroy", pointer, context.life)
        context.adopt(self)

    def set(self, error: BaseException | None = None) -> None:
        """Complete an event that this host created, well or with an error."""
        args = self.api.new("FlagosEventSetArgs", event=self.pointer, error=self.api.make_error(error))
        self.api.call("event_set", args)

    def query(self) -> tuple[bool, FlagosStatusError | None]:
        """Whether it has happened, and if it failed, why. Never waits."""
        args = self.api.call("event_query", self.api.new("FlagosEventQueryArgs", event=self.pointer))
        failed = args.error != self.api.ffi.NULL
        return bool(args.is_ready), self.api.take_error(args.error) if failed else None

    def wait(self, timeout: float | None = None) -> None:
        """Wait, at most `timeout` seconds. Raises the event's own error, or FlagosStatusError (DEADLINE_EXCEEDED)."""
        nanoseconds = -1 if timeout is None else int(timeout * 1e9)
        args = self.api.new("FlagosEventAwaitArgs", event=self.pointer, timeout_ns=nanoseconds)
        self.api.call("event_await", args)

    def on_ready(self, function: Callable[[FlagosStatusError | None], None]) -> None:
        """Have a function called once it has happened, on any thread, perhaps before this returns."""
        handle = callbacks.pending_handle(callbacks.EventListener(self.api, function))
        args = self.api.new("FlagosEventOnReadyArgs", event=self.pointer, user_data=handle)
        args.callback = callbacks.callback("FlagosEventCallback")
        try:
            self.api.call("event_on_ready", args)
        except FlagosStatusError:
            callbacks.take(handle)
            raise


class Buffer(Handle):
    """An array in a memory of a device."""

    def __init__(self, context: Context, pointer: Any) -> None:
        super().__init__(context.api, "buffer_destroy", pointer, context.life)
        context.adopt(self)
        self.context = context

    # ---- What it is ----

    def _describe(self) -> Any:
        return self.api.call("buffer_describe", self.api.new("FlagosBufferDescribeArgs", buffer=self.pointer))

    @property
    def dims(self) -> tuple[int, ...]:
        args = self._describe()
        return tuple(self.api.read_list(args.dims, args.rank))

    @property
    def element_type(self) -> ElementType:
        return ElementType(self._describe().element_type)

    @property
    def size_bytes(self) -> int:
        return int(self._describe().size_bytes)

    @property
    def device(self) -> Device:
        return self.context.device(self._describe().device)

    @property
    def memory(self) -> Memory:
        return self.context.memory(self._describe().memory)

    @property
    def is_deleted(self) -> bool:
        return bool(self._describe().is_deleted)

    def ready_event(self) -> Event:
        args = self.api.call("buffer_ready_event", self.api.new("FlagosBufferReadyEventArgs", buffer=self.pointer))
        return Event(self.context, args.event)

    def wait(self, timeout: float | None = None) -> None:
        """Wait for the contents. Raises the error of the work that was to make them."""
        with self.ready_event() as event:
            event.wait(timeout)

    def pointer_address(self) -> int:
        """The device address of the contents, once they are there."""
        args = self.api.call("buffer_pointer", self.api.new("FlagosBufferPointerArgs", buffer=self.pointer))
        return int(self.api.ffi.cast("uintptr_t", args.pointer))

    # ---- Bytes ----

    def to_host(self) -> bytearray:
        """Its contents as dense row-major bytes; waits for them."""
        data = bytearray(self.size_bytes)
        with self.to_host_async(data) as done:
            done.wait()
        return data

    def to_host_async(self, into: Any, byte_strides: Sequence[int] | None = None) -> Event:
        """Start copying to a writable buffer that the caller keeps until the event."""
        target = self.api.ffi.from_buffer(into, require_writable=True)
        strides = self.api.ffi.NULL if byte_strides is None else self.api.int64s(byte_strides)
        args = self.api.new("FlagosBufferToHostArgs", buffer=self.pointer, data=target, size=len(target))
        args.byte_strides = strides
        return Event(self.context, self.api.call("buffer_to_host", args).done)

    def read_raw(self, offset: int, size: int) -> bytearray:
        """The bytes [offset, offset + size); waits for them."""
        data = bytearray(max(size, 0))
        args = self.api.new("FlagosBufferReadRawArgs", buffer=self.pointer, offset=offset, size=size)
        args.data = self.api.ffi.from_buffer(data)
        with Event(self.context, self.api.call("buffer_read_raw", args).done) as done:
            done.wait()
        return data

    def write_raw(self, data: Any, offset: int = 0) -> None:
        """Write bytes at an offset of a buffer that this host allocated; waits until they are written."""
        source = self.api.ffi.from_buffer(data)
        args = self.api.new("FlagosBufferWriteRawArgs", buffer=self.pointer, data=source, offset=offset)
        args.size = len(source)
        with Event(self.context, self.api.call("buffer_write_raw", args).done) as done:
            done.wait()

    # ---- Other buffers from this one ----

    def copy_to(self, memory: Memory) -> Buffer:
        args = self.api.new("FlagosBufferCopyArgs", buffer=self.pointer, memory=memory.pointer)
        return Buffer(self.context, self.api.call("buffer_copy", args).copy)

    def bitcast(self, dims: Sequence[int], element_type: ElementType) -> Buffer:
        """The same storage under another shape and type of equal byte size."""
        extents = self.api.int64s(dims)
        args = self.api.new("FlagosBufferBitcastArgs", buffer=self.pointer, dims=extents, rank=len(dims))
        args.element_type = int(element_type)
        return Buffer(self.context, self.api.call("buffer_bitcast", args).view)

    def donate(self, dependency: Event) -> Buffer:
        """Its contents in a new buffer that is not ready before the event; this one is deleted."""
        args = self.api.new("FlagosBufferDonateArgs", buffer=self.pointer, dependency=dependency.pointer)
        return Buffer(self.context, self.api.call("buffer_donate", args).donated)

    def fulfill(self, source: Buffer | None, error: BaseException | None = None) -> None:
        """Give a promised buffer its contents, or its failure."""
        args = self.api.new("FlagosBufferFulfillArgs", promise=self.pointer, error=self.api.make_error(error))
        args.source = self.api.ffi.NULL if source is None else source.pointer
        self.api.call("buffer_fulfill", args)

    # ---- Giving up and holding ----

    def delete(self) -> None:
        """Give up the contents; the handle stays."""
        self.api.call("buffer_delete", self.api.new("FlagosBufferDeleteArgs", buffer=self.pointer))

    def hold(self, delta: int) -> None:
        """Count external references up or down: while there are any, the storage is neither freed nor donated."""
        self.api.call("buffer_hold", self.api.new("FlagosBufferHoldArgs", buffer=self.pointer, delta=delta))
