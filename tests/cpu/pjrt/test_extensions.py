"""Extensions: shardings, memory descriptions, the profiler."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from cpu.pjrt.harness import Client
from flagos_backend.importer import schema
from support import pjrt
from support.pjrt import FlagosTable, Pjrt, PjrtError, ffi


def test_chain(api: Pjrt) -> None:
    types = []
    base = api.api.extension_start
    while base != ffi().NULL:
        types.append(int(ffi().cast("int", base.type)))
        base = base.next
    names = {value: name for name, value in pjrt.abi.enums["PJRT_Extension_Type"].items()}
    assert {names[type_].removeprefix("PJRT_Extension_Type_") for type_ in types} == {
        "Profiler",
        "MemoryDescriptions",
        "Shardings",
    }
    assert len(set(types)) == len(types)


# ---- Shardings ----


def shardings(api: Pjrt, executable: Any, which: str) -> list[bytes] | None:
    table = api.extension("Shardings", "PJRT_Shardings_Extension")
    function = f"PJRT_Shardings_PJRT_Executable_{which}Shardings"
    args = api.call_with(function, api.new(f"{function}_Args", executable=executable), table)
    count = args.num_parameters if which == "Parameter" else args.num_outputs
    if args.shardings == ffi().NULL:
        return None
    return [ffi().buffer(args.shardings[i], args.sharding_sizes[i])[:] for i in range(count)]


def test_no_shardings(api: Pjrt, client: Client) -> None:
    loaded = client.compile(lambda x: (x, x + 1), np.zeros(3, np.float32))
    executable = client.executable(loaded)
    assert shardings(api, executable, "Parameter") is None
    assert shardings(api, executable, "Output") is None


def test_shardings(api: Pjrt, table: FlagosTable) -> None:
    """Bytes of the backend pass through unchanged; none at all means replicated."""
    split = schema.OpSharding(type=3, tile_assignment_dimensions=[2, 1], tile_assignment_devices=[0, 1])
    given = [split.SerializeToString(), b""]
    kept = [table.ffi.from_buffer(content) for content in given]
    array = table.ffi.new("FlagosBytes[]", [(kept[0], len(given[0])), (table.ffi.NULL, 0)])
    describe = table.original.executable_describe

    def described(args: Any) -> Any:
        error = describe(args)
        args.output_shardings = args.argument_shardings = array
        return error

    table.replace("executable_describe", described)
    client = Client(api, table.address)
    executable = client.executable(client.compile(lambda x, y: (x + y, y), np.zeros(3), np.zeros(3)))
    assert shardings(api, executable, "Output") == given
    assert shardings(api, executable, "Parameter") == given


# ---- Memory descriptions ----


def test_memory_descriptions(api: Pjrt, client: Client) -> None:
    table = api.extension("MemoryDescriptions", "PJRT_MemoryDescriptions_Extension")
    for device in client.devices:
        description = api.call("PJRT_Device_GetDescription", device=device).device_description
        function = "PJRT_DeviceDescription_MemoryDescriptions"
        args = api.call_with(function, api.new(f"{function}_Args", device_description=description), table)
        found = {}
        for memory in ffi().unpack(args.memory_descriptions, args.num_memory_descriptions):
            function = "PJRT_MemoryDescription_Kind"
            kind = api.call_with(function, api.new(f"{function}_Args", memory_description=memory), table)
            found[pjrt.text(kind.kind, kind.kind_size)] = kind.kind_id
        assert list(found)[args.default_memory_index] == "device"
        assert found == {
            client.memory_kind(m): api.call("PJRT_Memory_Kind_Id", memory=m).kind_id for m in client.memories
        }


# ---- Profiler ----


class Profiler:
    """A profiling session through PLUGIN_Profiler_Api; like jaxlib it leaves struct_size alone."""

    def __init__(self, api: Pjrt) -> None:
        self.api = api
        self.table = api.extension("Profiler", "PJRT_Profiler_Extension").profiler_api
        self.pointer = self.call("create").profiler

    def call(self, function: str) -> Any:
        struct = {"collect_data": "CollectData"}.get(function, function.capitalize())
        args = ffi().new(f"PLUGIN_Profiler_{struct}_Args*")
        args.struct_size = 0
        if function != "create":
            args.profiler = self.pointer
        error = getattr(self.table, function)(args)
        if error != ffi().NULL:
            raise self.take_error(error)
        return args

    def take_error(self, error: Any) -> PjrtError:
        message = ffi().new("PLUGIN_Profiler_Error_Message_Args*", {"error": error})
        self.table.error_message(message)
        code = ffi().new("PLUGIN_Profiler_Error_GetCode_Args*", {"error": error})
        self.table.error_get_code(code)
        taken = PjrtError(pjrt.CODES[code.code], pjrt.text(message.message, message.message_size), {})
        self.table.error_destroy(ffi().new("PLUGIN_Profiler_Error_Destroy_Args*", {"error": error}))
        return taken


def event_names(space: bytes) -> dict[str, set[str]]:
    """Plane names and the names of their events, read by XLA's own profile reader."""
    from jax.profiler import ProfileData

    data = ProfileData.from_serialized_xspace(space)
    return {plane.name: {event.name for line in plane.lines for event in line.events} for plane in data.planes}


def event_statistics(space: bytes) -> dict[str, dict[str, Any]]:
    """What is said of each event of the device, by its name."""
    from jax.profiler import ProfileData

    [plane] = [plane for plane in ProfileData.from_serialized_xspace(space).planes if plane.name == "/device:flagos"]
    return {event.name: dict(event.stats) for line in plane.lines for event in line.events}


def test_profile(api: Pjrt, client: Client) -> None:
    loaded = client.compile(lambda x: x @ x, np.zeros((8, 8), np.float32))
    profiler = Profiler(api)
    profiler.call("start")
    with pytest.raises(PjrtError, match="the session runs already"):
        profiler.call("start")
    client.execute(loaded, [client.put(np.zeros((8, 8), np.float32))])
    profiler.call("stop")
    data = profiler.call("collect_data")
    space = ffi().buffer(data.buffer, data.buffer_size_in_bytes)[:]
    names = event_names(space)
    assert "/device:flagos" in names
    assert names["/device:flagos"]
    profiler.call("stop")  # nothing runs: nothing happens
    profiler.call("destroy")


def test_a_trace_that_is_no_trace(api: Pjrt, table: FlagosTable) -> None:
    client = Client(api, table.address)
    for answer in (b"", b"{", b'{"traceEvents": 1}', b'{"traceEvents": [{"ph": X}]}', b"[" * 100000):

        def stop(args: Any, answer: bytes = answer) -> Any:
            args.sink(args.sink_data, table.ffi.from_buffer(answer), len(answer))
            return table.ffi.NULL

        table.replace("profiler_start", lambda _args: table.ffi.NULL)
        table.replace("profiler_stop", stop)
        profiler = Profiler(api)
        profiler.call("start")
        with pytest.raises(PjrtError, match="is no trace-event JSON"):
            profiler.call("stop")
        profiler.call("destroy")
    table.restore()
    client.close()


def test_traces_in_other_forms(api: Pjrt, table: FlagosTable) -> None:
    """A bare array, other phases, nested arguments and escapes are all read."""
    client = Client(api, table.address)
    answer = (
        rb'[{"ph":"M","name":"process_name","args":{"a":[1,{"b":null}],"c":true}},'
        rb'{"args":{},"ph":"X","name":"mat\u006dul \"1\" \\","ts":1.5e3,"dur":2,"tid":7,"pid":1}]'
    )

    def stop(args: Any) -> Any:
        args.sink(args.sink_data, table.ffi.from_buffer(answer), len(answer))
        return table.ffi.NULL

    table.replace("profiler_start", lambda _args: table.ffi.NULL)
    table.replace("profiler_stop", stop)
    profiler = Profiler(api)
    profiler.call("start")
    profiler.call("stop")
    data = profiler.call("collect_data")
    names = event_names(ffi().buffer(data.buffer, data.buffer_size_in_bytes)[:])
    assert 'matmul "1" \\' in names["/device:flagos"]
    profiler.call("destroy")
    table.restore()
    client.close()


def test_statistics(api: Pjrt, table: FlagosTable) -> None:
    """Events of described programs have their work; facts of another type than they should be are passed over."""
    client = Client(api, table.address)
    step = {"kind": "product", "provider": "BLAS", "operation": "jit(f)/dot", "source": "f.py:3", "flops": 8192.0}
    step |= {"bytes": 3072, "expected_seconds": 5e-7}
    facts = {"name": "jit_f", "kind": 7, "flops": 1e4, "bytes": "many", "expected_seconds": None, "steps": {"2": step}}
    span = {"ph": "X", "pid": 5, "tid": 1, "ts": 10.0, "dur": 2.0}
    events = [
        {"ph": "M", "name": "flagos_program", "pid": 5, "args": {"program": 0, "facts": facts}},
        {"ph": "M", "name": "flagos_program", "pid": 5, "args": {"program": 1, "facts": [3, {"name": "x"}]}},
        span | {"name": "launch", "args": {"program": 0}},
        span | {"name": "step", "args": {"program": 0, "step": 2}},
        span | {"name": "unknown step", "args": {"program": 0, "step": 3}},
        span | {"name": "of another process", "pid": 6, "args": {"program": 0}},
        span | {"name": "copy", "args": {"bytes": 64, "program": "none"}},
        span | {"name": "bare", "args": 1},
    ]
    answer = json.dumps(events).encode()

    def stop(args: Any) -> Any:
        args.sink(args.sink_data, table.ffi.from_buffer(answer), len(answer))
        return table.ffi.NULL

    table.replace("profiler_start", lambda _args: table.ffi.NULL)
    table.replace("profiler_stop", stop)
    profiler = Profiler(api)
    profiler.call("start")
    profiler.call("stop")
    data = profiler.call("collect_data")
    found = event_statistics(ffi().buffer(data.buffer, data.buffer_size_in_bytes)[:])
    assert found == {
        "launch": {"hlo_module": "jit_f", "flops": 10000},
        "step": {
            "hlo_module": "jit_f",
            "hlo_category": "product",
            "provider": "BLAS",
            "tf_op": "jit(f)/dot",
            "source": "f.py:3",
            "flops": 8192,
            "bytes_accessed": 3072,
            "expected_us": pytest.approx(0.5),
            "roofline": pytest.approx(0.25),
        },
        "unknown step": {},
        "of another process": {},
        "copy": {"bytes": 64},
        "bare": {},
    }
    profiler.call("destroy")
    table.restore()
    client.close()


@pytest.mark.parametrize("slot", ["profiler_start", "profiler_stop"])
def test_profiler_failures(api: Pjrt, table: FlagosTable, slot: str) -> None:
    client = Client(api, table.address)
    table.fail(slot, 14, "no counters")
    profiler = Profiler(api)
    with pytest.raises(PjrtError, match="UNAVAILABLE: no counters"):
        profiler.call("start")
        profiler.call("stop")
    profiler.call("destroy")
    table.restore()
    client.close()
