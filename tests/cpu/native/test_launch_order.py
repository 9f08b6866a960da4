"""Launches run in the order in which they were dispatched, and the host does not run far ahead of them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest

from cpu.native.harness import LOOP, add_one, compile, get, put, run
from plugin_abi.errors import FlagosStatusError, StatusCode
from plugin_abi.host import Buffer, Context, ElementType, Event, Executable, HostArray
from plugin_abi.loader import Backend
from support.native_programs import ALL_REDUCE, CALLBACK

# As LOOP, over three devices that meet at the end: dispatch returns long before it is done.
MEET = LOOP.replace(
    "HloModule loop", "HloModule meet\nadd { a = f32[] parameter(0)  b = f32[] parameter(1)  ROOT c = f32[] add(a, b) }"
).replace(
    "ROOT y = f32[64,64] get-tuple-element(final), index=2",
    "y = f32[64,64] get-tuple-element(final), index=2\n  ROOT sum = f32[64,64] all-reduce(y), "
    "replica_groups={{0,1,2}}, use_global_device_ids=true, channel_id=1, to_apply=add",
)
TIMEOUT = 60


class Log:
    """Who was done, in order. Whoever waits for an event may hear of it before its listeners do."""

    def __init__(self) -> None:
        self._names: list[str] = []
        self._changed = threading.Condition()

    def add(self, name: str) -> Callable[[object], None]:
        def listener(_error: object) -> None:
            with self._changed:
                self._names.append(name)
                self._changed.notify_all()

        return listener

    def first(self, count: int) -> list[str]:
        with self._changed:
            self._changed.wait_for(lambda: len(self._names) >= count, TIMEOUT)
            return self._names


def square(value: float) -> np.ndarray:
    return np.full((64, 64), value, np.float32)


@pytest.fixture
def narrow(backend: Backend) -> Iterator[Context]:
    """At most two launches are in flight on each device."""
    with Context(backend, {"run_ahead_launches": 2}) as context:
        yield context


def launch(executable: Executable, *arguments: Buffer) -> tuple[Buffer, Event]:
    outputs, done = executable.execute([arguments])
    return outputs[0][0], done[0]


def test_a_consumer_runs_before_what_was_dispatched_after_it(context: Context) -> None:
    executable = compile(context, LOOP)
    x = put(context.devices[0].default_memory, square(3))
    log = Log()
    for number in range(4):
        # The corner of its argument is how often the loop runs, in thousands: the consumer is short.
        producer, _ = launch(executable, x)
        consumer, _ = launch(executable, producer)
        producer.ready_event().on_ready(log.add(f"producer {number}"))
        consumer.ready_event().on_ready(log.add(f"consumer {number}"))
    assert log.first(8) == [f"{role} {number}" for number in range(4) for role in ("producer", "consumer")]


def test_a_consumer_over_several_devices_runs_before_what_was_dispatched_after_it(context: Context) -> None:
    executable = compile(context, MEET, num_partitions=3, device_assignment=[0, 1, 2])
    x = [[put(d.default_memory, square(3))] for d in executable.describe().devices]
    log = Log()
    for number in range(4):
        producer, _ = executable.execute(x)
        consumer, _ = executable.execute(producer)
        producer[0][0].ready_event().on_ready(log.add(f"producer {number}"))
        consumer[0][0].ready_event().on_ready(log.add(f"consumer {number}"))
    assert log.first(8) == [f"{role} {number}" for number in range(4) for role in ("producer", "consumer")]


def test_who_waited_for_the_host_comes_before_what_was_dispatched_later(context: Context) -> None:
    memory = context.devices[0].default_memory
    executable = compile(context, LOOP)
    x, promise = put(memory, square(200)), memory.promise((64, 64), ElementType.F32)
    log = Log()
    running, _ = launch(executable, x)
    waiting, _ = launch(executable, promise)
    later = [launch(executable, x)[0] for _ in range(3)]
    waiting.ready_event().on_ready(log.add("waiting"))
    for number, output in enumerate(later):
        output.ready_event().on_ready(log.add(f"later {number}"))
    promise.fulfill(put(memory, square(0)))
    for output in (running, waiting, *later):
        output.wait(TIMEOUT)
    assert log.first(4) == ["waiting", "later 0", "later 1", "later 2"]


def test_launches_over_several_devices_that_waited_keep_one_order_on_all(context: Context) -> None:
    """Launches over two and over three devices that wait for promises: they begin in one order on every device."""
    three = compile(context, ALL_REDUCE, num_partitions=3, device_assignment=[0, 1, 2])
    two = compile(context, ALL_REDUCE.replace("{0,1,2}", "{0,1}"), num_partitions=2, device_assignment=[1, 2])
    one = compile(context, add_one(4, donate=False))
    devices = context.devices
    for number in range(40):
        promises = [device.default_memory.promise((4,), ElementType.F32) for device in devices]
        ones = [put(device.default_memory, np.ones(4, np.float32)) for device in devices]
        outputs: list[Sequence[Sequence[Buffer]]] = []
        for step in range(4):
            inputs = [promises[i] if (step + number) % 3 == i else ones[i] for i in range(3)]
            outputs.append(three.execute([[x] for x in inputs])[0])
            outputs.append(two.execute([[x] for x in inputs[1:]])[0])
            outputs.append(one.execute([[inputs[step % 3]]], device=devices[step % 3])[0])
        for i in np.random.default_rng(number).permutation(3):
            promises[i].fulfill(ones[i])
        for launch_outputs in outputs:
            expected = len(launch_outputs) if len(launch_outputs) > 1 else 2
            for (output,) in launch_outputs:
                output.wait(TIMEOUT)
                assert get(output).tolist() == [expected] * 4


def test_a_failed_producer_fails_its_consumers_and_nobody_else(context: Context) -> None:
    memory = context.devices[0].default_memory
    executable, other = compile(context, LOOP), compile(context, add_one(64 * 64, donate=False))
    busy, _ = launch(executable, put(memory, square(10)))
    bad = memory.promise((64, 64), ElementType.F32)
    failed, _ = launch(executable, bad)
    after, _ = launch(executable, failed)
    fine, _ = launch(other, put(memory, np.zeros(64 * 64, np.float32)))
    bad.fulfill(None, FlagosStatusError(StatusCode.DATA_LOSS, "lost on the way"))
    for output in (failed, after):
        with pytest.raises(FlagosStatusError, match="lost on the way"):
            output.wait(TIMEOUT)
    busy.wait(TIMEOUT)
    assert get(fine).tolist() == [1] * (64 * 64)


def test_the_caller_waits_where_too_many_launches_are_in_flight(narrow: Context) -> None:
    memory = narrow.devices[0].default_memory
    executable = compile(narrow, LOOP)
    x = put(memory, square(5))
    outputs: list[Buffer] = []
    for _ in range(8):
        outputs.append(launch(executable, x)[0])
        assert sum(not output.ready_event().query()[0] for output in outputs) <= 2
    for output in outputs:
        output.wait(TIMEOUT)


def test_the_caller_waits_where_launches_hold_too_many_bytes(backend: Backend) -> None:
    with Context(backend, {"run_ahead_bytes": 0}) as context:
        memory = context.devices[0].default_memory
        executable = compile(context, LOOP)
        outputs: list[Buffer] = []
        for _ in range(10):
            outputs.append(launch(executable, put(memory, square(5)))[0])
            assert sum(not output.ready_event().query()[0] for output in outputs) <= 4
        for output in outputs:
            output.wait(TIMEOUT)


def test_the_caller_may_dispatch_what_launches_in_flight_wait_for(narrow: Context) -> None:
    """Everything in flight waits for a promise that the caller keeps after more launches than the bound allows."""
    memory = narrow.devices[0].default_memory
    executable = compile(narrow, add_one(4, donate=False))
    promise = memory.promise((4,), ElementType.F32)
    outputs = [run(executable, promise)[0] for _ in range(5)]
    promise.fulfill(run(executable, put(memory, np.zeros(4, np.float32)))[0])
    for output in outputs:
        output.wait(TIMEOUT)
        assert get(output).tolist() == [2] * 4


def test_a_callback_may_wait_for_launches_of_other_threads(backend: Backend) -> None:
    """The thread that the callback waits for is held back by the bound while the callback's own launch is in flight."""
    results: list[list[float]] = []

    def callback(_identifier: int, _arguments: Sequence[HostArray], outputs: Sequence[HostArray]) -> None:
        def work() -> None:
            x = put(context.devices[0].default_memory, np.zeros(3, np.float32))
            for _ in range(6):
                (x,) = run(inner, x)
            results.append(get(x).tolist())

        thread = threading.Thread(target=work)
        thread.start()
        thread.join(TIMEOUT)
        outputs[0].data[:] = bytes(12)

    with Context(backend, {"run_ahead_launches": 1}, host_callback=callback) as context:
        memory = context.devices[0].default_memory
        inner, outer = compile(context, add_one(3, donate=False)), compile(context, CALLBACK)
        for _ in range(2):
            run(outer, put(memory, np.ones(3, np.float32)), put(memory, np.array(1, np.uint8)))[0].wait(TIMEOUT)
    assert results == [[6, 6, 6]] * 2


@pytest.mark.parametrize(("name", "value"), [("run_ahead_launches", 0), ("run_ahead_bytes", -1)])
def test_bounds_are_checked(backend: Backend, name: str, value: int) -> None:
    with pytest.raises(FlagosStatusError, match=f"the option '{name}' is '{value}'"):
        Context(backend, {name: value})
