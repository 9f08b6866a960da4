"""The C functions that a backend calls back into the host: one per kind, each with a Python object as its user data.

Made once per process, so that no callback of a backend ever meets a freed closure.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from plugin_abi import cabi
from plugin_abi.errors import FlagosStatusError, StatusCode
from plugin_abi.host.api import ElementType, HostArray, HostCallback, KeyValueStore

if TYPE_CHECKING:
    from plugin_abi.host.api import Api

#: Handles of callbacks that are called once and have not been called yet, by address.
_pending: dict[int, Any] = {}


def _address(pointer: Any) -> int:
    return int(cabi.ffi().cast("uintptr_t", pointer))


def pending_handle(value: Any) -> Any:
    """A void* for an object that one single callback will take back with take()."""
    handle = cabi.ffi().new_handle(value)
    _pending[_address(handle)] = handle
    return handle


def take(user_data: Any) -> Any:
    """The object of a pending handle; the handle ends here."""
    return cabi.ffi().from_handle(_pending.pop(_address(user_data)))


@dataclass(frozen=True)
class EventListener:
    """Who waits for an event."""

    api: Api
    function: Callable[[FlagosStatusError | None], None]


def _on_event(user_data: Any, error: Any) -> None:
    listener: EventListener = take(user_data)
    failure = None if error == listener.api.ffi.NULL else listener.api.take_error(error)
    listener.function(failure)


def _on_release(user_data: Any) -> None:
    function: Callable[[], None] = take(user_data)
    function()


def _on_bytes(sink_data: Any, data: Any, size: int) -> None:
    received: bytearray = cabi.ffi().from_handle(sink_data)
    if size:
        received += cabi.ffi().buffer(data, size)


@dataclass(frozen=True)
class HostCallbackData:
    """The user data of a context's host callback."""

    api: Api
    function: HostCallback


def _array(ffi: Any, array: Any) -> HostArray:
    dims = tuple(ffi.unpack(array.dims, array.rank)) if array.rank else ()
    data = memoryview(ffi.buffer(array.data, array.size_bytes) if array.size_bytes else b"")
    return HostArray(data, dims, ElementType(array.element_type))


def _on_host_callback(
    user_data: Any, call_id: int, arguments: Any, num_arguments: int, results: Any, num_results: int
) -> Any:
    ffi = cabi.ffi()
    data: HostCallbackData = ffi.from_handle(user_data)
    try:
        inputs = [_array(ffi, arguments[index]) for index in range(num_arguments)]
        outputs = [_array(ffi, results[index]) for index in range(num_results)]
        data.function(call_id, inputs, outputs)
    except BaseException as error:  # A boundary to C: whatever the user's function raises becomes the program's error.
        return data.api.make_error(error)
    return ffi.NULL


def _on_lost_host_callback(_kind: Any, error: BaseException, traceback: Any) -> Any:
    data: HostCallbackData = cabi.ffi().from_handle(traceback.tb_frame.f_locals["user_data"])
    return data.api.make_error(error)


def _on_get(user_data: Any, key: Any, key_size: int, timeout_ms: int, sink: Any, sink_data: Any) -> int:
    ffi = cabi.ffi()
    store: KeyValueStore = ffi.from_handle(user_data)
    try:
        value = store.get(bytes(ffi.buffer(key, key_size)), timeout_ms)
    except KeyError:
        return StatusCode.NOT_FOUND
    except TimeoutError:
        return StatusCode.DEADLINE_EXCEEDED
    except Exception:  # A boundary to C: the store's own failure is a status code.
        return StatusCode.INTERNAL
    sink(sink_data, ffi.from_buffer(value), len(value))
    return StatusCode.OK


def _on_put(user_data: Any, key: Any, key_size: int, value: Any, value_size: int) -> int:
    ffi = cabi.ffi()
    store: KeyValueStore = ffi.from_handle(user_data)
    try:
        store.put(bytes(ffi.buffer(key, key_size)), bytes(ffi.buffer(ffi.cast("char*", value), value_size)))
    except KeyError:
        return StatusCode.ALREADY_EXISTS
    except Exception:  # A boundary to C: the store's own failure is a status code.
        return StatusCode.INTERNAL
    return StatusCode.OK


_FUNCTIONS: Final[Mapping[str, Callable[..., Any]]] = {
    "FlagosEventCallback": _on_event,
    "FlagosReleaseCallback": _on_release,
    "FlagosBytesSink": _on_bytes,
    "FlagosHostCallback": _on_host_callback,
    "FlagosKeyValueGet": _on_get,
    "FlagosKeyValuePut": _on_put,
}
#: What the C side hears where Ctrl-C comes outside of a function's ``try``, as it begins or returns; zeros would say
#: that all went well.
_LOST: Final[Mapping[str, Mapping[str, Any]]] = {
    "FlagosHostCallback": {"onerror": _on_lost_host_callback},
    "FlagosKeyValueGet": {"error": int(StatusCode.CANCELLED)},
    "FlagosKeyValuePut": {"error": int(StatusCode.CANCELLED)},
}
_closures: dict[str, Any] = {}


def callback(kind: str) -> Any:
    """The process's C function of a callback type of the header."""
    found = _closures.get(kind)
    if found is None:
        # Of threads that make one at once all get the one that is kept; the others' are freed.
        found = _closures.setdefault(kind, cabi.ffi().callback(kind, _FUNCTIONS[kind], **_LOST.get(kind, {})))
    return found


def receive(call: Callable[[Any, Any], None]) -> bytes:
    """What a backend hands to a sink during a call that is given the sink and its data."""
    received = bytearray()
    handle = cabi.ffi().new_handle(received)
    call(callback("FlagosBytesSink"), handle)
    return bytes(received)
