"""Events that the host sets and events of the device."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from cpu.pjrt.harness import Client
from support.pjrt import Pjrt, PjrtError, ffi


@pytest.fixture
def event(api: Pjrt) -> Any:
    return api.call("PJRT_Event_Create").event


def set_error(api: Pjrt, event: Any, code: int, message: bytes) -> None:
    kept = ffi().new("char[]", message)
    api.call("PJRT_Event_Set", event=event, error_code=code, error_message=kept, error_message_size=len(message))


def test_host_event(api: Pjrt, event: Any) -> None:
    calls: list[PjrtError | None] = []
    kept = [api.on_ready(event, calls.append)]
    assert not api.call("PJRT_Event_IsReady", event=event).is_ready
    with pytest.raises(PjrtError, match="the event is not complete yet") as error:
        api.call("PJRT_Event_Error", event=event)
    assert error.value.code == "FAILED_PRECONDITION"
    assert calls == []
    api.call("PJRT_Event_Set", event=event)
    assert api.call("PJRT_Event_IsReady", event=event).is_ready
    api.call("PJRT_Event_Error", event=event)
    kept.append(api.on_ready(event, calls.append))
    assert calls == [None, None]
    with pytest.raises(PjrtError, match="the event is complete already"):
        api.call("PJRT_Event_Set", event=event)
    api.wait(event)


def test_host_event_that_fails(api: Pjrt, event: Any) -> None:
    calls: list[PjrtError | None] = []
    kept = [api.on_ready(event, calls.append)]
    set_error(api, event, 4, b"too late")
    kept.append(api.on_ready(event, calls.append))
    assert [str(error) for error in calls] == ["DEADLINE_EXCEEDED: too late"] * 2
    assert api.call("PJRT_Event_IsReady", event=event).is_ready
    with pytest.raises(PjrtError, match="DEADLINE_EXCEEDED: too late"):
        api.call("PJRT_Event_Error", event=event)
    with pytest.raises(PjrtError, match="DEADLINE_EXCEEDED: too late"):
        api.wait(event)


def test_waiting_thread_is_woken(api: Pjrt, event: Any) -> None:
    thread = threading.Thread(target=lambda: api.call("PJRT_Event_Await", event=event))
    thread.start()
    api.call("PJRT_Event_Set", event=event)
    thread.join()
    api.call("PJRT_Event_Destroy", event=event)


def test_event_destroyed_in_its_own_callback(api: Pjrt, client: Client) -> None:
    """What jaxlib does with every event that it turns into a future."""
    ours = api.call("PJRT_Event_Create").event
    for event in (ours, api.call("PJRT_Buffer_ReadyEvent", buffer=client.put(np.zeros(3))).event):
        done = threading.Event()

        def destroy(_error: PjrtError | None, event: Any = event, done: threading.Event = done) -> None:
            api.call("PJRT_Event_Destroy", event=event)
            done.set()

        kept = api.on_ready(event, destroy)
        if event is ours:
            api.call("PJRT_Event_Set", event=event)
        assert done.wait(60)
        del kept


def test_a_pending_event_may_be_destroyed_first(api: Pjrt, client: Client) -> None:
    buffer = client.put(np.zeros(1000))
    event = api.call("PJRT_Buffer_ReadyEvent", buffer=buffer).event
    done = threading.Event()
    kept = api.on_ready(event, lambda _error: done.set())
    api.call("PJRT_Event_Destroy", event=event)
    assert done.wait(60)
    del kept


def test_device_event_cannot_be_set(api: Pjrt, client: Client) -> None:
    event = api.call("PJRT_Buffer_ReadyEvent", buffer=client.put(np.zeros(3))).event
    with pytest.raises(PjrtError, match="only an event from PJRT_Event_Create can be set"):
        api.call("PJRT_Event_Set", event=event)
    api.wait(event)


def test_callback_is_needed(api: Pjrt, event: Any) -> None:
    with pytest.raises(PjrtError, match="the callback is NULL"):
        api.call("PJRT_Event_OnReady", event=event)
