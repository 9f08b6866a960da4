"""Transfer managers: buffers that are handed out first and filled piece by piece."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cpu.pjrt.harness import Client
from support import pjrt
from support.pjrt import PjrtError, ffi
from support.transfers import Manager


def is_ready(client: Client, buffer: Any) -> bool:
    event = client.api.call("PJRT_Buffer_ReadyEvent", buffer=buffer).event
    ready = client.api.call("PJRT_Event_IsReady", event=event).is_ready
    client.api.call("PJRT_Event_Destroy", event=event)
    return bool(ready)


def test_pieces_in_any_order(client: Client, rng: np.random.Generator) -> None:
    whole, other = rng.normal(size=(4, 8)).astype(np.float32), rng.integers(0, 9, 3, np.int16)
    manager = Manager(client, ((4, 8), np.float32), ((3,), np.int16), device=2)
    assert manager.call("BufferCount").buffer_count == 2
    assert [manager.call("BufferSize", buffer_index=i).buffer_size for i in (0, 1)] == [128, 6]
    assert manager.call("Device").device_out == client.devices[2]
    manager.call("AddMetadata")
    buffers = [manager.retrieve(0), manager.retrieve(1)]
    client.api.wait(manager.write(0, whole[2:], offset=64, last=False))
    client.api.wait(manager.write(1, other))
    client.await_buffer(buffers[1])
    assert not is_ready(client, buffers[0])
    client.api.wait(manager.write(0, whole[:2]))
    manager.destroy()
    client.await_buffer(buffers[0])
    np.testing.assert_array_equal(client.get(buffers[0], np.float32), whole)
    np.testing.assert_array_equal(client.get(buffers[1], np.int16), other)


@pytest.mark.parametrize("order", [None, [1, 0], [0, 1]], ids=str)
def test_literals(client: Client, rng: np.random.Generator, order: list[int] | None) -> None:
    array = rng.normal(size=(3, 5))
    manager = Manager(client, ((3, 5), np.float64))
    layout = ffi().NULL
    if order is not None:
        minor_to_major = pjrt.int64s(order)
        layout = client.api.new("PJRT_Buffer_MemoryLayout", type=0)
        layout.tiled.minor_to_major, layout.tiled.minor_to_major_size = minor_to_major, 2
    stored = np.asfortranarray(array).ravel(order="K") if order == [0, 1] else array.ravel()
    client.api.wait(manager.literal(0, array, data=pjrt.pointer_to(stored), shape_layout=layout))
    np.testing.assert_array_equal(client.get(manager.retrieve(0), np.float64), array)
    manager.destroy()


def test_literal_of_another_shape(client: Client) -> None:
    manager = Manager(client, ((3, 5), np.float64))
    with pytest.raises(PjrtError, match=r"the literal is F64\{5,3\}, buffer 0 is F64\{3,5\}"):
        manager.literal(0, np.zeros((5, 3)))
    with pytest.raises(PjrtError, match=r"the literal is F32\{3,5\}"):
        manager.literal(0, np.zeros((3, 5), np.float32))
    manager.destroy()


def test_errors_of_use(client: Client) -> None:
    manager = Manager(client, ((4,), np.int8))
    data = np.zeros(4, np.int8)
    for index in (-1, 1):
        with pytest.raises(PjrtError, match=f"buffer index {index} is out of range; there are 1 buffers"):
            manager.write(index, data)
    for offset in (-1, 1):
        with pytest.raises(PjrtError, match="lie outside of buffer 0 of 4 bytes"):
            manager.write(0, data, offset=offset)
    manager.retrieve(0)
    with pytest.raises(PjrtError, match="has been retrieved already"):
        manager.retrieve(0)
    client.api.wait(manager.write(0, data))
    with pytest.raises(PjrtError, match="last transfer was already made") as error:
        manager.write(0, data)
    assert error.value.code == "FAILED_PRECONDITION"
    with pytest.raises(PjrtError, match="last transfer was already made"):
        manager.literal(0, data)
    manager.destroy()


def test_buffer_error(client: Client) -> None:
    manager = Manager(client, ((4,), np.int8))
    buffer = manager.retrieve(0)
    message = ffi().new("char[]", b"disk on fire")
    manager.call("SetBufferError", buffer_index=0, error_code=15, error_message=message, error_message_size=12)
    with pytest.raises(PjrtError, match="DATA_LOSS: disk on fire"):
        client.await_buffer(buffer)
    manager.destroy()
    with pytest.raises(PjrtError, match="disk on fire"):  # the first error stays
        client.await_buffer(buffer)


def test_manager_destroyed_too_early(client: Client) -> None:
    manager = Manager(client, ((4,), np.int8))
    buffer = manager.retrieve(0)
    manager.destroy()
    with pytest.raises(PjrtError, match="CANCELLED: The transfer manager was destroyed"):
        client.await_buffer(buffer)
