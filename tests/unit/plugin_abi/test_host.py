"""The host client over the minimal backend: every kind of call, values in and out, errors as exceptions."""

from __future__ import annotations

import array
import gc
import json
import struct
import threading
from collections.abc import Iterator

import pytest

from plugin_abi import loader
from plugin_abi.errors import FlagosStatusError, StatusCode
from plugin_abi.host import Api, Artifact, Context, ElementType, Executable, HostBufferSemantics, Memory, callbacks
from plugin_abi.loader import Backend
from unit.plugin_abi.plugins import Plugins

F32 = ElementType.F32


@pytest.fixture
def backend(plugins: Plugins) -> Backend:
    plugins.add(options={"from_manifest": 1, "both": "manifest"})
    accepted = loader.load(environment=plugins.environment(FLAGOS_TRIAL_LOAD="0")).accepted
    assert accepted is not None
    return accepted


@pytest.fixture
def context(backend: Backend) -> Iterator[Context]:
    with Context(backend) as context:
        yield context


@pytest.fixture
def memory(context: Context) -> Memory:
    return context.devices[0].default_memory


def _floats(data: bytes | bytearray) -> list[float]:
    return list(struct.unpack(f"{len(data) // 4}f", data))


# ---- Contexts, devices, memories ----


def test_a_context_describes_its_devices_and_memories(context: Context) -> None:
    assert (context.platform_name, context.platform_version) == ("flagos", "minimal 0.1.0")
    (device,) = context.devices
    assert context.addressable_devices == (device,)
    assert (device.id, device.kind, device.is_addressable, device.is_host_memory) == (0, "minimal", True, True)
    assert [memory.kind for memory in context.memories] == ["device", "unpinned_host"]
    assert device.memories == context.memories and device.default_memory is context.memories[0]
    assert context.memories[1].devices == (device,)
    assert device.memory_stats(clear_peaks=True).bytes_in_use == -1
    device.synchronize()


def test_options_of_every_type_reach_the_backend_and_win_over_the_manifests(backend: Backend) -> None:
    options = {
        "text": "größe",
        "bytes": b"\0\1",
        "count": -(2**40),
        "ratio": 0.1,
        "on": True,
        "list": [1, -2],
        "both": 3,
    }
    with Context(backend, options) as context:
        seen = context.devices[0].attributes
    assert seen == {**options, "from_manifest": 1, "bytes": "\0\1", "list": (1, -2)}
    assert seen["on"] is True


# ---- Errors ----


def test_an_error_carries_code_message_and_payload(context: Context) -> None:
    with pytest.raises(FlagosStatusError) as caught:
        Executable.compile(context, b"nonsense")
    assert caught.value.code is StatusCode.INVALID_ARGUMENT
    assert 'the program is not "scale N"' in caught.value.message
    assert caught.value.payloads == {"minimal.slot": b"compile"}


def test_what_a_backend_has_not_is_unimplemented(context: Context, memory: Memory) -> None:
    with memory.allocate([4], F32) as buffer, context.create_event() as event:
        calls = {
            "buffer_promise": lambda: memory.promise([1], F32, ValueError("never")),
            "buffer_fulfill": lambda: buffer.fulfill(None, ValueError("never")),
            "buffer_bitcast": lambda: buffer.bitcast([2, 2], F32),
            "buffer_donate": lambda: buffer.donate(event),
        }
        for slot, call in calls.items():
            with pytest.raises(FlagosStatusError) as caught:
                call()
            assert caught.value.code is StatusCode.UNIMPLEMENTED
            assert caught.value.payloads == {"minimal.slot": slot.encode()}


def test_a_code_of_a_later_abi_is_unknown() -> None:
    assert StatusCode.of(16) is StatusCode.UNAUTHENTICATED
    assert StatusCode.of(17) is StatusCode.of(-1) is StatusCode.UNKNOWN


# ---- Events ----


def test_an_event_of_the_host(context: Context) -> None:
    seen: list[FlagosStatusError | None] = []
    with context.create_event() as event:
        assert event.query() == (False, None)
        with pytest.raises(FlagosStatusError) as caught:
            event.wait(0.01)
        assert caught.value.code is StatusCode.DEADLINE_EXCEEDED
        event.on_ready(seen.append)
        setter = threading.Timer(0.05, event.set)
        setter.start()
        event.wait()
        setter.join()
        assert event.query() == (True, None)
        event.on_ready(seen.append)
        with pytest.raises(FlagosStatusError) as caught:
            event.set()
        assert caught.value.code is StatusCode.FAILED_PRECONDITION
    assert seen == [None, None]


def test_an_event_that_fails(context: Context) -> None:
    seen: list[FlagosStatusError | None] = []
    with context.create_event() as event:
        event.on_ready(seen.append)
        event.set(FlagosStatusError(StatusCode.DATA_LOSS, "the line broke"))
        is_ready, error = event.query()
        assert is_ready and error is not None and error.code is StatusCode.DATA_LOSS
        with pytest.raises(FlagosStatusError, match="the line broke"):
            event.wait()
    assert seen[0] is not None and seen[0].message == "the line broke"


def test_an_exception_of_the_host_becomes_an_error(context: Context) -> None:
    with context.create_event() as event:
        event.set(ValueError("wrong"))
        with pytest.raises(FlagosStatusError, match="ValueError: wrong") as caught:
            event.wait()
    assert caught.value.code is StatusCode.UNKNOWN


def test_no_callback_is_left_behind(context: Context) -> None:
    before = len(callbacks._pending)
    for _ in range(10):
        with context.create_event() as event:
            event.on_ready(lambda _error: None)
    assert len(callbacks._pending) == before


# ---- Buffers ----


@pytest.mark.parametrize("values", [[], [1.5], [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]])
def test_bytes_go_in_and_come_out(memory: Memory, values: list[float]) -> None:
    with memory.from_host(array.array("f", values)) as buffer:
        assert (buffer.dims, buffer.element_type, buffer.size_bytes) == ((len(values),), F32, 4 * len(values))
        assert _floats(buffer.to_host()) == values
        assert buffer.memory is memory and buffer.device is memory.devices[0]
        buffer.wait()


def test_a_scalar_has_no_dimensions(memory: Memory) -> None:
    with memory.from_host(struct.pack("q", -5), (), ElementType.S64) as buffer:
        assert buffer.dims == ()
        assert struct.unpack("q", buffer.to_host()) == (-5,)


def test_strides_in_and_out(memory: Memory) -> None:
    matrix = array.array("f", range(6))  # 2 x 3, read as its transpose
    with memory.from_host(matrix, (3, 2), F32, byte_strides=(4, 12)) as buffer:
        assert _floats(buffer.to_host()) == [0, 3, 1, 4, 2, 5]
        back = bytearray(24)
        with buffer.to_host_async(back, byte_strides=(4, 12)) as done:
            done.wait()
        assert _floats(back) == list(matrix)


def test_an_address_needs_shape_and_type(memory: Memory) -> None:
    data = array.array("f", [1, 2])
    address, _ = data.buffer_info()
    with memory.from_host(address, (2,), F32, semantics=HostBufferSemantics.IMMUTABLE_UNTIL_TRANSFER) as buffer:
        assert _floats(buffer.to_host()) == [1, 2]
    with pytest.raises(ValueError, match="dims and element_type"):
        memory.from_host(address)


def test_a_format_without_an_element_type_is_named(memory: Memory) -> None:
    with pytest.raises(ValueError, match="'c'"):
        memory.from_host(memoryview(b"ab").cast("c"))


def test_raw_bytes(memory: Memory) -> None:
    with memory.allocate([8], ElementType.U8) as buffer:
        buffer.write_raw(b"abcdefgh")
        buffer.write_raw(b"XY", offset=2)
        assert buffer.read_raw(1, 4) == b"bXYe"
        for offset, size in ((-1, 2), (7, 2), (9, 0), (0, -1), (2**62, 2**62)):
            with pytest.raises(FlagosStatusError) as caught:
                buffer.read_raw(offset, size) if size < 2**60 else buffer.write_raw(b"x", offset)
            assert caught.value.code is StatusCode.OUT_OF_RANGE


def test_a_copy_in_another_memory(context: Context, memory: Memory) -> None:
    with memory.from_host(array.array("f", [1, 2])) as buffer, buffer.copy_to(context.memories[1]) as copied:
        buffer.delete()
        assert copied.memory.kind == "unpinned_host"
        assert _floats(copied.to_host()) == [1, 2]


def test_a_deleted_buffer_says_so(memory: Memory) -> None:
    with memory.allocate([1], F32) as buffer:
        assert not buffer.is_deleted
        buffer.delete()
        buffer.delete()
        assert buffer.is_deleted
        with pytest.raises(FlagosStatusError, match="deleted"):
            buffer.to_host()


def test_holds_are_counted(memory: Memory) -> None:
    with memory.allocate([1], F32) as buffer:
        buffer.hold(+1)
        buffer.hold(-1)
        with pytest.raises(FlagosStatusError, match="count is zero"):
            buffer.hold(-1)


def test_a_view_neither_copies_nor_owns(memory: Memory) -> None:
    data = array.array("f", [1, 2])
    address, _ = data.buffer_info()
    released: list[bool] = []
    with memory.view(address, (2,), F32, lambda: released.append(True)) as buffer:
        data[0] = 7
        assert _floats(buffer.to_host()) == [7, 2]
        assert buffer.pointer_address() == address
        assert released == []
    assert released == [True]
    memory.view(address, (2,), F32).close()


def test_handles_are_destroyed_once(memory: Memory) -> None:
    buffer = memory.allocate([1], F32)
    buffer.close()
    buffer.close()
    assert buffer.is_closed
    released: list[bool] = []
    view = memory.view(1, (0,), F32, lambda: released.append(True))
    del view
    gc.collect()
    assert released == [True]


def test_closing_a_context_closes_what_is_open_in_it(backend: Backend) -> None:
    released: list[bool] = []
    with Context(backend) as context:
        view = context.memories[0].view(1, (0,), F32, lambda: released.append(True))
    assert view.is_closed and released == [True]


# ---- Executables ----


def test_compile_describe_execute(context: Context, memory: Memory) -> None:
    with Executable.compile(context, b"scale 2.5") as executable, memory.from_host(array.array("f", range(4))) as x:
        description = executable.describe()
        assert (description.name, description.num_arguments, description.argument_aliases) == ("scale 2.5", 1, (-1,))
        assert description.devices == context.devices and description.device_assignment == (0,)
        (output,) = description.outputs
        assert (output.dims, output.element_type, output.memory_kind, output.sharding) == ((4,), F32, "device", None)
        assert description.argument_shardings == (None,) and description.cost_analysis == {"flops": 4.0}
        ((result,),), (done,) = executable.execute([[x]])
        done.wait()
        assert _floats(result.to_host()) == [0, 2.5, 5, 7.5]


@pytest.mark.parametrize(
    ("arguments", "says"), [(0, "one argument"), (2, "one argument"), (1, "argument 0 is not an F32")]
)
def test_arguments_that_do_not_fit_are_named(context: Context, memory: Memory, arguments: int, says: str) -> None:
    with Executable.compile(context, b"scale 2") as executable, memory.allocate([3], F32) as wrong:
        with pytest.raises(FlagosStatusError, match=says):
            executable.execute([[wrong] * arguments])
        with pytest.raises(ValueError, match="each device takes 1"):
            executable.execute([[wrong], []])


def test_artifacts_and_loading_again(context: Context, memory: Memory) -> None:
    with Executable.compile(context, b"scale 3") as executable:
        serialized = executable.artifact(Artifact.SERIALIZED)
        with pytest.raises(FlagosStatusError) as caught:
            executable.artifact(Artifact.COMPILE_OPTIONS)
        assert caught.value.code is StatusCode.UNIMPLEMENTED
    with Executable.load(context, serialized, [0]) as loaded, memory.from_host(array.array("f", [1] * 4)) as x:
        outputs, _ = loaded.execute([[x]], non_donatable=[0], device=context.devices[0], launch_id=7)
        assert _floats(outputs[0][0].to_host()) == [3] * 4


def test_a_profile_is_trace_event_json(context: Context) -> None:
    context.profiler_start()
    assert json.loads(context.profiler_stop()) == {"traceEvents": []}


# ---- Callbacks that a host gives ----


def test_a_key_value_store_answers_with_status_codes(backend: Backend) -> None:
    """The C functions that a backend is given, called as it would call them."""

    class Store:
        def __init__(self) -> None:
            self.values: dict[bytes, bytes] = {}

        def get(self, key: bytes, timeout_ms: int) -> bytes:
            if timeout_ms:
                raise TimeoutError
            return self.values[key]

        def put(self, key: bytes, value: bytes) -> None:
            if key in self.values:
                raise KeyError(key)
            self.values[key] = value

    ffi = Api(backend).ffi
    store = Store()
    user_data = ffi.new_handle(store)
    get, put = callbacks.callback("FlagosKeyValueGet"), callbacks.callback("FlagosKeyValuePut")
    assert put(user_data, b"key", 3, ffi.from_buffer(b"value"), 5) == StatusCode.OK
    assert put(user_data, b"key", 3, ffi.from_buffer(b"value"), 5) == StatusCode.ALREADY_EXISTS
    statuses: list[int] = []
    got = callbacks.receive(lambda sink, data: statuses.append(get(user_data, b"key", 3, 0, sink, data)))
    assert (got, statuses) == (b"value", [StatusCode.OK])
    assert get(user_data, b"other", 5, 0, ffi.NULL, ffi.NULL) == StatusCode.NOT_FOUND
    assert get(user_data, b"key", 3, 10, ffi.NULL, ffi.NULL) == StatusCode.DEADLINE_EXCEEDED


def test_a_host_callback_fills_results_and_its_exception_is_an_error(backend: Backend) -> None:
    api = Api(backend)

    def double(call_id: int, arguments: object, results: object) -> None:
        if call_id == 9:
            raise ArithmeticError("nine")
        if call_id == 10:
            raise KeyboardInterrupt
        (argument,), (result,) = arguments, results  # type: ignore[misc]
        assert argument.dims == (2,) and argument.element_type is ElementType.F32
        result.data[:] = struct.pack("2f", *(2 * value for value in _floats(bytes(argument.data))))

    user_data = api.ffi.new_handle(callbacks.HostCallbackData(api, double))
    source, target, dims = api.ffi.from_buffer(struct.pack("2f", 1, 2)), api.ffi.new("char[8]"), api.int64s([2])
    arrays = [
        api.new("FlagosHostArray", data=api.ffi.cast("void*", data), size_bytes=8, dims=dims, rank=1, element_type=11)
        for data in (source, target)
    ]
    call = callbacks.callback("FlagosHostCallback")
    assert call(user_data, 1, arrays[0], 1, arrays[1], 1) == api.ffi.NULL
    assert _floats(bytes(api.ffi.buffer(target))) == [2, 4]
    error = api.take_error(call(user_data, 9, arrays[0], 1, arrays[1], 1))
    assert error.message == "ArithmeticError: nine"
    interrupted = call(user_data, 10, arrays[0], 1, arrays[1], 1)
    assert interrupted != api.ffi.NULL, "the program would go on with results that nobody filled"
    assert api.take_error(interrupted).message.startswith("KeyboardInterrupt")
