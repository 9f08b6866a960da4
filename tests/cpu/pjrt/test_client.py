"""Clients, devices, memories and topologies."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cpu.pjrt.harness import Client, Program, compile_options
from plugin_abi import loader
from programs import hlo_bytes
from support import pjrt
from support.pjrt import FlagosTable, Pjrt, PjrtError, ffi


def describe(api: Pjrt, device: Any) -> Any:
    return api.call("PJRT_Device_GetDescription", device=device).device_description


def test_platform(client: Client) -> None:
    name = client.call("PJRT_Client_PlatformName")
    assert pjrt.text(name.platform_name, name.platform_name_size) == "flagos"
    version = client.call("PJRT_Client_PlatformVersion")
    assert pjrt.text(version.platform_version, version.platform_version_size)
    assert client.call("PJRT_Client_ProcessIndex").process_index == 0


def test_devices(api: Pjrt, client: Client) -> None:
    assert len(client.devices) == 4
    args = client.call("PJRT_Client_AddressableDevices")
    assert ffi().unpack(args.addressable_devices, args.num_addressable_devices) == client.devices
    for index, device in enumerate(client.devices):
        description = describe(api, device)
        assert api.call("PJRT_DeviceDescription_Id", device_description=description).id == index
        assert api.call("PJRT_DeviceDescription_ProcessIndex", device_description=description).process_index == 0
        kind = api.call("PJRT_DeviceDescription_Kind", device_description=description)
        assert pjrt.text(kind.device_kind, kind.device_kind_size) == "cpu"
        debug = api.call("PJRT_DeviceDescription_DebugString", device_description=description)
        assert pjrt.text(debug.debug_string, debug.debug_string_size)
        text = api.call("PJRT_DeviceDescription_ToString", device_description=description)
        assert str(index) in pjrt.text(text.to_string, text.to_string_size)
        assert api.call("PJRT_Device_IsAddressable", device=device).is_addressable
        assert api.call("PJRT_Device_LocalHardwareId", device=device).local_hardware_id == index


def test_device_attributes_agree(api: Pjrt, client: Client) -> None:
    args = api.call("PJRT_Device_GetAttributes", device=client.devices[0])
    other = api.call("PJRT_DeviceDescription_Attributes", device_description=describe(api, client.devices[0]))
    assert args.num_attributes == other.num_attributes
    args.attributes_deleter(args.device_attributes)


def test_lookup(client: Client) -> None:
    for index, device in enumerate(client.devices):
        assert client.call("PJRT_Client_LookupDevice", id=index).device == device
        found = client.call("PJRT_Client_LookupAddressableDevice", local_hardware_id=index).addressable_device
        assert found == device


@pytest.mark.parametrize("id", [-1, 4])
def test_lookup_of_a_device_that_does_not_exist(client: Client, id: int) -> None:
    with pytest.raises(PjrtError) as error:
        client.call("PJRT_Client_LookupDevice", id=id)
    assert (error.value.code, error.value.message) == (
        "INVALID_ARGUMENT",
        f"No matching device found for device_id {id}",
    )


def test_default_device_assignment(client: Client) -> None:
    room = ffi().new("int[]", 4)
    client.call(
        "PJRT_Client_DefaultDeviceAssignment",
        num_replicas=2,
        num_partitions=2,
        default_assignment_size=4,
        default_assignment=room,
    )
    assert list(room) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("replicas", "partitions", "size", "code", "message"),
    [
        (4, 2, 7, "FAILED_PRECONDITION", "`default_assignment_size` 7 < `num_replicas * num_partitions`, 4 * 2 = 8"),
        (
            65536,
            65537,
            65536,
            "FAILED_PRECONDITION",
            "`default_assignment_size` 65536 < `num_replicas * num_partitions`, 65536 * 65537 = 4295032832",
        ),
        (-1, 2, 4, "INVALID_ARGUMENT", "`num_replicas` and `num_partitions` must be positive, got -1 and 2"),
        (2, 0, 4, "INVALID_ARGUMENT", "`num_replicas` and `num_partitions` must be positive, got 2 and 0"),
        (5, 1, 5, "INVALID_ARGUMENT", "5 replicas of 1 partitions need 5 devices; there are 4."),
    ],
)
def test_default_device_assignment_errors(
    client: Client, replicas: int, partitions: int, size: int, code: str, message: str
) -> None:
    room = ffi().new("int[]", size)
    with pytest.raises(PjrtError) as error:
        client.call(
            "PJRT_Client_DefaultDeviceAssignment",
            num_replicas=replicas,
            num_partitions=partitions,
            default_assignment_size=size,
            default_assignment=room,
        )
    assert error.value.code == code
    assert error.value.message == f"PJRT_Client_DefaultDeviceAssignment: {message}"


def test_memories(api: Pjrt, client: Client) -> None:
    for device in client.devices:
        args = api.call("PJRT_Device_AddressableMemories", device=device)
        memories = ffi().unpack(args.memories, args.num_memories)
        assert {client.memory_kind(memory) for memory in memories} == {"device", "pinned_host", "unpinned_host"}
        default = api.call("PJRT_Device_DefaultMemory", device=device).memory
        assert client.memory_kind(default) == "device"
        for memory in memories:
            assert memory in client.memories
            assert memory.vtable == ffi().NULL
            reached = api.call("PJRT_Memory_AddressableByDevices", memory=memory)
            assert device in ffi().unpack(reached.devices, reached.num_devices)
            for function in ("DebugString", "ToString"):
                api.call(f"PJRT_Memory_{function}", memory=memory)
    ids = [api.call("PJRT_Memory_Id", memory=memory).id for memory in client.memories]
    assert len(set(ids)) == len(ids)
    kinds = {client.memory_kind(m): api.call("PJRT_Memory_Kind_Id", memory=m).kind_id for m in client.memories}
    assert len(set(kinds.values())) == len(kinds)


def test_memory_stats(api: Pjrt, client: Client) -> None:
    before = api.call("PJRT_Device_MemoryStats", device=client.devices[3])
    buffer = client.allocate([1 << 20], np.uint8, client.default_memory(3))
    during = api.call("PJRT_Device_MemoryStats", device=client.devices[3])
    assert during.bytes_in_use - before.bytes_in_use >= 1 << 20
    assert during.peak_bytes_in_use_is_set
    assert during.num_allocs == before.num_allocs + 1
    client.destroy(buffer)
    after = api.call("PJRT_Device_MemoryStats", device=client.devices[3])
    assert after.bytes_in_use == before.bytes_in_use
    assert after.peak_bytes_in_use >= during.bytes_in_use
    api.call("PJRT_Device_ClearMemoryStats", device=client.devices[3])
    cleared = api.call("PJRT_Device_MemoryStats", device=client.devices[3])
    assert cleared.peak_bytes_in_use == cleared.bytes_in_use


def test_dma_mapping(client: Client) -> None:
    memory = np.zeros(4096, np.uint8)
    data = pjrt.pointer_to(memory)
    client.call("PJRT_Client_DmaMap", data=data, size=4096)
    with pytest.raises(PjrtError, match="mapped already"):
        client.call("PJRT_Client_DmaMap", data=data, size=4096)
    client.call("PJRT_Client_DmaUnmap", data=data)
    with pytest.raises(PjrtError, match="is not mapped") as error:
        client.call("PJRT_Client_DmaUnmap", data=data)
    assert error.value.code == "NOT_FOUND"


def test_tracking_events_and_execute_contexts(api: Pjrt, client: Client) -> None:
    label = ffi().new("char[]", b"work")
    event = api.call(
        "PJRT_Device_CreateAsyncTrackingEvent", device=client.devices[0], description=label, description_size=4
    ).event
    api.call("PJRT_AsyncTrackingEvent_Destroy", event=event)
    context = api.call("PJRT_ExecuteContext_Create").context
    api.call("PJRT_ExecuteContext_Destroy", context=context)
    client.call("PJRT_Client_UpdateGlobalProcessInfo", process_infos=ffi().NULL, num_process_infos=0)


# ---- Creation ----


def test_a_client_needs_a_table(api: Pjrt) -> None:
    with pytest.raises(PjrtError, match=r'option "flagos_api".* is missing') as error:
        api.call("PJRT_Client_Create")
    assert error.value.code == "INVALID_ARGUMENT"
    array, _kept = api.named_values({"flagos_api": "not an address"})
    with pytest.raises(PjrtError, match='option "flagos_api" must be an integer'):
        api.call("PJRT_Client_Create", create_options=array, num_options=1)


def test_a_table_of_another_abi_is_refused(api: Pjrt, table: FlagosTable) -> None:
    table.copy.version = 2 << 16
    with pytest.raises(PjrtError, match=r"the backend's table speaks ABI 2\.0") as error:
        Client(api, table.address)
    assert error.value.code == "FAILED_PRECONDITION"
    table.restore()
    table.copy.struct_size -= 8
    with pytest.raises(PjrtError, match=r"needs ABI 1\.0 in at least"):
        Client(api, table.address)


def test_options_reach_the_backend(api: Pjrt, table: FlagosTable) -> None:
    """What the adapter does not use itself, and the order, are the backend's; no key-value store without num_nodes."""
    seen: list[Any] = []

    def create(args: Any) -> Any:
        for option in table.ffi.unpack(args.options, args.num_options):
            name = table.ffi.buffer(option.name, option.name_size)[:].decode()
            value = {
                0: lambda o: table.ffi.buffer(o.string_value, o.value_size)[:].decode(),
                1: lambda o: o.int64_value,
                2: lambda o: table.ffi.unpack(o.int64_list, o.value_size),
                3: lambda o: o.double_value,
                4: lambda o: bool(o.bool_value),
            }[option.kind](option)
            seen.append((name, value))
        seen.append((args.process_index, args.num_processes, args.key_value_get == table.ffi.NULL))
        return table.make_error(9, "that is all this test wants")

    table.replace("context_create", create)
    given = {"text": "äö", "number": -5, "list": [1, 2, 3], "half": 0.5, "yes": True}
    with pytest.raises(PjrtError, match="that is all this test wants") as error:
        Client(api, table.address, **{"text": "ab", **{k: v for k, v in given.items() if k != "text"}})
    assert error.value.code == "FAILED_PRECONDITION"
    assert seen == [("text", "ab"), ("number", -5), ("list", [1, 2, 3]), ("half", 0.5), ("yes", True), (0, 1, True)]


@pytest.mark.parametrize(("node", "nodes"), [(2, 2), (-1, 2), (0, 0)])
def test_a_rank_outside_of_the_world_is_refused(api: Pjrt, table: FlagosTable, node: int, nodes: int) -> None:
    with pytest.raises(PjrtError, match=f"node_id {node} is not one of {nodes} nodes"):
        Client(api, table.address, node_id=node, num_nodes=nodes)


def test_key_value_store_is_passed_on(api: Pjrt, table: FlagosTable) -> None:
    store: dict[bytes, bytes] = {}
    kept: list[Any] = []
    lent: list[Any] = []

    @ffi().callback("PJRT_KeyValuePutCallback")
    def put(args: Any) -> Any:
        store[ffi().buffer(args.key, args.key_size)[:]] = ffi().buffer(args.value, args.value_size)[:]
        return ffi().NULL

    def lend(args: Any) -> Any:
        key = ffi().buffer(args.key, args.key_size)[:]
        if key not in store:
            message = ffi().new("char[]", b"no such key")
            return args.callback_error[0](5, message, len(b"no such key"))
        lent.append(value := ffi().new("char[]", store[key]))
        args.value, args.value_size = value, len(store[key])
        args.value_deleter_callback = ffi().NULL
        return ffi().NULL

    get = ffi().callback("PJRT_KeyValueGetCallback", lend)
    try_get = ffi().callback("PJRT_KeyValueTryGetCallback", lend)
    outcome: list[Any] = []

    def create(args: Any) -> Any:
        sunk: list[bytes] = []
        sink = table.ffi.callback("FlagosBytesSink", lambda _d, p, n: sunk.append(bytes(table.ffi.buffer(p, n))))
        outcome.append((args.process_index, args.num_processes))
        outcome.append(args.key_value_put(args.key_value_user_data, b"key", 3, table.ffi.from_buffer(b"value"), 5))
        for key, timeout in ((b"key", 100), (b"key", 0), (b"not", 0)):
            outcome.append(args.key_value_get(args.key_value_user_data, key, 3, timeout, sink, table.ffi.NULL))
        outcome.append(sunk)
        return table.make_error(1, "done")

    table.replace("context_create", create)
    array, kept_values = api.named_values({"flagos_api": table.address, "node_id": 1, "num_nodes": 3})
    kept.append(kept_values)
    with pytest.raises(PjrtError, match="done"):
        api.call(
            "PJRT_Client_Create",
            create_options=array,
            num_options=3,
            kv_get_callback=get,
            kv_put_callback=put,
            kv_try_get_callback=try_get,
        )
    assert outcome == [(1, 3), 0, 0, 0, 5, [b"value", b"value"]]


# ---- Topologies ----


def descriptions(api: Pjrt, topology: Any) -> list[Any]:
    args = api.call("PJRT_TopologyDescription_GetDeviceDescriptions", topology=topology)
    return ffi().unpack(args.descriptions, args.num_descriptions)


def test_topology_of_a_client(api: Pjrt, client: Client) -> None:
    topology = client.call("PJRT_Client_TopologyDescription").topology
    assert descriptions(api, topology) == [describe(api, device) for device in client.devices]
    name = api.call("PJRT_TopologyDescription_PlatformName", topology=topology)
    assert pjrt.text(name.platform_name, name.platform_name_size) == "flagos"
    kinds = api.call("PJRT_TopologyDescription_GetMemorySpaceKindIds", topology=topology)
    ids = ffi().unpack(kinds.memory_space_kind_ids, kinds.num_memory_space_kind_ids)
    assert set(ids) == {api.call("PJRT_Memory_Kind_Id", memory=m).kind_id for m in client.memories}


def test_serialized_topology(api: Pjrt, client: Client) -> None:
    topology = client.call("PJRT_Client_TopologyDescription").topology
    args = api.call("PJRT_TopologyDescription_Serialize", topology=topology)
    content = ffi().buffer(args.serialized_bytes, args.serialized_bytes_size)[:]
    args.serialized_topology_deleter(args.serialized_topology)
    given = ffi().from_buffer(content)
    copy = api.call(
        "PJRT_TopologyDescription_Deserialize",
        serialized_topology=ffi().cast("char*", given),
        serialized_topology_size=len(content),
    ).topology
    ids = [api.call("PJRT_DeviceDescription_Id", device_description=d).id for d in descriptions(api, copy)]
    assert ids == [0, 1, 2, 3]
    fingerprints = [api.call("PJRT_TopologyDescription_Fingerprint", topology=t).fingerprint for t in (topology, copy)]
    assert fingerprints[0] == fingerprints[1] != 0
    program = Program(api, b"x", "hlo")
    with pytest.raises(PjrtError, match="a deserialized topology has no backend") as error:
        api.call("PJRT_Compile", topology=copy, program=program.pointer)
    assert error.value.code == "FAILED_PRECONDITION"
    api.call("PJRT_TopologyDescription_Destroy", topology=copy)


@pytest.mark.parametrize("content", [b"", b"\xff", b"\x0a\x05ab", b"\x08\x01"])
def test_malformed_topology(api: Pjrt, content: bytes) -> None:
    given = ffi().from_buffer(content)
    with pytest.raises(PjrtError, match="are no topology") as error:
        api.call(
            "PJRT_TopologyDescription_Deserialize",
            serialized_topology=ffi().cast("char*", given),
            serialized_topology_size=len(content),
        )
    assert error.value.code == "INVALID_ARGUMENT"


def test_compile_ahead_of_time_and_load(api: Pjrt, client: Client, backend: loader.Backend) -> None:
    """A topology of its own, without a client; the executable then moves into one."""
    from flagos_backend.frontends.jax import trampolines

    array, _kept = api.named_values(
        {"flagos_api": backend.address, "flagos_converter": trampolines.converter_address()}
    )
    topology = api.call("PJRT_TopologyDescription_Create", create_options=array, num_options=2).topology
    assert len(descriptions(api, topology)) == 4
    x = np.arange(4, dtype=np.float32)
    program = Program(api, hlo_bytes(lambda a: a * 3, x), "hlo")
    options = compile_options()
    content = ffi().from_buffer(options)
    compiled = api.call(
        "PJRT_Compile",
        topology=topology,
        program=program.pointer,
        compile_options=ffi().cast("char*", content),
        compile_options_size=len(options),
    ).executable
    loaded = client.call(
        "PJRT_Client_Load",
        executable=compiled,
        compile_options=ffi().cast("char*", content),
        compile_options_size=len(options),
    ).loaded_executable
    api.call("PJRT_Executable_Destroy", executable=compiled)
    api.call("PJRT_TopologyDescription_Destroy", topology=topology)
    [[result]] = client.execute(loaded, [client.put(x)])
    np.testing.assert_array_equal(client.get(result, np.float32), x * 3)


def test_canonical_shape(api: Pjrt, client: Client) -> None:
    from flagos_backend.importer import schema

    topology = client.call("PJRT_Client_TopologyDescription").topology
    kind = api.call("PJRT_Memory_Kind_Id", memory=client.default_memory()).kind_id
    fields = {"dims": pjrt.int64s([2, 3]), "num_dims": 2, "element_type": pjrt.buffer_type(np.float32)}
    name = "PJRT_TopologyDescription_MakeCanonicalShapeForMemorySpace"
    args = api.call(name, topology=topology, memory_space_kind_id=kind, **fields)
    shape = schema.ShapeProto.FromString(ffi().buffer(args.serialized_shape, args.serialized_shape_size)[:])
    args.serialized_shape_deleter(args.serialized_shape)
    assert (shape.element_type, list(shape.dimensions), list(shape.layout.minor_to_major)) == (11, [2, 3], [1, 0])
    with pytest.raises(PjrtError, match="no device has a memory of kind id 12345"):
        api.call(name, topology=topology, memory_space_kind_id=12345, **fields)
