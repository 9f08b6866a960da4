"""A backend that fails: an error from any function of its table comes out of PJRT whole, and nothing aborts.

Also: a client that is destroyed before what was made with it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from cpu.pjrt.harness import Client, Program, compile_options
from support import pjrt
from support.pjrt import FlagosTable, Pjrt, PjrtError, ffi

RESOURCE_EXHAUSTED = 8
MESSAGE = "made to fail"
CONVERTER = "int32_t(void*, char*, size_t, void*, size_t, void*, size_t, void (*)(void*, void*, size_t), void*)"


class Scene:
    """Objects made while the backend still works, to be used once it does not."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.api = client.api
        self.array = np.arange(4, dtype=np.float32)
        self.buffer = client.put(self.array)
        self.executable = client.compile(lambda x: x + 1, self.array)
        self.description = client.executable(self.executable)

    def close(self) -> None:
        self.client.destroy(self.buffer)
        self.api.call("PJRT_LoadedExecutable_Destroy", executable=self.executable)
        self.api.call("PJRT_Executable_Destroy", executable=self.description)
        self.client.close()

    def on_buffer(self, function: str, **fields: Any) -> Any:
        return self.api.call(f"PJRT_Buffer_{function}", buffer=self.buffer, **fields)

    def shaped(self, function: str, **fields: Any) -> Any:
        return self.client.call(
            f"PJRT_Client_{function}",
            shape_dims=pjrt.int64s([4]),
            shape_num_dims=1,
            shape_element_type=pjrt.buffer_type(np.float32),
            memory=self.client.default_memory(),
            **fields,
        )

    def view(self) -> None:
        self.client.call(
            "PJRT_Client_CreateViewOfDeviceBuffer",
            device_buffer_ptr=pjrt.pointer_to(self.array),
            dims=pjrt.int64s([4]),
            num_dims=1,
            element_type=pjrt.buffer_type(np.float32),
            device=self.client.devices[0],
        )

    def fulfill(self) -> None:
        made = self.shaped("CreateAliasBuffer")
        self.api.call(
            "PJRT_Client_FulfillAliasBuffer",
            buffer=self.buffer,
            fulfill_alias_buffer_cb=made.fulfill_alias_buffer_cb,
        )

    def ready_event(self) -> Any:
        return self.on_buffer("ReadyEvent").event

    def transfer(self) -> None:
        from support.transfers import Manager

        Manager(self.client, ((4,), np.float32)).write(0, self.array)

    def load(self, content: bytes) -> None:
        given = ffi().from_buffer(content)
        self.client.call(
            "PJRT_Executable_DeserializeAndLoad",
            serialized_executable=ffi().cast("char*", given),
            serialized_executable_size=len(content),
        )


# What calls each function of the table.
USES: dict[str, Callable[[Scene], Any]] = {
    "device_memory_stats": lambda s: s.api.call("PJRT_Device_MemoryStats", device=s.client.devices[0]),
    "event_create": lambda s: s.on_buffer("DonateWithControlDependency"),
    "event_query": lambda s: s.api.call("PJRT_Event_IsReady", event=s.ready_event()),
    "event_await": lambda s: s.api.wait(s.ready_event()),
    "event_on_ready": lambda s: s.api.on_ready(s.ready_event(), lambda _error: None),
    "buffer_from_host": lambda s: s.client.put(s.array),
    "buffer_allocate": lambda s: s.shaped("CreateUninitializedBuffer"),
    "buffer_view": Scene.view,
    "buffer_promise": lambda s: s.shaped("CreateAliasBuffer"),
    "buffer_fulfill": Scene.fulfill,
    "buffer_describe": lambda s: s.client.is_deleted(s.buffer),
    "buffer_ready_event": Scene.ready_event,
    "buffer_to_host": lambda s: s.client.get(s.buffer, np.float32),
    "buffer_read_raw": lambda s: s.on_buffer("CopyRawToHost", dst=pjrt.pointer_to(s.array), transfer_size=4),
    "buffer_write_raw": Scene.transfer,
    "buffer_copy": lambda s: s.on_buffer("CopyToMemory", dst_memory=s.client.default_memory(1)),
    "buffer_bitcast": lambda s: s.on_buffer(
        "Bitcast", dims=pjrt.int64s([2, 2]), num_dims=2, element_type=pjrt.buffer_type(np.int32)
    ),
    "buffer_delete": lambda s: s.on_buffer("Delete"),
    "buffer_hold": lambda s: s.on_buffer("IncreaseExternalReferenceCount"),
    "buffer_pointer": lambda s: s.on_buffer("UnsafePointer"),
    "buffer_donate": lambda s: s.on_buffer("DonateWithControlDependency"),
    "compile": lambda s: s.client.compile(lambda x: x + 2, s.array),
    "executable_load": lambda s: s.load(b"anything"),
    "executable_describe": lambda s: s.client.compile(lambda x: x + 2, s.array),
    "executable_artifact": lambda s: s.api.call("PJRT_Executable_Serialize", executable=s.description),
    "execute": lambda s: s.client.execute(s.executable, [s.buffer]),
}
# Slots that do not return errors, are the injector's own tools, or are tested apart from these.
NOT_HERE = {
    "error_create", "error_destroy", "error_describe", "context_create", "context_destroy", "context_describe",
    "device_describe", "memory_describe", "device_synchronize", "event_destroy", "event_set", "buffer_destroy",
    "executable_destroy", "profiler_start", "profiler_stop",
}  # fmt: skip


def test_every_function_is_covered(table: FlagosTable) -> None:
    slots = {name for name, _ in table.ffi.typeof("FlagosApi").fields} - {"struct_size", "version", "reserved"}
    assert slots == USES.keys() | NOT_HERE


@pytest.mark.parametrize("slot", USES)
def test_a_failure_comes_out(api: Pjrt, table: FlagosTable, slot: str) -> None:
    client = Client(api, table.address)
    scene = Scene(client)
    table.fail(slot, RESOURCE_EXHAUSTED, MESSAGE)
    with pytest.raises(PjrtError) as error:
        USES[slot](scene)
    assert (error.value.code, error.value.message) == ("RESOURCE_EXHAUSTED", MESSAGE)
    table.restore()
    if slot not in ("buffer_delete", "buffer_donate", "event_create"):
        np.testing.assert_array_equal(client.get(scene.buffer, np.float32), scene.array)
    scene.close()


@pytest.mark.parametrize("slot", ["context_create", "context_describe", "device_describe", "memory_describe"])
def test_a_failure_while_a_client_is_made(api: Pjrt, table: FlagosTable, slot: str) -> None:
    table.fail(slot, RESOURCE_EXHAUSTED, MESSAGE)
    with pytest.raises(PjrtError) as error:
        Client(api, table.address)
    assert (error.value.code, error.value.message) == ("RESOURCE_EXHAUSTED", MESSAGE)


def test_payloads_come_along(api: Pjrt, table: FlagosTable) -> None:
    """An error of the backend carries named bytes; the real one names the instruction, this one is given by hand."""
    client = Client(api, table.address)
    describe = table.original.error_describe
    key, value = table.ffi.new("char[]", b"flagos.instruction"), table.ffi.new("char[]", b"add.3\x00\xff")
    payload = table.ffi.new("FlagosNamedValue[1]")
    payload[0].name, payload[0].name_size = key, 18
    payload[0].string_value, payload[0].value_size = value, 7

    def described(args: Any) -> None:
        describe(args)
        args.payloads, args.num_payloads = payload, 1

    table.replace("error_describe", described)
    table.fail("compile", 12, MESSAGE)
    with pytest.raises(PjrtError, match=f"UNIMPLEMENTED: {MESSAGE}") as error:
        client.compile(lambda x: x, np.zeros(3, np.float32))
    assert error.value.payloads == {"flagos.instruction": b"add.3\x00\xff"}


def test_a_failed_write_fails_the_promised_buffer(api: Pjrt, table: FlagosTable) -> None:
    from support.transfers import Manager

    client = Client(api, table.address)
    manager = Manager(client, ((4,), np.float32))
    buffer = manager.retrieve(0)
    table.fail("buffer_write_raw", RESOURCE_EXHAUSTED, MESSAGE)
    with pytest.raises(PjrtError, match=MESSAGE):
        manager.write(0, np.zeros(4, np.float32))
    manager.destroy()
    with pytest.raises(PjrtError, match=MESSAGE):
        client.await_buffer(buffer)


def test_a_client_lives_as_long_as_what_was_made_with_it(api: Pjrt, table: FlagosTable) -> None:
    """PJRT_Client_Destroy may come first: the context goes last, after buffers, events and executables."""
    destroyed: list[str] = []
    for slot in ("context_destroy", "buffer_destroy", "event_destroy", "executable_destroy"):
        original = getattr(table.original, slot)
        table.replace(slot, lambda handle, o=original, s=slot: (destroyed.append(s), o(handle))[1])
    client = Client(api, table.address)
    scene = Scene(client)
    event = scene.ready_event()
    client.close()
    assert "context_destroy" not in destroyed
    np.testing.assert_array_equal(client.get(scene.buffer, np.float32), scene.array)
    client.destroy(scene.buffer)
    api.call("PJRT_LoadedExecutable_Destroy", executable=scene.executable)
    api.call("PJRT_Executable_Destroy", executable=scene.description)
    assert "context_destroy" not in destroyed
    api.call("PJRT_Event_Destroy", event=event)
    assert destroyed[-1] == "context_destroy"
    assert destroyed.count("context_destroy") == 1


def test_converter_that_fails(api: Pjrt, backend: Any) -> None:
    @ffi().callback(CONVERTER)
    def convert(_user: Any, _f: Any, _fs: int, _c: Any, _cs: int, _o: Any, _os: int, sink: Any, data: Any) -> int:
        text = "kein Übersetzer".encode()
        sink(data, ffi().from_buffer(text), len(text))
        return 15

    client = Client(api, backend.address, flagos_converter=int(ffi().cast("intptr_t", convert)))
    with pytest.raises(PjrtError) as error:
        client.compile_bytes(b"x", options=compile_options())
    assert (error.value.code, error.value.message) == ("DATA_LOSS", "kein Übersetzer")
    client.close()


def test_a_converter_that_cannot_answer_is_not_waited_for(api: Pjrt, backend: Any) -> None:
    """jaxlib holds the interpreter's lock while it waits for PJRT_Compile; a converter in Python then never runs."""
    locked = threading.Event()

    @ffi().callback(CONVERTER)
    def convert(_user: Any, _f: Any, _fs: int, _c: Any, _cs: int, _o: Any, _os: int, _sink: Any, _data: Any) -> int:
        locked.wait()
        return 1

    client = Client(api, backend.address, flagos_converter=int(ffi().cast("intptr_t", convert)))
    topology = client.call("PJRT_Client_TopologyDescription").topology
    program = Program(api, b"x", "hlo")
    with pytest.raises(PjrtError, match="keeps the Python interpreter locked") as error:
        api.call("PJRT_Compile", topology=topology, program=program.pointer)
    assert error.value.code == "FAILED_PRECONDITION"
    locked.set()
    client.close()
