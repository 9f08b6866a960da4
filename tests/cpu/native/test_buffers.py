"""Buffers: every way in and out, storage that is shared, promised, given away or deleted, and what is refused."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from cpu.native.harness import ELEMENT_TYPE, get, put
from plugin_abi.errors import FlagosStatusError, StatusCode
from plugin_abi.host import Context, ElementType, HostBufferSemantics, Memory

SHAPES = [(), (0,), (1,), (7,), (3, 0, 2), (4, 5), (2, 3, 4, 5), (300, 301), (700_001,)]


def random_array(rng: np.random.Generator, dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
    raw = rng.integers(0, 2 if dtype == np.bool_ else 256, (*shape, dtype.itemsize), np.uint8)
    return raw.view(dtype).reshape(shape)


@pytest.mark.parametrize("semantics", HostBufferSemantics)
@pytest.mark.parametrize("shape", SHAPES)
def test_bytes_come_back_as_they_went_in(
    memory: Memory, rng: np.random.Generator, shape: tuple[int, ...], semantics: HostBufferSemantics
) -> None:
    for dtype, element_type in ELEMENT_TYPE.items():
        array = random_array(rng, dtype, shape)
        buffer = put(memory, array, semantics)
        assert (buffer.dims, buffer.element_type, buffer.size_bytes) == (shape, element_type, array.nbytes)
        assert bytes(buffer.to_host()) == array.tobytes()


@pytest.mark.parametrize("element_type", [t for t in ElementType if t is not ElementType.INVALID])
def test_every_element_type_has_its_size(memory: Memory, element_type: ElementType) -> None:
    dims = () if element_type is ElementType.TOKEN else (3, 5)
    buffer = memory.allocate(dims, element_type)
    assert buffer.size_bytes == element_type.item_size * 15


def strided(rng: np.random.Generator, kind: str) -> np.ndarray:
    base = rng.standard_normal((40, 60, 8)).astype(np.float32)
    return {
        "reversed": base[::-1, :, ::-1],
        "transposed": base.transpose(2, 0, 1),
        "every third": base[::3, 1::7],
        "repeated": np.broadcast_to(base[:1, :, None, :], (5, 60, 4, 8)),
        "large transposed": rng.standard_normal((900, 1100)).T,
        "large reversed": rng.standard_normal((900, 1100))[::-1],
    }[kind]


STRIDED = ["reversed", "transposed", "every third", "repeated", "large transposed", "large reversed"]


@pytest.mark.parametrize("kind", STRIDED)
def test_strides_of_the_host_are_followed(memory: Memory, rng: np.random.Generator, kind: str) -> None:
    array = strided(rng, kind)
    np.testing.assert_array_equal(get(put(memory, array)), array)


def test_bytes_go_to_the_host_in_its_strides(memory: Memory, rng: np.random.Generator) -> None:
    array = rng.standard_normal((33, 17)).astype(np.float32)
    out = np.zeros((17, 2 * 33), np.float32)
    with put(memory, array).to_host_async(out, byte_strides=(8, 4 * 2 * 33)) as done:
        done.wait()
    np.testing.assert_array_equal(out[:, ::2], array.T)
    assert not out[:, 1::2].any()


def aligned(elements: int) -> np.ndarray:
    raw = np.zeros(elements * 4 + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + elements * 4].view(np.float32)


def test_zero_copy_aliases_the_host_until_the_last_user_is_gone(memory: Memory) -> None:
    array = aligned(4096)
    buffer, done = memory.from_host_async(array, semantics=HostBufferSemantics.IMMUTABLE_ZERO_COPY)
    view = buffer.bitcast((64, 64), ElementType.S32)
    assert buffer.pointer_address() == view.pointer_address() == array.ctypes.data
    buffer.delete()
    assert not done.query()[0]
    view.close()
    assert done.query() == (True, None)


@pytest.mark.parametrize("offset", [0, 4])
def test_zero_copy_copies_what_is_small_or_not_aligned(memory: Memory, offset: int) -> None:
    array = aligned(4096)[offset // 4 :][: 16 if offset == 0 else None]
    buffer, done = memory.from_host_async(array, semantics=HostBufferSemantics.IMMUTABLE_ZERO_COPY)
    buffer.wait()
    assert buffer.pointer_address() != array.ctypes.data
    done.wait()


def test_aliased_host_memory_is_never_written(memory: Memory) -> None:
    buffer, _done = memory.from_host_async(aligned(4096), semantics=HostBufferSemantics.IMMUTABLE_ZERO_COPY)
    with pytest.raises(FlagosStatusError, match="must not change") as refused:
        buffer.write_raw(bytes(4))
    assert refused.value.code == StatusCode.FAILED_PRECONDITION


def test_raw_bytes_are_read_and_written_in_ranges(memory: Memory, rng: np.random.Generator) -> None:
    data = rng.bytes(1000)
    buffer = memory.allocate((1000,), ElementType.U8)
    buffer.write_raw(data)
    buffer.write_raw(b"abc", 500)
    assert bytes(buffer.read_raw(499, 5)) == data[499:500] + b"abc" + data[503:504]
    assert buffer.read_raw(1000, 0) == b""
    for offset, size in [(-1, 1), (0, -1), (0, 1001), (1000, 1), (2**63 - 1, 1)]:
        with pytest.raises(FlagosStatusError) as refused:
            buffer.read_raw(offset, size)
        assert refused.value.code == StatusCode.OUT_OF_RANGE


def test_copies_go_to_every_memory_of_every_device(context: Context, memory: Memory, rng: np.random.Generator) -> None:
    assert [m.kind for m in context.devices[2].memories] == ["device", "pinned_host", "unpinned_host"]
    for elements in (3, 500_000):
        array = rng.standard_normal(elements)
        source = put(memory, array)
        for target in context.memories:
            copy = source.copy_to(target)
            assert copy.memory.id == target.id
            assert copy.device.id == target.devices[0].id
            np.testing.assert_array_equal(get(copy), array)


def test_a_view_uses_foreign_memory_and_says_when_it_is_done(memory: Memory) -> None:
    array = np.arange(100, dtype=np.int64)
    released = threading.Event()
    view = memory.view(array.ctypes.data, (10, 10), ElementType.S64, released.set)
    assert view.pointer_address() == array.ctypes.data
    np.testing.assert_array_equal(get(view), array.reshape(10, 10))
    assert not released.is_set()
    view.close()
    assert released.is_set()


def test_a_promise_is_kept_later(memory: Memory, rng: np.random.Generator) -> None:
    array = rng.standard_normal((5, 6)).astype(np.float32)
    promise = memory.promise((5, 6), ElementType.F32)
    copy = promise.copy_to(memory)
    assert not promise.ready_event().query()[0]
    source = put(memory, array)
    promise.fulfill(source)
    np.testing.assert_array_equal(get(copy), array)
    np.testing.assert_array_equal(get(promise), array)
    np.testing.assert_array_equal(get(source), array)
    assert promise.pointer_address() == source.pointer_address()
    with pytest.raises(FlagosStatusError, match="no open promise") as refused:
        promise.fulfill(source)
    assert refused.value.code == StatusCode.FAILED_PRECONDITION


def test_a_failed_promise_fails_what_reads_it(memory: Memory) -> None:
    cause = FlagosStatusError(StatusCode.DATA_LOSS, "the network went away")
    for promise in (memory.promise((2,), ElementType.F32, cause), memory.promise((2,), ElementType.F32)):
        if not promise.ready_event().query()[0]:
            promise.fulfill(None, cause)
        for reader in (promise.wait, promise.to_host, promise.copy_to(memory).wait, promise.pointer_address):
            with pytest.raises(FlagosStatusError, match="the network went away") as failed:
                reader()
            assert failed.value.code == StatusCode.DATA_LOSS


def test_a_promise_that_nobody_can_keep_is_cancelled(memory: Memory) -> None:
    promise = memory.promise((2,), ElementType.F32)
    copy = promise.copy_to(memory)
    promise.close()
    with pytest.raises(FlagosStatusError) as failed:
        copy.wait(timeout=60)
    assert failed.value.code == StatusCode.CANCELLED


@pytest.mark.parametrize(("dims", "element_type"), [((3,), ElementType.F32), ((2,), ElementType.S32)])
def test_a_promise_takes_only_what_was_promised(
    memory: Memory, dims: tuple[int, ...], element_type: ElementType
) -> None:
    with pytest.raises(FlagosStatusError, match=r"f32\[2\] was promised"):
        memory.promise((2,), ElementType.F32).fulfill(memory.allocate(dims, element_type))


def test_donated_contents_wait_for_their_dependency(context: Context, memory: Memory) -> None:
    buffer = put(memory, np.arange(5, dtype=np.float32))
    dependency = context.create_event()
    donated = buffer.donate(dependency)
    assert buffer.is_deleted
    assert not donated.ready_event().query()[0]
    dependency.set()
    np.testing.assert_array_equal(get(donated), np.arange(5))
    with pytest.raises(FlagosStatusError, match="was donated"):
        buffer.to_host()


def test_a_bitcast_shares_storage_and_needs_equal_size(memory: Memory) -> None:
    buffer = put(memory, np.array([1.0, -2.0], np.float32))
    view = buffer.bitcast((2,), ElementType.S32)
    buffer.delete()
    np.testing.assert_array_equal(get(view), np.array([1.0, -2.0], np.float32).view(np.int32))
    with pytest.raises(FlagosStatusError, match="the sizes must be equal"):
        view.bitcast((3,), ElementType.S32)


def test_deletion_is_idempotent_and_spares_work_in_flight(memory: Memory, rng: np.random.Generator) -> None:
    array = rng.standard_normal(1_000_000)
    for _ in range(5):
        buffer = put(memory, array)
        out = np.empty_like(array)
        done = buffer.to_host_async(out)
        buffer.delete()
        buffer.delete()
        buffer.close()
        done.wait()
        np.testing.assert_array_equal(out, array)


@pytest.mark.parametrize("use", ["to_host", "ready_event", "pointer_address", "copy_to", "bitcast", "donate", "hold"])
def test_a_deleted_buffer_is_named_in_the_error(context: Context, memory: Memory, use: str) -> None:
    buffer = memory.allocate((4, 2), ElementType.F32)
    buffer.delete()
    assert buffer.is_deleted
    assert buffer.dims == (4, 2)
    arguments = {
        "copy_to": (memory,),
        "bitcast": ((8,), ElementType.F32),
        "donate": (context.create_event(),),
        "hold": (1,),
    }
    with pytest.raises(FlagosStatusError, match=r"f32\[4,2\] was deleted") as refused:
        getattr(buffer, use)(*arguments.get(use, ()))
    assert refused.value.code == StatusCode.INVALID_ARGUMENT


def test_a_hold_keeps_memory_after_deletion(context: Context, memory: Memory) -> None:
    device = context.devices[0]
    buffer = memory.allocate((1000,), ElementType.F32)
    buffer.hold(1)
    buffer.hold(1)
    buffer.delete()
    buffer.hold(-1)
    assert device.memory_stats().bytes_in_use == 4000
    buffer.hold(-1)
    assert device.memory_stats().bytes_in_use == 0
    for delta in (-1, 0, 2):
        with pytest.raises(FlagosStatusError) as refused:
            buffer.hold(delta)
        assert refused.value.code == StatusCode.INVALID_ARGUMENT


def test_memory_is_counted(context: Context) -> None:
    device = context.devices[1]
    buffers = [device.default_memory.allocate((size,), ElementType.U8) for size in (100, 3_000_000, 200)]
    host = device.memories[1].allocate((50,), ElementType.U8)
    stats = device.memory_stats()
    assert (stats.bytes_in_use, stats.num_allocations, stats.largest_allocation) == (3_000_300, 3, 3_000_000)
    buffers[1].close()
    assert device.memory_stats(clear_peaks=True).peak_bytes_in_use == 3_000_300
    assert device.memory_stats().peak_bytes_in_use == device.memory_stats().bytes_in_use == 300
    host.close()


def test_a_full_memory_names_the_sizes(backend: object) -> None:
    with Context(backend, {"memory_limit_bytes": 1000}) as context:
        memory = context.devices[0].default_memory
        first = memory.allocate((900,), ElementType.U8)
        with pytest.raises(FlagosStatusError, match="200 bytes do not fit: 900 of 1000") as full:
            memory.allocate((200,), ElementType.U8)
        assert full.value.code == StatusCode.RESOURCE_EXHAUSTED
        first.delete()
        memory.allocate((1000,), ElementType.U8)


@pytest.mark.parametrize(
    ("dims", "element_type", "message"),
    [
        ((-1,), ElementType.F32, r"dims\[0\] is -1"),
        ((2, -(2**63)), ElementType.F32, r"dims\[1\] is -9223372036854775808"),
        ((2**40, 2**40), ElementType.F32, r"overflows at dims\[1\]"),
        ((0, 2**62, 2**62), ElementType.F32, "overflows"),
        ((2**62,), ElementType.C128, "overflows"),
        ((1,) * 65, ElementType.F32, "rank 65"),
        ((1,), ElementType.INVALID, "element_type 0"),
        ((1,), ElementType.TOKEN, "a token has no dimensions"),
    ],
)
def test_absurd_shapes_are_refused(
    memory: Memory, dims: tuple[int, ...], element_type: ElementType, message: str
) -> None:
    for make in (memory.allocate, memory.promise, lambda d, t: memory.from_host(8, d, t)):
        with pytest.raises(FlagosStatusError, match=message) as refused:
            make(dims, element_type)
        assert refused.value.code == StatusCode.INVALID_ARGUMENT


def test_an_impossible_size_is_not_a_crash(memory: Memory) -> None:
    with pytest.raises(FlagosStatusError) as refused:
        memory.allocate((2**60,), ElementType.U8)
    assert refused.value.code == StatusCode.RESOURCE_EXHAUSTED
