"""Events: set once by the host, awaited with and without a limit, listened to from any thread."""

from __future__ import annotations

import threading

import pytest

from plugin_abi.errors import FlagosStatusError, StatusCode
from plugin_abi.host import Context, ElementType, Memory


def test_an_event_completes_once(context: Context) -> None:
    event = context.create_event()
    assert event.query() == (False, None)
    event.set()
    assert event.query() == (True, None)
    event.wait()
    with pytest.raises(FlagosStatusError, match="was set before") as refused:
        event.set()
    assert refused.value.code == StatusCode.FAILED_PRECONDITION


def test_an_error_reaches_everybody(context: Context) -> None:
    event = context.create_event()
    heard: list[FlagosStatusError | None] = []
    event.on_ready(heard.append)
    event.set(FlagosStatusError(StatusCode.ABORTED, "no more"))
    event.on_ready(heard.append)
    ready, error = event.query()
    assert ready
    for seen in (error, *heard):
        assert seen is not None
        assert (seen.code, seen.message) == (StatusCode.ABORTED, "no more")
    with pytest.raises(FlagosStatusError, match="no more"):
        event.wait()


@pytest.mark.parametrize("timeout", [0.0, 0.01])
def test_waiting_ends_with_the_time_given(context: Context, timeout: float) -> None:
    event = context.create_event()
    with pytest.raises(FlagosStatusError) as late:
        event.wait(timeout)
    assert late.value.code == StatusCode.DEADLINE_EXCEEDED
    event.set()
    event.wait(timeout)


def test_a_waiting_thread_is_woken(context: Context) -> None:
    event = context.create_event()
    waiter = threading.Thread(target=event.wait)
    waiter.start()
    event.set()
    waiter.join(60)
    assert not waiter.is_alive()


def test_a_listener_outlives_the_event_handle(context: Context, memory: Memory) -> None:
    dependency = context.create_event()
    donated = memory.allocate((3,), ElementType.F32).donate(dependency)
    heard = threading.Event()
    ready = donated.ready_event()
    ready.on_ready(lambda error: heard.set() if error is None else None)
    ready.close()
    dependency.set()
    assert heard.wait(60)


def test_an_event_that_nobody_can_set_any_more_is_cancelled(context: Context, memory: Memory) -> None:
    dependency = context.create_event()
    donated = memory.allocate((3,), ElementType.F32).donate(dependency)
    dependency.close()
    with pytest.raises(FlagosStatusError) as cancelled:
        donated.wait(60)
    assert cancelled.value.code == StatusCode.CANCELLED


def test_events_of_the_backend_are_not_the_hosts_to_set(memory: Memory) -> None:
    with pytest.raises(FlagosStatusError, match="completed by the backend") as refused:
        memory.promise((3,), ElementType.F32).ready_event().set()
    assert refused.value.code == StatusCode.FAILED_PRECONDITION
