"""Buffers: every way in and out, with every element type, stride and layout."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from cpu.pjrt.harness import (
    IMMUTABLE_ONLY_DURING_CALL,
    IMMUTABLE_UNTIL_TRANSFER,
    IMMUTABLE_ZERO_COPY,
    MUTABLE_ZERO_COPY,
    Client,
)
from support import pjrt
from support.pjrt import Pjrt, PjrtError, ffi

DTYPES = [getattr(ml_dtypes, name, None) or name for name in pjrt.TYPES]


def random_array(rng: np.random.Generator, dims: tuple[int, ...], dtype: Any) -> np.ndarray:
    dtype = np.dtype(dtype)
    if dtype.name in ("int4", "uint4", "int2", "uint2", "float4_e2m1fn", "bool"):
        return rng.integers(0, 2, dims).astype(dtype)
    return np.frombuffer(rng.bytes(int(np.prod(dims)) * dtype.itemsize), dtype).reshape(dims)


def assert_same_bytes(ours: np.ndarray, theirs: np.ndarray) -> None:
    assert ours.dtype == theirs.dtype
    assert ours.shape == theirs.shape
    assert np.ascontiguousarray(ours).tobytes() == np.ascontiguousarray(theirs).tobytes()


def tiled(api: Pjrt, minor_to_major: list[int], tiles: int = 0) -> tuple[Any, Any]:
    order = pjrt.int64s(minor_to_major)
    layout = api.new("PJRT_Buffer_MemoryLayout", type=0)
    layout.tiled.minor_to_major, layout.tiled.minor_to_major_size = order, len(minor_to_major)
    layout.tiled.num_tiles = tiles
    return layout, order


def strided(api: Pjrt, byte_strides: list[int]) -> tuple[Any, Any]:
    values = pjrt.int64s(byte_strides)
    layout = api.new("PJRT_Buffer_MemoryLayout", type=1)
    layout.strides.byte_strides, layout.strides.num_byte_strides = values, len(byte_strides)
    return layout, values


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: np.dtype(d).name)
@pytest.mark.parametrize("dims", [(), (0,), (5,), (3, 0, 2), (2, 3, 4)], ids=str)
def test_round_trip(client: Client, rng: np.random.Generator, dtype: Any, dims: tuple[int, ...]) -> None:
    array = random_array(rng, dims, dtype)
    buffer = client.put(array)
    assert client.dims(buffer) == dims
    assert client.api.call("PJRT_Buffer_ElementType", buffer=buffer).type == pjrt.buffer_type(dtype)
    size = client.api.call("PJRT_Buffer_OnDeviceSizeInBytes", buffer=buffer).on_device_size_in_bytes
    assert size == array.nbytes
    assert_same_bytes(client.get(buffer, dtype), array)
    client.destroy(buffer)


STRIDED = {
    "transposed": lambda a: a.transpose(2, 0, 1),
    "reversed": lambda a: a[::-1, :, ::-1],
    "stepped": lambda a: a[::2, 1:, ::3],
    "broadcast": lambda a: np.broadcast_to(a[:, :1], (4, 3, 5)),
    "fortran": np.asfortranarray,
}


@pytest.mark.parametrize("view", STRIDED.values(), ids=STRIDED.keys())
@pytest.mark.parametrize(
    "semantics",
    [IMMUTABLE_ONLY_DURING_CALL, IMMUTABLE_UNTIL_TRANSFER, IMMUTABLE_ZERO_COPY, MUTABLE_ZERO_COPY],
)
@pytest.mark.parametrize("dtype", [np.int8, np.float32, np.complex128], ids=lambda d: np.dtype(d).name)
def test_host_strides(client: Client, rng: np.random.Generator, view: Any, semantics: int, dtype: Any) -> None:
    array = view(random_array(rng, (4, 3, 5), dtype))
    args, _kept = client.put_args(array, host_buffer_semantics=semantics)
    client.api.call_with("PJRT_Client_BufferFromHostBuffer", args)
    assert_same_bytes(client.get(args.buffer, dtype), array)
    client.destroy(args.buffer)
    client.api.wait(args.done_with_host_buffer)


def test_only_during_call_copies_before_it_returns(client: Client) -> None:
    array = np.arange(1000, dtype=np.int32)
    buffer = client.put(array)
    array[:] = -1
    np.testing.assert_array_equal(client.get(buffer, np.int32), np.arange(1000))


def test_zero_copy_aliases_until_the_buffer_goes(client: Client) -> None:
    """A host device needs no copy of aligned memory; the host hears when it may reuse the memory."""
    memory = np.zeros(4096 + 64, np.uint8)
    start = -memory.ctypes.data % 64
    array = memory[start : start + 4096].view(np.float32)
    args, _kept = client.put_args(array, host_buffer_semantics=IMMUTABLE_ZERO_COPY)
    client.api.call_with("PJRT_Client_BufferFromHostBuffer", args)
    pointer = client.api.call("PJRT_Buffer_UnsafePointer", buffer=args.buffer).buffer_pointer
    assert pointer == array.ctypes.data
    assert not client.api.call("PJRT_Event_IsReady", event=args.done_with_host_buffer).is_ready
    client.destroy(args.buffer)
    client.api.wait(args.done_with_host_buffer)


# ---- Out, in another layout ----


@pytest.mark.parametrize("order", [[2, 1, 0], [0, 1, 2], [1, 0, 2], [0, 2, 1]], ids=str)
def test_host_layout_permuted(client: Client, rng: np.random.Generator, order: list[int]) -> None:
    array = random_array(rng, (2, 3, 4), np.int16)
    layout, _kept = tiled(client.api, order)
    out = np.empty(array.size, np.int16)
    buffer = client.put(array)
    args = client.api.call(
        "PJRT_Buffer_ToHostBuffer", src=buffer, host_layout=layout, dst=pjrt.pointer_to(out), dst_size=out.nbytes
    )
    client.api.wait(args.event)
    # The physical order, major first, is the reverse of minor_to_major.
    major_to_minor = order[::-1]
    np.testing.assert_array_equal(out, array.transpose(major_to_minor).ravel())


def test_host_layout_strided(client: Client, rng: np.random.Generator) -> None:
    array = random_array(rng, (3, 4), np.float32)
    out = np.full((3, 7), np.nan, np.float32)
    layout, _kept = strided(client.api, [7 * 4, 4])
    buffer = client.put(array)
    needed = client.api.call("PJRT_Buffer_ToHostBuffer", src=buffer, host_layout=layout)
    assert needed.dst_size == (2 * 7 + 4) * 4
    args = client.api.call(
        "PJRT_Buffer_ToHostBuffer", src=buffer, host_layout=layout, dst=pjrt.pointer_to(out), dst_size=out.nbytes
    )
    client.api.wait(args.event)
    assert_same_bytes(out[:, :4], array)
    assert np.isnan(out[:, 4:]).all()


@pytest.mark.parametrize(
    ("strides", "size", "reason"),
    [
        ([16, -4], 48, "byte stride -4 of dimension 1 is not positive"),
        ([0, 4], 48, "byte stride 0 of dimension 0 is not positive"),
        ([32, 4], 48, "need 80 bytes of host memory, but it has 48"),
        ([4], 48, "1 byte strides were given for 2 dimensions"),
    ],
)
def test_host_layout_that_would_write_outside(client: Client, strides: list[int], size: int, reason: str) -> None:
    buffer = client.put(np.zeros((3, 4), np.float32))
    out = np.zeros(size, np.uint8)
    layout, _kept = strided(client.api, strides)
    with pytest.raises(PjrtError, match=reason) as error:
        client.api.call(
            "PJRT_Buffer_ToHostBuffer", src=buffer, host_layout=layout, dst=pjrt.pointer_to(out), dst_size=size
        )
    assert error.value.code == "INVALID_ARGUMENT"


def test_size_query_and_short_destination(client: Client) -> None:
    buffer = client.put(np.zeros((3, 4), np.float32))
    assert client.api.call("PJRT_Buffer_ToHostBuffer", src=buffer).dst_size == 48
    out = np.zeros(47, np.uint8)
    with pytest.raises(PjrtError, match=r"the destination has 47 bytes, the array F32\{3,4\} needs 48"):
        client.api.call("PJRT_Buffer_ToHostBuffer", src=buffer, dst=pjrt.pointer_to(out), dst_size=47)


def test_memory_layout_of_a_buffer_is_row_major(client: Client) -> None:
    buffer = client.put(np.zeros((2, 3, 4), np.int8))
    layout = client.api.call("PJRT_Buffer_GetMemoryLayout", buffer=buffer).layout
    assert layout.type == 0
    assert ffi().unpack(layout.tiled.minor_to_major, layout.tiled.minor_to_major_size) == [2, 1, 0]
    assert layout.tiled.num_tiles == 0
    unpadded = client.api.call("PJRT_Buffer_UnpaddedDimensions", buffer=buffer)
    assert ffi().unpack(unpadded.unpadded_dims, unpadded.num_dims) == [2, 3, 4]
    assert client.api.call("PJRT_Buffer_DynamicDimensionIndices", buffer=buffer).num_dynamic_dims == 0


# ---- Refusals on the way in ----


def test_row_major_device_layouts_are_accepted(client: Client, rng: np.random.Generator) -> None:
    array = random_array(rng, (2, 1, 3), np.float32)
    for layout, kept in (
        tiled(client.api, [2, 1, 0]),
        tiled(client.api, [2, 0, 1]),
        strided(client.api, [12, 12, 4]),
        strided(client.api, [12, 999, 4]),
    ):
        args, _args_kept = client.put_args(array, device_layout=layout)
        client.api.call_with("PJRT_Client_BufferFromHostBuffer", args)
        client.api.wait(args.done_with_host_buffer)
        assert_same_bytes(client.get(args.buffer, np.float32), array)
        del kept


@pytest.mark.parametrize(
    ("make", "code", "reason"),
    [
        (lambda api: tiled(api, [0, 1]), "UNIMPLEMENTED", r"device layout minor_to_major \{0,1\} was asked for"),
        (lambda api: tiled(api, [1, 0], tiles=1), "UNIMPLEMENTED", "a layout with 1 tiles was asked for"),
        (lambda api: tiled(api, [1, 1]), "INVALID_ARGUMENT", r"minor_to_major \{1,1\} is not a permutation"),
        (lambda api: tiled(api, [2, 0]), "INVALID_ARGUMENT", r"minor_to_major \{2,0\} is not a permutation"),
        (lambda api: tiled(api, [0]), "INVALID_ARGUMENT", r"minor_to_major \{0\} is not a permutation"),
        (lambda api: strided(api, [4, 8]), "UNIMPLEMENTED", r"device byte strides \{4,8\} were asked for"),
    ],
)
def test_other_device_layouts_are_refused(client: Client, make: Any, code: str, reason: str) -> None:
    layout, _kept = make(client.api)
    args, _args_kept = client.put_args(np.zeros((2, 3), np.float32), device_layout=layout)
    with pytest.raises(PjrtError, match=reason) as error:
        client.api.call_with("PJRT_Client_BufferFromHostBuffer", args)
    assert error.value.code == code


F6 = pjrt.abi.enums["PJRT_Buffer_Type"]["PJRT_Buffer_Type_F6E2M3FN"]


@pytest.mark.parametrize(
    ("fields", "code", "reason"),
    [
        ({"type": 0}, "UNIMPLEMENTED", r"element type INVALID \(0\) does not exist"),
        ({"type": F6}, "UNIMPLEMENTED", "element type F6E2M3FN"),
        ({"type": 999}, "UNIMPLEMENTED", r"element type INVALID \(999\)"),
        ({"data": ffi().NULL}, "INVALID_ARGUMENT", "data is NULL"),
        ({"num_byte_strides": 1}, "INVALID_ARGUMENT", "1 byte strides were given for 2 dimensions"),
        ({"host_buffer_semantics": 4}, "INVALID_ARGUMENT", "host buffer semantics 4 are unknown"),
        ({"memory": ffi().NULL}, "INVALID_ARGUMENT", "neither a device nor a memory"),
        ({"num_dims": 65}, "INVALID_ARGUMENT", "rank 65 is above the limit of 64"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_bad_arguments(client: Client, fields: dict[str, Any], code: str, reason: str) -> None:
    args, _kept = client.put_args(np.zeros((2, 3), np.float32), **fields)
    with pytest.raises(PjrtError, match=reason) as error:
        client.api.call_with("PJRT_Client_BufferFromHostBuffer", args)
    assert error.value.code == code


@pytest.mark.parametrize(
    ("dims", "reason"),
    [([-1, 3], r"dimensions \{-1,3\} must not be negative"), ([1 << 40, 1 << 40], "overflows 63 bits")],
)
def test_bad_dimensions(client: Client, dims: list[int], reason: str) -> None:
    with pytest.raises(PjrtError, match=reason) as error:
        client.allocate(dims, np.float32)
    assert error.value.code == "INVALID_ARGUMENT"


def test_more_memory_than_there_is(client: Client) -> None:
    with pytest.raises(PjrtError) as error:
        client.allocate([1 << 60], np.int8)
    assert error.value.code == "RESOURCE_EXHAUSTED"


# ---- Places ----


def test_copies_between_devices_and_memories(client: Client, rng: np.random.Generator) -> None:
    array = random_array(rng, (7, 5), np.float64)
    buffer = client.put(array)
    for device in range(4):
        for kind in ("device", "pinned_host", "unpinned_host"):
            memory = client.memory(kind, device)
            copy = client.api.call("PJRT_Buffer_CopyToMemory", buffer=buffer, dst_memory=memory).dst_buffer
            assert client.api.call("PJRT_Buffer_Memory", buffer=copy).memory == memory
            assert client.api.call("PJRT_Buffer_Device", buffer=copy).device == client.devices[device]
            assert client.api.call("PJRT_Buffer_IsOnCpu", buffer=copy).is_on_cpu
            assert_same_bytes(client.get(copy, np.float64), array)
            client.destroy(copy)
    copy = client.api.call("PJRT_Buffer_CopyToDevice", buffer=buffer, dst_device=client.devices[2]).dst_buffer
    client.destroy(buffer)
    assert_same_bytes(client.get(copy, np.float64), array)


def test_device_alone_means_its_default_memory(client: Client) -> None:
    args, _kept = client.put_args(np.zeros(3, np.int8), memory=ffi().NULL, device=client.devices[1])
    client.api.call_with("PJRT_Client_BufferFromHostBuffer", args)
    client.api.wait(args.done_with_host_buffer)
    assert client.api.call("PJRT_Buffer_Memory", buffer=args.buffer).memory == client.default_memory(1)


def test_memory_of_another_client(api: Pjrt, client: Client, backend: Any) -> None:
    other = Client(api, backend.address)
    with pytest.raises(PjrtError, match="belongs to another client"):
        client.put(np.zeros(3), other.default_memory())
    buffer = client.put(np.zeros(3))
    with pytest.raises(PjrtError, match="belongs to another client"):
        api.call("PJRT_Buffer_CopyToMemory", buffer=buffer, dst_memory=other.default_memory())
    other.close()


# ---- Deletion and references ----


def test_deletion(client: Client) -> None:
    buffer = client.put(np.zeros(3, np.float32))
    assert not client.is_deleted(buffer)
    for _ in range(2):  # idempotent
        client.api.call("PJRT_Buffer_Delete", buffer=buffer)
        assert client.is_deleted(buffer)
    for use in (
        lambda: client.get(buffer, np.float32),
        lambda: client.api.call("PJRT_Buffer_UnsafePointer", buffer=buffer),
        lambda: client.api.call("PJRT_Buffer_CopyToMemory", buffer=buffer, dst_memory=client.default_memory(1)),
        lambda: client.api.call("PJRT_Buffer_IncreaseExternalReferenceCount", buffer=buffer),
    ):
        with pytest.raises(PjrtError, match="delete") as error:
            use()
        assert error.value.code in ("INVALID_ARGUMENT", "FAILED_PRECONDITION")
    assert client.dims(buffer) == (3,)
    client.destroy(buffer)


def test_external_references(client: Client) -> None:
    buffer = client.put(np.arange(4, dtype=np.int32))
    call = client.api.call
    call("PJRT_Buffer_IncreaseExternalReferenceCount", buffer=buffer)
    pointer = call("PJRT_Buffer_OpaqueDeviceMemoryDataPointer", buffer=buffer).device_memory_ptr
    assert list(ffi().cast("int32_t*", pointer)[0:4]) == [0, 1, 2, 3]
    call("PJRT_Buffer_DecreaseExternalReferenceCount", buffer=buffer)
    with pytest.raises(PjrtError) as error:
        call("PJRT_Buffer_DecreaseExternalReferenceCount", buffer=buffer)
    assert error.value.code == "INVALID_ARGUMENT"
    assert error.value.message == "Attempting to decrease reference on a buffer with zero reference count."


def test_view_of_foreign_memory(client: Client) -> None:
    memory = np.arange(6, dtype=np.float32)
    released: list[int] = []

    @ffi().callback("void (*)(void*, void*)")
    def on_delete(pointer: Any, _arg: Any) -> None:
        released.append(int(ffi().cast("intptr_t", pointer)))

    view = client.call(
        "PJRT_Client_CreateViewOfDeviceBuffer",
        device_buffer_ptr=pjrt.pointer_to(memory),
        dims=pjrt.int64s([2, 3]),
        num_dims=2,
        element_type=pjrt.buffer_type(np.float32),
        device=client.devices[1],
        on_delete_callback=on_delete,
    ).buffer
    assert client.api.call("PJRT_Buffer_UnsafePointer", buffer=view).buffer_pointer == memory.ctypes.data
    memory[0] = 42
    assert client.get(view, np.float32)[0, 0] == 42
    assert released == []
    client.destroy(view)
    assert released == [memory.ctypes.data]


# ---- Raw bytes, bitcasts, promises ----


def test_raw_copies(client: Client) -> None:
    buffer = client.put(np.arange(10, dtype=np.uint8))
    out = np.zeros(4, np.uint8)
    event = client.api.call(
        "PJRT_Buffer_CopyRawToHost", buffer=buffer, dst=pjrt.pointer_to(out), offset=3, transfer_size=4
    ).event
    client.api.wait(event)
    assert out.tolist() == [3, 4, 5, 6]
    for offset, size in ((-1, 1), (0, 11), (10, 1), (5, -1), (1 << 62, 1 << 62)):
        with pytest.raises(PjrtError, match="lie outside of the buffer's 10 bytes"):
            client.api.call(
                "PJRT_Buffer_CopyRawToHost", buffer=buffer, dst=pjrt.pointer_to(out), offset=offset, transfer_size=size
            )


def test_raw_copy_to_a_destination_that_comes_later(client: Client) -> None:
    buffer = client.put(np.arange(10, dtype=np.uint8))
    out = np.zeros(2, np.uint8)
    args = client.api.call("PJRT_Buffer_CopyRawToHostFuture", buffer=buffer, offset=8, transfer_size=2)
    client.destroy(buffer)  # the copy keeps it
    assert not client.api.call("PJRT_Event_IsReady", event=args.event).is_ready
    given = client.api.new(
        "PJRT_Buffer_CopyRawToHostFuture_Callback_Args", callback_data=args.callback_data, dst=pjrt.pointer_to(out)
    )
    args.future_ready_callback(given)
    client.api.wait(args.event)
    assert out.tolist() == [8, 9]


def test_raw_copy_whose_destination_fails(client: Client) -> None:
    buffer = client.put(np.arange(10, dtype=np.uint8))
    args = client.api.call("PJRT_Buffer_CopyRawToHostFuture", buffer=buffer, offset=8, transfer_size=2)
    message = ffi().new("char[]", b"no room")
    given = client.api.new(
        "PJRT_Buffer_CopyRawToHostFuture_Callback_Args",
        callback_data=args.callback_data,
        error_code=8,
        error_message=message,
        error_message_size=7,
    )
    args.future_ready_callback(given)
    with pytest.raises(PjrtError, match="RESOURCE_EXHAUSTED: no room"):
        client.api.wait(args.event)


def test_bitcast(client: Client) -> None:
    array = np.arange(6, dtype=np.float32)
    buffer = client.put(array)
    fields = {"dims": pjrt.int64s([3, 2]), "num_dims": 2, "element_type": pjrt.buffer_type(np.int32)}
    view = client.api.call("PJRT_Buffer_Bitcast", buffer=buffer, **fields).out_buffer
    np.testing.assert_array_equal(client.get(view, np.int32), array.view(np.int32).reshape(3, 2))
    pointers = [client.api.call("PJRT_Buffer_UnsafePointer", buffer=b).buffer_pointer for b in (buffer, view)]
    assert pointers[0] == pointers[1]
    with pytest.raises(PjrtError, match=r"S64\{3,2\} takes 48 bytes, the buffer has 24"):
        client.api.call("PJRT_Buffer_Bitcast", buffer=buffer, **(fields | {"element_type": pjrt.buffer_type(np.int64)}))


def alias(client: Client) -> tuple[Any, Any]:
    args = client.call(
        "PJRT_Client_CreateAliasBuffer",
        memory=client.default_memory(),
        shape_dims=pjrt.int64s([4]),
        shape_num_dims=1,
        shape_element_type=pjrt.buffer_type(np.int32),
    )
    return args.alias_buffer, args.fulfill_alias_buffer_cb


def test_alias_buffer(client: Client) -> None:
    promise, callback = alias(client)
    ready = client.api.call("PJRT_Buffer_ReadyEvent", buffer=promise).event
    assert not client.api.call("PJRT_Event_IsReady", event=ready).is_ready
    source = client.put(np.arange(4, dtype=np.int32))
    # As jaxlib calls it: without a client.
    client.api.call("PJRT_Client_FulfillAliasBuffer", buffer=source, fulfill_alias_buffer_cb=callback)
    client.destroy(source)
    client.api.wait(ready)
    assert client.get(promise, np.int32).tolist() == [0, 1, 2, 3]


def test_alias_buffer_that_fails(client: Client) -> None:
    promise, callback = alias(client)
    message = ffi().new("char[]", b"lost")
    client.api.call(
        "PJRT_Client_FulfillAliasBuffer",
        status_code=15,
        error_message=message,
        error_message_size=4,
        fulfill_alias_buffer_cb=callback,
    )
    with pytest.raises(PjrtError, match="DATA_LOSS: lost"):
        client.await_buffer(promise)


def test_alias_buffer_destroyed_before_it_is_fulfilled(client: Client) -> None:
    promise, callback = alias(client)
    client.destroy(promise)
    source = client.put(np.arange(4, dtype=np.int32))
    client.api.call("PJRT_Client_FulfillAliasBuffer", buffer=source, fulfill_alias_buffer_cb=callback)


def test_error_buffer(client: Client) -> None:
    message = ffi().new("char[]", b"from elsewhere")
    fields = {
        "memory": client.default_memory(),
        "shape_dims": pjrt.int64s([4]),
        "shape_num_dims": 1,
        "shape_element_type": pjrt.buffer_type(np.int32),
        "error_message": message,
        "error_message_size": 14,
    }
    buffer = client.call("PJRT_Client_CreateErrorBuffer", error_code=14, **fields).buffer
    with pytest.raises(PjrtError, match="UNAVAILABLE: from elsewhere"):
        client.await_buffer(buffer)
    with pytest.raises(PjrtError, match="from elsewhere"):
        client.get(buffer, np.int32)
    with pytest.raises(PjrtError, match="the error code is OK"):
        client.call("PJRT_Client_CreateErrorBuffer", error_code=0, **fields)


def donate(client: Client) -> tuple[Any, Any]:
    buffer = client.put(np.arange(4, dtype=np.int32))
    args = client.api.call("PJRT_Buffer_DonateWithControlDependency", buffer=buffer)
    assert client.is_deleted(buffer)
    client.destroy(buffer)
    return args.out_buffer, args


def test_donation_with_a_dependency(client: Client) -> None:
    donated, args = donate(client)
    ready = client.api.call("PJRT_Buffer_ReadyEvent", buffer=donated).event
    assert not client.api.call("PJRT_Event_IsReady", event=ready).is_ready
    given = client.api.new("PJRT_Buffer_DonateWithControlDependency_Callback_Args", callback_data=args.callback_data)
    args.dependency_ready_callback(given)
    client.api.wait(ready)
    assert client.get(donated, np.int32).tolist() == [0, 1, 2, 3]


def test_donation_whose_dependency_fails(client: Client) -> None:
    donated, args = donate(client)
    message = ffi().new("char[]", b"upstream failed")
    given = client.api.new(
        "PJRT_Buffer_DonateWithControlDependency_Callback_Args",
        callback_data=args.callback_data,
        error_code=13,
        error_message=message,
        error_message_size=15,
    )
    args.dependency_ready_callback(given)
    with pytest.raises(PjrtError, match="upstream failed"):
        client.await_buffer(donated)
