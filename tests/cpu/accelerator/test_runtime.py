"""Devices, memory, copies, launches and plans of an accelerator, against NumPy."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from cpu.native.harness import ELEMENT_TYPE, add_one, compile, get, put, run
from flagos_backend.compile import accelerator_plan as plan
from flagos_backend.devices.simulated import SimulatedAccelerator
from flagos_backend.runtime.plan import Plan
from plugin_abi.errors import FlagosStatusError
from plugin_abi.host import Artifact, Context, ElementType, HostBufferSemantics, Memory
from support.accelerator_programs import KNOWN, LOOP, PROGRAM


def test_a_device_says_what_it_is(context: Context) -> None:
    assert [device.kind for device in context.devices] == ["simulated accelerator"] * 2
    device = context.devices[0]
    assert not device.is_host_memory
    assert [memory.kind for memory in device.memories] == ["device", "pinned_host", "unpinned_host"]
    assert device.attributes["vendor"] == "simulated"
    assert device.memory_stats().bytes_limit == device.attributes["memory_bytes"]


@pytest.mark.parametrize("dtype", ELEMENT_TYPE, ids=str)
@pytest.mark.parametrize("shape", [(), (0, 3), (7,), (3, 5), (300, 1100)], ids=str)
def test_arrays_come_back_as_they_went(
    memory: Memory, dtype: np.dtype, shape: tuple[int, ...], rng: np.random.Generator
) -> None:
    array = rng.integers(0, 2 if dtype.kind == "b" else 100, shape).astype(dtype)
    for view in (array, array.T, array[::-1] if shape else array):
        np.testing.assert_array_equal(get(put(memory, view)), view)


def test_copies_longer_than_a_piece_arrive_whole(memory: Memory, rng: np.random.Generator) -> None:
    array = rng.standard_normal((3, 1 << 20))
    buffer = put(memory, array, HostBufferSemantics.IMMUTABLE_UNTIL_TRANSFER)
    np.testing.assert_array_equal(get(buffer), array)
    np.testing.assert_array_equal(
        np.frombuffer(buffer.read_raw(8 << 20, 1 << 20)), array.reshape(-1)[1 << 20 : (1 << 20) + (1 << 17)]
    )


def test_copies_go_to_every_memory(context: Context, memory: Memory, rng: np.random.Generator) -> None:
    array = rng.standard_normal((40, 50)).astype(np.float32)
    source = put(memory, array)
    for target in context.memories:
        there = source.copy_to(target)
        assert there.memory == target
        np.testing.assert_array_equal(get(there.copy_to(memory)), array)


def test_memory_that_is_not_there_is_refused_and_nothing_breaks(context: Context, memory: Memory) -> None:
    limit = context.devices[0].memory_stats().bytes_limit
    with pytest.raises(FlagosStatusError, match=f"{limit + 1} bytes") as refused:
        memory.allocate((limit + 1,), ElementType.U8)
    assert refused.value.code == 8
    x = np.arange(6, dtype=np.float32)
    np.testing.assert_array_equal(get(run(compile(context, add_one(6)), put(memory, x))[0]), x + 1)


def test_what_kernels_prepare_is_in_the_order_of_what_computes(
    context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever compiles may have put another stream before the device's."""
    entered: list[bool] = []
    planned: list[bool] = []

    @contextlib.contextmanager
    def guard(self: SimulatedAccelerator) -> Iterator[None]:
        entered.append(True)
        yield
        entered.pop()

    def build(*arguments: Any) -> Plan:
        planned.append(bool(entered))
        return make(*arguments)

    make = plan.build
    monkeypatch.setattr(SimulatedAccelerator, "guard", guard)
    monkeypatch.setattr(plan, "build", build)
    compile(context, add_one(6))
    assert planned == [True] and not entered


def test_a_donated_argument_is_written_over(context: Context, memory: Memory) -> None:
    executable = compile(context, add_one(1000))
    x = np.arange(1000, dtype=np.float32)
    argument = put(memory, x)
    address = argument.pointer_address()
    (result,) = run(executable, argument)
    assert result.pointer_address() == address
    np.testing.assert_array_equal(get(result), x + 1)


def test_a_held_argument_is_not(context: Context, memory: Memory) -> None:
    executable = compile(context, add_one(1000))
    x = np.arange(1000, dtype=np.float32)
    argument = put(memory, x)
    argument.hold(1)
    (result,) = run(executable, argument)
    np.testing.assert_array_equal(get(result), x + 1)


def test_a_program_runs_as_generated_and_library_kernels(
    context: Context, memory: Memory, rng: np.random.Generator
) -> None:
    x, y = rng.standard_normal((8, 16)).astype(np.float32), rng.uniform(1, 2, (16, 8)).astype(np.float32)
    executable = compile(context, PROGRAM)
    (result,) = run(executable, put(memory, x), put(memory, y))
    exp = np.exp(x.astype(np.float64))
    product = exp @ y
    expected = np.concatenate([product / product.sum(1, keepdims=True), exp], 1)
    np.testing.assert_allclose(get(result), expected, rtol=1e-5)
    text = executable.artifact(Artifact.EXPLANATION).decode()
    assert "triton " in text
    assert "dot(" in text and "reference" in text


# While the first element is below 100: how often is not known before it runs.
UNKNOWN = """x = f32[5] get-tuple-element(state), index=1
  first = f32[1] slice(x), slice={[0:1]}
  scalar = f32[] reshape(first)
  hundred = f32[] constant(100)
  small = pred[] compare(scalar, hundred), direction=LT
  seven = s32[] constant(2147483647)
  none = s32[] constant(0)
  limit = s32[] select(small, seven, none)"""


@pytest.mark.parametrize(("limit", "iterations"), [(KNOWN, 7), (UNKNOWN, 7)], ids=["known", "unknown"])
def test_loops(context: Context, memory: Memory, limit: str, iterations: int) -> None:
    x = np.array([1, -2, 0.5, np.inf, 3], np.float32)
    (result,) = run(compile(context, LOOP.replace("LIMIT", limit)), put(memory, x))
    np.testing.assert_array_equal(get(result), x * 2**iterations)


REDUCE = """
add { a = f32[] parameter(0) b = f32[] parameter(1) ROOT sum = f32[] add(a, b) }
ENTRY main {
  x = f32[3] parameter(0)
  ROOT y = f32[3] all-reduce(x), channel_id=1, replica_groups={{0,1}}, use_global_device_ids=true, to_apply=add
}"""


def test_devices_meet_in_a_collective(context: Context) -> None:
    executable = compile(context, REDUCE, num_partitions=2, device_assignment=[0, 1])
    arrays = [np.arange(3, dtype=np.float32) + 10 * n for n in range(2)]
    arguments = [[put(device.default_memory, array)] for device, array in zip(context.devices, arrays, strict=True)]
    outputs, _ = executable.execute(arguments)
    for (output,) in outputs:
        np.testing.assert_array_equal(get(output), sum(arrays))


def test_an_error_of_a_launch_comes_with_its_results(context: Context, memory: Memory) -> None:
    x = put(memory, np.ones(6, np.float32))
    failed = memory.promise((6,), ElementType.F32, ValueError("broken before"))
    (result,) = run(compile(context, add_one(6, donate=False)), failed)
    with pytest.raises(FlagosStatusError, match="broken before"):
        get(result)
    np.testing.assert_array_equal(get(run(compile(context, add_one(6)), x)[0]), np.full(6, 2, np.float32))
