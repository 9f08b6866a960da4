"""What a host may get wrong in a call, or leave out because it is older: refused by name, never a crash."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from cpu.native.harness import add_one, compile, put
from plugin_abi import cabi
from plugin_abi.errors import FlagosStatusError, StatusCode
from plugin_abi.host import Context, Memory
from plugin_abi.host.api import Api
from plugin_abi.loader import Backend
from plugin_abi.negotiation import slots

# What destroys or describes an error takes no struct, or has no error to return.
WITHOUT_ERRORS = {"error_destroy", "error_describe", "context_destroy", "event_destroy", "buffer_destroy"}
FUNCTIONS = sorted(set(slots(cabi.ffi())) - WITHOUT_ERRORS - {"executable_destroy"})


def struct_of(api: Api, slot: str) -> Any:
    """The type of a function's argument struct."""
    return api.ffi.typeof(getattr(api.backend.api, slot)).args[0].item


def size_of(api: Api, slot: str) -> int:
    return api.ffi.sizeof(struct_of(api, slot))


def code_of(api: Api, slot: str, args: Any) -> FlagosStatusError:
    with pytest.raises(FlagosStatusError) as refused:
        api.call(slot, args)
    return refused.value


@pytest.mark.parametrize("slot", FUNCTIONS)
def test_null_is_refused_by_name(backend: Backend, slot: str) -> None:
    api = Api(backend)
    error = code_of(api, slot, api.ffi.NULL)
    assert error.code == StatusCode.INVALID_ARGUMENT
    assert error.message.startswith(f"{slot}: ")


@pytest.mark.parametrize("slot", [name for name in FUNCTIONS if name not in ("error_create", "context_create")])
def test_zeroed_structs_are_refused_by_name(backend: Backend, slot: str) -> None:
    api = Api(backend)
    args = api.ffi.new(f"{struct_of(api, slot).cname}*")
    for size in (0, 4):
        args.struct_size = size
        assert f"struct_size is {size}" in str(code_of(api, slot, args))
    for size in (8, 24, size_of(api, slot)):
        args.struct_size = min(size, size_of(api, slot))
        error = code_of(api, slot, args)
        assert error.code == StatusCode.INVALID_ARGUMENT
        assert error.message.startswith(f"{slot}: ")


def test_destroying_nothing_is_allowed(backend: Backend) -> None:
    api = Api(backend)
    for slot in ("error_destroy", "context_destroy", "event_destroy", "buffer_destroy", "executable_destroy"):
        api.function(slot)(api.ffi.NULL)
    args = api.new("FlagosErrorDescribeArgs", code=-5)
    api.function("error_describe")(args)
    assert args.code == -5


def test_nothing_beyond_an_older_hosts_struct_is_touched(context: Context, memory: Memory) -> None:
    api = context.api
    buffer = put(memory, np.zeros((2, 3), np.float32))
    whole = api.new("FlagosBufferDescribeArgs", buffer=buffer.pointer)
    # Every size at which a field ends: before it the field is written, beyond it the memory stays as it was.
    for name, field in api.ffi.typeof("FlagosBufferDescribeArgs").fields[2:]:
        raw = ctypes.create_string_buffer(b"\xa5" * (size_of(api, "buffer_describe") + 64))
        args = api.ffi.cast("FlagosBufferDescribeArgs*", ctypes.addressof(raw))
        args.struct_size, args.buffer = field.offset, buffer.pointer
        end = field.offset // 8 * 8
        api.call("buffer_describe", args)
        assert raw.raw[end:-1] == b"\xa5" * (len(raw) - 1 - end), name
        if end >= 32:
            assert args.rank == 2
    assert api.call("buffer_describe", whole).size_bytes == 24


def test_absent_trailing_fields_read_as_zero(context: Context) -> None:
    api = context.api
    event = context.create_event()
    event.set()
    args = api.new("FlagosEventAwaitArgs", event=event.pointer, timeout_ns=0)
    args.struct_size = api.ffi.offsetof("FlagosEventAwaitArgs", "timeout_ns")
    api.call("event_await", args)


def test_a_newer_hosts_longer_structs_are_understood(context: Context, memory: Memory) -> None:
    api = context.api
    raw = ctypes.create_string_buffer(size_of(api, "buffer_allocate") + 64)
    args = api.ffi.cast("FlagosBufferAllocateArgs*", ctypes.addressof(raw))
    args.struct_size = len(raw)
    args.context, args.memory, args.element_type = context.pointer, memory.pointer, 11
    api.function("buffer_destroy")(api.call("buffer_allocate", args).buffer)


def test_a_result_that_has_no_room_is_not_made(context: Context, memory: Memory) -> None:
    api = context.api
    args = api.new("FlagosBufferAllocateArgs", context=context.pointer, memory=memory.pointer, element_type=11)
    args.struct_size = api.ffi.offsetof("FlagosBufferAllocateArgs", "buffer")
    assert "buffer lies beyond struct_size" in str(code_of(api, "buffer_allocate", args))
    assert context.devices[0].memory_stats().num_allocations == 0


def test_random_arguments_are_refused_or_served(
    backend: Backend, context: Context, memory: Memory, rng: np.random.Generator
) -> None:
    """Numbers of every size beside valid handles: an error or a result, and the library goes on."""
    api = context.api
    executable = compile(context, add_one(4))
    other = Context(backend)
    numbers = [0, 1, -1, 3, 11, 17, 33, 34, 2**31 - 1, -(2**31)]
    handles = {
        "FlagosContext *": [context.pointer, other.pointer],
        "FlagosMemory *": [m.pointer for m in context.memories] + [other.memories[0].pointer],
        "FlagosDevice *": [context.devices[1].pointer, other.devices[0].pointer],
        "FlagosExecutable *": [executable.pointer],
    }
    targets = ["buffer_allocate", "buffer_promise", "buffer_copy", "buffer_bitcast", "buffer_hold", "execute"]
    targets += ["buffer_describe", "device_memory_stats", "executable_describe", "device_synchronize", "event_create"]
    destroy = {"FlagosBuffer *": "buffer_destroy", "FlagosEvent *": "event_destroy"}
    for _ in range(2000):
        slot = targets[rng.integers(len(targets))]
        args = api.ffi.new(f"{struct_of(api, slot).cname}*")
        buffer = memory.allocate((4,), 11)
        for name, field in struct_of(api, slot).fields:
            kind = field.type.cname
            choices = handles.get(kind, numbers if field.type.kind == "primitive" else [api.ffi.NULL])
            if kind == "FlagosBuffer *" and name == "buffer" and slot not in ("buffer_allocate", "buffer_promise"):
                choices = [buffer.pointer, api.ffi.NULL]
            value = choices[rng.integers(len(choices))]
            setattr(args, name, abs(value) if kind == "size_t" else value)
        args.struct_size = int(rng.integers(1, size_of(api, slot) // 8 + 2)) * 8
        before = {name: getattr(args, name) for name, _ in struct_of(api, slot).fields}
        if args.struct_size > size_of(api, slot):
            args.struct_size = size_of(api, slot)
        error = api.function(slot)(args)
        if error != api.ffi.NULL:
            assert api.take_error(error).code not in (StatusCode.INTERNAL, StatusCode.UNKNOWN)
            continue
        for name, field in struct_of(api, slot).fields:
            made = getattr(args, name)
            if field.type.cname in destroy and made != before[name]:
                api.function(destroy[field.type.cname])(made)
    other.close()


OPTIONS = [
    ({"num_cpu_devices": 0}, "the option 'num_cpu_devices' is '0'; set it to a whole number from 1 to 1024"),
    ({"num_cpu_devices": "many"}, "is 'many'"),
    ({"num_cpu_devices": "3x"}, "is '3x'"),
    ({"num_cpu_devices": 10**12}, "is '1000000000000'"),
    ({"num_cpu_devices": 1.5}, "num_cpu_devices"),
    ({"memory_limit_bytes": -1}, "memory_limit_bytes"),
    ({"libpython": 3}, "the option 'libpython' must be a string"),
]


@pytest.mark.parametrize(("options", "message"), OPTIONS)
def test_options_are_checked(backend: Backend, options: dict[str, Any], message: str) -> None:
    with pytest.raises(FlagosStatusError) as refused:
        Context(backend, options)
    assert refused.value.code == StatusCode.INVALID_ARGUMENT
    assert message in str(refused.value)


def test_options_win_over_the_environment(backend: Backend) -> None:
    with Context(backend, {"num_cpu_devices": "2", "of_somebody_else": 1.5}) as context:
        assert [device.id for device in context.devices] == [0, 1]
    with Context(backend) as context:
        assert len(context.devices) == int(os.environ["FLAGOS_NUM_CPU_DEVICES"])


class Store:
    """Another process's devices, already told."""

    def __init__(self, **values: bytes) -> None:
        self.values = {name.replace("_", "/").encode(): value for name, value in values.items()}

    def get(self, key: bytes, timeout_ms: int) -> bytes:
        return self.values[key]

    def put(self, key: bytes, value: bytes) -> None:
        self.values[key] = value


def test_processes_learn_of_each_others_devices(backend: Backend) -> None:
    store = Store(flagos_devices_0=b"2", flagos_devices_2=b"1")
    with Context(backend, process_index=1, num_processes=3, key_value_store=store) as context:
        assert store.values[b"flagos/devices/1"] == b"3"
        assert [(d.id, d.process_index, d.is_addressable) for d in context.devices] == [
            *((i, 0, False) for i in (0, 1)),
            *((i, 1, True) for i in (2, 3, 4)),
            (5, 2, False),
        ]
        assert [device.local_hardware_id for device in context.addressable_devices] == [0, 1, 2]
        with pytest.raises(FlagosStatusError, match="belongs to another process"):
            context.devices[0].synchronize()
    for store, message in [(Store(), "process 0"), (Store(flagos_devices_0=b"x", flagos_devices_2=b"1"), "holds 'x'")]:
        with pytest.raises(FlagosStatusError, match=message):
            Context(backend, process_index=1, num_processes=3, key_value_store=store)
    with pytest.raises(FlagosStatusError, match="the key-value store is missing"):
        Context(backend, process_index=1, num_processes=3)
    with pytest.raises(FlagosStatusError, match="not below num_processes"):
        Context(backend, process_index=3, num_processes=3)


ENDINGS = {
    "with everything open": "",
    "with work in flight": "sys.exit(0)",
    "with an exception": "raise SystemExit(0)",
    "with a thread at work": "threading.Thread(target=work, daemon=True).start(); time.sleep(0.05)",
    "after a late launch": "atexit.register(lambda: launch())",
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_python_process_ends_quietly(ending: str) -> None:
    script = f"""
import atexit, sys, threading, time
import numpy as np
import plugin_abi.host.buffer
from cpu.native.harness import LOOP, compile, put, add_one, run
from plugin_abi import loader
from plugin_abi.errors import FlagosStatusError
from plugin_abi.host import Context
if {ending == "with a thread at work"}:  # else the exit destroys the handles that the thread uses
    plugin_abi.host.buffer._destroy = lambda *_: None
context = Context(loader.load().accepted)
memory = context.devices[0].default_memory
long, short = compile(context, LOOP), compile(context, add_one(4, donate=False))
def launch():
    try:
        return [run(long, put(memory, np.eye(64, dtype=np.float32))), run(short, put(memory, np.ones(4, np.float32)))]
    except FlagosStatusError as error:
        assert "Python has ended" in str(error), error
def work():
    while results := launch():
        results[0][0].wait()
kept = [launch() for _ in range(3)]
{ENDINGS[ending]}
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
