"""Programs that are launched often enough to be captured and replayed, against NumPy, with new arrays in new places."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from cpu.native.harness import add_one, compile, get, put, run
from plugin_abi.errors import FlagosStatusError
from plugin_abi.host import Artifact, Context, Executable, Memory
from support.accelerator_programs import KNOWN, LOOP, PROGRAM

RUNS = 8


def is_replayed(executable: Executable) -> bool:
    return "replayed as a graph" in executable.artifact(Artifact.EXPLANATION).decode()


def joined(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    exp = np.exp(x.astype(np.float64))
    product = exp @ y
    return np.concatenate([product / product.sum(1, keepdims=True), exp], 1)


# The loop's counter lies beside its array: what is next to a result must not be taken for a part of it.
@pytest.mark.parametrize(
    ("text", "shapes", "expected"),
    [
        (add_one(4096, donate=False), [(4096,)], lambda x: x + 1),
        (LOOP.replace("LIMIT", KNOWN).replace("f32[5]", "f32[3072]"), [(3072,)], lambda x: x * 2**7),
        (PROGRAM, [(8, 16), (16, 8)], joined),
    ],
    ids=["elementwise", "loop", "several kernels"],
)
def test_new_arrays_each_time(
    context: Context,
    memory: Memory,
    text: str,
    shapes: list[tuple[int, ...]],
    expected: Callable[..., np.ndarray],
    rng: np.random.Generator,
) -> None:
    executable = compile(context, text)
    kept = []
    for _ in range(RUNS):
        arrays = [rng.uniform(1, 2, shape).astype(np.float32) for shape in shapes]
        arguments = [put(memory, array) for array in arrays]
        (result,) = run(executable, *arguments)
        kept.append((arguments, result, expected(*arrays)))
    for _, result, wanted in kept:
        np.testing.assert_allclose(get(result), wanted, rtol=1e-5)
    assert is_replayed(executable), executable.artifact(Artifact.EXPLANATION).decode()


def test_the_same_arrays_each_time(context: Context, memory: Memory, rng: np.random.Generator) -> None:
    executable = compile(context, LOOP.replace("LIMIT", KNOWN).replace("f32[5]", "f32[3072]"))
    x = rng.standard_normal(3072).astype(np.float32)
    argument = put(memory, x)
    for _ in range(RUNS):
        np.testing.assert_array_equal(get(run(executable, argument)[0]), x * 2**7)
    assert is_replayed(executable)


def test_donated_arguments_go_round(context: Context, memory: Memory) -> None:
    executable = compile(context, add_one(1000))
    state = put(memory, np.zeros(1000, np.float32))
    address = state.pointer_address()
    for _ in range(RUNS):
        (state,) = run(executable, state)
    assert state.pointer_address() == address
    np.testing.assert_array_equal(get(state), np.full(1000, RUNS, np.float32))
    assert is_replayed(executable), executable.artifact(Artifact.EXPLANATION).decode()


def test_an_argument_that_is_held_is_kept(context: Context, memory: Memory) -> None:
    executable = compile(context, add_one(1000))
    for _ in range(RUNS):
        argument = put(memory, np.zeros(1000, np.float32))
        argument.hold(1)
        (result,) = run(executable, argument)
        np.testing.assert_array_equal(get(result), np.ones(1000, np.float32))


def test_memory_that_runs_out_comes_back(context: Context, memory: Memory) -> None:
    elements = context.devices[0].memory_stats().bytes_limit // 4 // 4 * 3
    text = f"""HloModule large
ENTRY main {{
  one = f32[] parameter(0)
  ROOT large = f32[{elements}] broadcast(one), dimensions={{}}
}}"""
    executable = compile(context, text)
    one = put(memory, np.ones((), np.float32))
    (first,) = run(executable, one)
    first.ready_event().wait()
    (second,) = run(executable, one)
    with pytest.raises(FlagosStatusError) as refused:
        second.ready_event().wait()
    assert refused.value.code == 8
    first.close()
    run(executable, one)[0].ready_event().wait()
