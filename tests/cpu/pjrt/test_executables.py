"""Executables: compiling, describing, launching, donating, serializing."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cpu.pjrt.harness import Client, Launch, Program, compile_options
from flagos_backend.importer import schema
from programs import hlo_bytes
from support import pjrt
from support.pjrt import Pjrt, PjrtError, ffi

AXPY_TEXT = """
module @axpy {
  func.func public @main(%a: tensor<3xf32>, %x: tensor<3xf32>) -> tensor<3xf32> {
    %0 = stablehlo.multiply %a, %x : tensor<3xf32>
    return %0 : tensor<3xf32>
  }
}
"""
# Each replica gives its own value plus the sum over all of them.
ALL_REDUCE = """
add { a = f32[] parameter(0) b = f32[] parameter(1) ROOT c = f32[] add(a, b) }
ENTRY main {
  x = f32[4] parameter(0)
  s = f32[4] all-reduce(x), replica_groups={}, to_apply=add
  ROOT y = f32[4] add(x, s)
}
"""
ALIASED = """, input_output_alias={ {}: (0, {}, may-alias) }
ENTRY main { x = f32[256] parameter(0) y = f32[256] parameter(1) ROOT z = f32[256] add(x, y) }
"""


def aliased_module() -> bytes:
    from jaxlib import _hlo

    return _hlo.hlo_module_from_text("HloModule test" + ALIASED).as_serialized_hlo_module_proto()


@pytest.fixture(scope="module")
def two_outputs(client: Client) -> Any:
    def function(x: Any, y: Any) -> Any:
        return x @ y, (x.sum() > 0), jnp.zeros((0, 2), jnp.int8)

    return client.compile(function, np.zeros((2, 3), np.float32), np.zeros((3, 4), np.float32))


@pytest.fixture
def executable(api: Pjrt, client: Client, two_outputs: Any) -> Any:
    return client.executable(two_outputs)


# ---- Compiling ----


def test_formats(client: Client) -> None:
    x = np.array([1, 2, 3], np.float32)
    for code, format in ((AXPY_TEXT.encode(), "mlir"), (hlo_bytes(lambda a, b: a * b, x, x), "hlo")):
        loaded = client.compile_bytes(code, format)
        [[out]] = client.execute(loaded, [client.put(x), client.put(x)])
        np.testing.assert_array_equal(client.get(out, np.float32), x * x)
        client.api.call("PJRT_LoadedExecutable_Destroy", executable=loaded)


@pytest.mark.parametrize(
    ("code", "format", "options", "expected", "message"),
    [
        (b"x", "invalid", None, "INVALID_ARGUMENT", "Unknown program format 'invalid'."),
        (AXPY_TEXT.encode(), "mlir", b"invalid options", "INVALID_ARGUMENT",
         "PJRT_Client_Compile: failed to deserialize CompileOptionsProto"),
        (b"", "mlir", None, "INVALID_ARGUMENT", "PJRT_Client_Compile: the program is empty."),
    ],
)  # fmt: skip
def test_refused_before_conversion(
    client: Client, code: bytes, format: str, options: bytes | None, expected: str, message: str
) -> None:
    with pytest.raises(PjrtError) as error:
        client.compile_bytes(code, format, options)
    assert (error.value.code, error.value.message) == (expected, message)


@pytest.mark.parametrize(
    ("code", "format"),
    [(b"ML\xefR\rStableHLO_v9.9.9\x00garbage", "mlir"), (b"module @x { nonsense }", "mlir"), (b"\xff\xff\xff", "hlo")],
)
def test_malformed_programs(client: Client, code: bytes, format: str) -> None:
    with pytest.raises(PjrtError) as error:
        client.compile_bytes(code, format)
    assert error.value.code == "INVALID_ARGUMENT"
    assert error.value.message


def test_an_instruction_that_nobody_implements_is_named(client: Client) -> None:
    text = 'ENTRY main { x = f32[4] parameter(0) ROOT y = f32[4] custom-call(x), custom_call_target="no_such_thing" }'
    with pytest.raises(PjrtError, match="no_such_thing") as error:
        client.compile_text(text)
    assert error.value.code == "UNIMPLEMENTED"


def test_program_is_needed(client: Client) -> None:
    with pytest.raises(PjrtError, match="the program is NULL"):
        client.call("PJRT_Client_Compile")


def test_converter_is_needed(api: Pjrt, backend: Any) -> None:
    array, _kept = api.named_values({"flagos_api": backend.address})
    pointer = api.call("PJRT_Client_Create", create_options=array, num_options=1).client
    program = Program(api, AXPY_TEXT.encode(), "mlir")
    with pytest.raises(PjrtError, match='without the option "flagos_converter"') as error:
        api.call("PJRT_Client_Compile", client=pointer, program=program.pointer)
    assert error.value.code == "FAILED_PRECONDITION"
    api.call("PJRT_Client_Destroy", client=pointer)


# ---- Describing ----


def test_description(api: Pjrt, client: Client, two_outputs: Any, executable: Any) -> None:
    def get(function: str) -> Any:
        return api.call(f"PJRT_Executable_{function}", executable=executable)

    name = get("Name")
    assert "function" in pjrt.text(name.executable_name, name.executable_name_size)
    assert (get("NumReplicas").num_replicas, get("NumPartitions").num_partitions) == (1, 1)
    assert get("NumOutputs").num_outputs == 3
    types = get("OutputElementTypes")
    expected = [pjrt.buffer_type(dtype) for dtype in (np.float32, np.bool_, np.int8)]
    assert ffi().unpack(ffi().cast("int*", types.output_types), types.num_output_types) == expected
    dims = get("OutputDimensions")
    assert ffi().unpack(dims.dim_sizes, dims.num_outputs) == [2, 0, 2]
    assert ffi().unpack(dims.dims, 4) == [2, 4, 0, 2]
    for function, count in (("OutputMemoryKinds", "num_outputs"), ("ParameterMemoryKinds", "num_parameters")):
        kinds = get(function)
        sizes = ffi().unpack(kinds.memory_kind_sizes, getattr(kinds, count))
        texts = [pjrt.text(kinds.memory_kinds[i], size) for i, size in enumerate(sizes)]
        assert texts == ["device"] * (3 if function.startswith("Output") else 2)
    assert get("SizeOfGeneratedCodeInBytes").size_in_bytes >= 0
    fingerprints = [get("Fingerprint"), api.call("PJRT_LoadedExecutable_Fingerprint", executable=two_outputs)]
    texts = [pjrt.text(f.executable_fingerprint, f.executable_fingerprint_size) for f in fingerprints]
    assert texts[0] == texts[1] != ""
    options = get("GetCompileOptions")
    content = ffi().buffer(options.serialized_bytes, options.serialized_bytes_size)[:]
    assert schema.CompileOptionsProto.FromString(content) == schema.CompileOptionsProto.FromString(compile_options())
    options.serialized_compile_options_deleter(options.serialized_compile_options)


def test_analysis(api: Pjrt, executable: Any) -> None:
    cost = api.call("PJRT_Executable_GetCostAnalysis", executable=executable)
    values = {
        pjrt.text(value.name, value.name_size): value.float_value
        for value in ffi().unpack(cost.properties, cost.num_properties)
    }
    assert values["flops"] >= 2 * 2 * 3 * 4
    assert values["bytes accessed"] > 0
    memory = api.call("PJRT_Executable_GetCompiledMemoryStats", executable=executable)
    assert memory.argument_size_in_bytes == (6 + 12) * 4
    assert memory.output_size_in_bytes == 8 * 4 + 1
    assert memory.total_size_in_bytes >= memory.argument_size_in_bytes + memory.output_size_in_bytes


def test_optimized_program(api: Pjrt, client: Client, executable: Any) -> None:
    program = api.new("PJRT_Program")
    api.call("PJRT_Executable_OptimizedProgram", executable=executable, program=program)
    assert pjrt.text(program.format, program.format_size) == "hlo_with_config"
    room = ffi().new("char[]", program.code_size)
    program.code = room
    api.call("PJRT_Executable_OptimizedProgram", executable=executable, program=program)
    # HloModuleProtoWithConfig: the module is field 1, so a message that begins with it parses as it is.
    content = ffi().buffer(room, program.code_size)[:]
    assert content[0] == 1 << 3 | 2
    program.code_size -= 1
    with pytest.raises(PjrtError, match="the program needs"):
        api.call("PJRT_Executable_OptimizedProgram", executable=executable, program=program)


def test_devices_of_an_executable(api: Pjrt, client: Client) -> None:
    loaded = client.compile_text(ALL_REDUCE, compile_options(replicas=3, devices=[2, 0, 3]))
    args = api.call("PJRT_LoadedExecutable_AddressableDevices", executable=loaded)
    devices = ffi().unpack(args.addressable_devices, args.num_addressable_devices)
    assert devices == [client.devices[i] for i in (2, 0, 3)]
    logical = api.call("PJRT_LoadedExecutable_AddressableDeviceLogicalIds", executable=loaded)
    ids = ffi().unpack(logical.addressable_device_logical_ids, logical.num_addressable_device_logical_ids)
    assert [(i.replica, i.partition) for i in ids] == [(0, 0), (1, 0), (2, 0)]
    assignment = api.call("PJRT_LoadedExecutable_GetDeviceAssignment", executable=loaded)
    content = ffi().buffer(assignment.serialized_bytes, assignment.serialized_bytes_size)[:]
    parsed = schema.DeviceAssignmentProto.FromString(content)
    assert (parsed.replica_count, parsed.computation_count) == (3, 1)
    assert list(parsed.computation_devices[0].replica_device_ids) == [2, 0, 3]
    assignment.serialized_device_assignment_deleter(assignment.serialized_device_assignment)


# ---- Launching ----


def test_outputs(api: Pjrt, client: Client, two_outputs: Any, rng: np.random.Generator) -> None:
    x, y = rng.normal(size=(2, 3)).astype(np.float32), rng.normal(size=(3, 4)).astype(np.float32)
    arguments = [client.put(x), client.put(y)]
    [[product, positive, empty]] = client.execute(two_outputs, arguments)
    np.testing.assert_allclose(client.get(product, np.float32), x @ y, rtol=1e-5, atol=1e-6)
    assert client.get(positive, np.bool_) == (x.sum() > 0)
    assert client.get(empty, np.int8).shape == (0, 2)
    assert api.call("PJRT_Buffer_Memory", buffer=product).memory == client.default_memory()
    client.destroy(product, positive, empty, *arguments)


def test_several_devices_in_one_launch(api: Pjrt, client: Client) -> None:
    loaded = client.compile_text(ALL_REDUCE, compile_options(replicas=4, devices=[3, 2, 1, 0]))
    values = [np.full(4, 10**i, np.float32) for i in range(4)]
    arguments = [[client.put(value, client.default_memory(3 - i))] for i, value in enumerate(values)]
    outputs = client.execute(loaded, *arguments, launch_id=5)
    for i, [out] in enumerate(outputs):
        assert api.call("PJRT_Buffer_Device", buffer=out).device == client.devices[3 - i]
        np.testing.assert_array_equal(client.get(out, np.float32), values[i] + 1111)


def test_execute_device(api: Pjrt, client: Client) -> None:
    """A program for one device may run on another one."""
    loaded = client.compile(lambda x: x + 1, np.zeros(3, np.float32))
    argument = client.put(np.zeros(3, np.float32), client.default_memory(2))
    [[out]] = client.execute(loaded, [argument], execute_device=client.devices[2])
    assert api.call("PJRT_Buffer_Device", buffer=out).device == client.devices[2]
    assert api.call("PJRT_Buffer_Memory", buffer=out).memory == client.default_memory(2)
    np.testing.assert_array_equal(client.get(out, np.float32), np.ones(3))


def test_without_options_and_events(api: Pjrt, client: Client) -> None:
    loaded = client.compile(lambda x: x + 1, np.zeros(3, np.float32))
    launch = Launch(client, loaded, [[client.put(np.zeros(3, np.float32))]])
    launch.args.options = ffi().NULL
    launch.args.device_complete_events = ffi().NULL
    api.call_with("PJRT_LoadedExecutable_Execute", launch.args)
    [[out]] = launch.outputs()
    np.testing.assert_array_equal(client.get(out, np.float32), np.ones(3))


def test_options_of_an_older_caller(api: Pjrt, client: Client) -> None:
    """PJRT 0.104 ends before the output callbacks: what lies behind is not looked at."""
    loaded = client.compile(lambda x: x + 1, np.zeros(3, np.float32))
    launch = Launch(client, loaded, [[client.put(np.zeros(3, np.float32))]])
    launch.options.struct_size = pjrt.abi.structs["PJRT_ExecuteOptions"].minimum_size
    launch.options.num_hlo_output_callbacks = 77
    api.call_with("PJRT_LoadedExecutable_Execute", launch.args)


def test_donation(client: Client) -> None:
    loaded = client.compile_bytes(aliased_module())
    x, y = (client.put(np.full(256, value, np.float32)) for value in (1, 2))
    [[out]] = client.execute(loaded, [x, y])
    assert client.is_deleted(x)
    assert not client.is_deleted(y)
    np.testing.assert_array_equal(client.get(out, np.float32), np.full(256, 3))
    with pytest.raises(PjrtError, match=r"delete|donate"):
        client.execute(loaded, [x, y])


def test_donation_that_the_caller_forbids(client: Client) -> None:
    loaded = client.compile_bytes(aliased_module())
    x, y = (client.put(np.full(256, value, np.float32)) for value in (1, 2))
    [[out]] = client.execute(loaded, [x, y], non_donatable=[0])
    assert not client.is_deleted(x)
    np.testing.assert_array_equal(client.get(x, np.float32), np.full(256, 1))
    np.testing.assert_array_equal(client.get(out, np.float32), np.full(256, 3))


def test_refused_launches(api: Pjrt, client: Client, two_outputs: Any, backend: Any) -> None:
    x, y = client.put(np.zeros((2, 3), np.float32)), client.put(np.zeros((3, 4), np.float32))
    with pytest.raises(PjrtError, match="takes 2 arguments; 1 were given"):
        client.execute(two_outputs, [x])
    with pytest.raises(PjrtError, match="runs on 1 devices here; argument lists for 2 were given"):
        client.execute(two_outputs, [x, y], [x, y])
    with pytest.raises(PjrtError, match="argument 1 for device 0 is NULL"):
        client.execute(two_outputs, [x, ffi().NULL])
    for wrong in (client.put(np.zeros((3, 3), np.float32)), client.put(np.zeros((3, 4), np.int32))):
        with pytest.raises(PjrtError) as error:
            client.execute(two_outputs, [x, wrong])
        assert error.value.code == "INVALID_ARGUMENT"
    elsewhere = client.put(np.zeros((3, 4), np.float32), client.default_memory(1))
    with pytest.raises(PjrtError) as error:
        client.execute(two_outputs, [x, elsewhere])
    assert error.value.code == "INVALID_ARGUMENT"
    other = Client(api, backend.address)
    foreign = other.put(np.zeros((3, 4), np.float32))
    with pytest.raises(PjrtError, match="argument 1 for device 0 belongs to another client"):
        client.execute(two_outputs, [x, foreign])
    other.destroy(foreign)
    other.close()


@pytest.mark.parametrize("field", ["num_send_ops", "num_recv_ops", "num_hlo_output_callbacks"])
def test_callbacks_are_refused(client: Client, two_outputs: Any, field: str) -> None:
    arguments = [client.put(np.zeros((2, 3), np.float32)), client.put(np.zeros((3, 4), np.float32))]
    with pytest.raises(PjrtError, match="callbacks are not supported") as error:
        client.execute(two_outputs, arguments, **{field: 1})
    assert error.value.code == "UNIMPLEMENTED"


def test_deleted_executable(api: Pjrt, client: Client) -> None:
    loaded = client.compile(lambda x: x + 1, np.zeros(3, np.float32))
    assert not api.call("PJRT_LoadedExecutable_IsDeleted", executable=loaded).is_deleted
    api.call("PJRT_LoadedExecutable_Delete", executable=loaded)
    assert api.call("PJRT_LoadedExecutable_IsDeleted", executable=loaded).is_deleted
    with pytest.raises(PjrtError, match="has been deleted"):
        client.execute(loaded, [client.put(np.zeros(3, np.float32))])


def test_a_failed_argument_fails_the_outputs(client: Client) -> None:
    loaded = client.compile(lambda x: x + 1, np.zeros(4, np.float32))
    message = ffi().new("char[]", b"poison")
    broken = client.call(
        "PJRT_Client_CreateErrorBuffer",
        memory=client.default_memory(),
        shape_dims=pjrt.int64s([4]),
        shape_num_dims=1,
        shape_element_type=pjrt.buffer_type(np.float32),
        error_code=10,
        error_message=message,
        error_message_size=6,
    ).buffer
    launch = Launch(client, loaded, [[broken]])
    client.api.call_with("PJRT_LoadedExecutable_Execute", launch.args)
    with pytest.raises(PjrtError, match="poison"):
        client.api.wait(launch.events[0])
    [[out]] = launch.outputs()
    with pytest.raises(PjrtError, match="poison"):
        client.get(out, np.float32)


# ---- Serializing ----


def serialize(api: Pjrt, client: Client, loaded: Any) -> bytes:
    args = api.call("PJRT_Executable_Serialize", executable=client.executable(loaded))
    content = ffi().buffer(args.serialized_bytes, args.serialized_bytes_size)[:]
    args.serialized_executable_deleter(args.serialized_executable)
    return content


def load(client: Client, content: bytes, options: bytes = b"") -> Any:
    given, overridden = ffi().from_buffer(content), ffi().from_buffer(options)
    return client.call(
        "PJRT_Executable_DeserializeAndLoad",
        serialized_executable=ffi().cast("char*", given),
        serialized_executable_size=len(content),
        overridden_serialized_compile_options=ffi().cast("char*", overridden),
        overridden_serialized_compile_options_size=len(options),
    ).loaded_executable


def test_serialization(api: Pjrt, client: Client) -> None:
    x = np.arange(3, dtype=np.float32)
    content = serialize(api, client, client.compile(lambda x: jax.nn.relu(x - 1), x))
    [[out]] = client.execute(load(client, content), [client.put(x)])
    np.testing.assert_array_equal(client.get(out, np.float32), [0, 0, 1])
    moved = load(client, content, compile_options(devices=[3]))
    [[out]] = client.execute(moved, [client.put(x, client.default_memory(3))])
    assert api.call("PJRT_Buffer_Device", buffer=out).device == client.devices[3]


def test_malformed_serialized_executables(api: Pjrt, client: Client) -> None:
    content = serialize(api, client, client.compile(lambda x: x + 1, np.zeros(3, np.float32)))
    for broken in (b"", b"nonsense", content[: len(content) // 2], content[:-1]):
        with pytest.raises(PjrtError) as error:
            load(client, broken)
        assert error.value.code in ("INVALID_ARGUMENT", "DATA_LOSS", "FAILED_PRECONDITION")
    with pytest.raises(PjrtError, match="failed to deserialize CompileOptionsProto"):
        load(client, content, b"\xff")


def test_fuzzed_compile_options(client: Client, rng: np.random.Generator) -> None:
    """Damaged options are refused or harmless; they never bring the process down."""
    good = compile_options(replicas=2)
    for _ in range(200):
        damaged = bytearray(good)
        for _ in range(rng.integers(1, 4)):
            damaged[rng.integers(len(damaged))] = rng.integers(256)
        try:
            loaded = client.compile_bytes(hlo_bytes(lambda x: x, np.zeros(2, np.float32)), options=bytes(damaged))
        except PjrtError as error:
            assert error.code in ("INVALID_ARGUMENT", "UNIMPLEMENTED", "FAILED_PRECONDITION"), error
        else:
            client.api.call("PJRT_LoadedExecutable_Destroy", executable=loaded)
