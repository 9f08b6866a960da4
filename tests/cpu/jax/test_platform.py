"""The platform as JAX programs see it: devices, memories, transfers, donation, analyses, profiler, bad input."""

from __future__ import annotations

import gc
import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

from flagos_backend.frontends.jax import jax_internals, registration

Array = np.ndarray


def test_flagos_is_the_default_device_when_it_is_named_first(device: jax.Device) -> None:
    assert jax.default_backend() == "flagos"
    assert jnp.zeros(3).devices() == {device}
    assert (device.platform, device.process_index, device.id) == ("flagos", 0, 0)


def test_a_host_device_comes_after_jax_s_cpu_where_nobody_names_it() -> None:
    registrations = jax_internals.lookup("jax._src.xla_bridge", "_backend_factories")
    assert registrations["flagos"].priority == registration.HOST_PRIORITY < registrations["cpu"].priority
    assert registrations["cpu"].priority < registration.ACCELERATOR_PRIORITY


def test_a_client_that_fails_leaves_jax_s_other_platforms_alone() -> None:
    found = jax_internals.lookup("jax._src.xla_bridge", "_backend_factories")["flagos"]
    assert found.fail_quietly
    assert not found.experimental


def test_jax_default_device_chooses_flagos(device: jax.Device, cpu: jax.Device) -> None:
    with jax.default_device(cpu):
        assert (jnp.ones(2) + 1).devices() == {cpu}
    with jax.default_device(device):
        assert (jnp.ones(2) + 1).devices() == {device}


@pytest.mark.parametrize(
    "dtype", ["bool", "int8", "uint16", "int32", "bfloat16", "float16", "float32", "complex64", "int4"]
)
@pytest.mark.parametrize("shape", [(), (3,), (2, 0, 4), (5, 7)], ids=str)
def test_round_trip(device: jax.Device, rng: np.random.Generator, dtype: str, shape: tuple[int, ...]) -> None:
    given = np.asarray(rng.integers(0, 2, shape)).astype(jnp.dtype(dtype))
    back = np.asarray(jax.device_put(given, device))
    assert back.dtype == given.dtype
    np.testing.assert_array_equal(back, given)


@pytest.mark.parametrize("view", [np.s_[::2], np.s_[::-1], np.s_[:, 1:3]], ids=["step", "reversed", "columns"])
def test_strided_arrays_arrive(device: jax.Device, rng: np.random.Generator, view: Any) -> None:
    given = rng.standard_normal((6, 4)).astype(np.float32)[view]
    np.testing.assert_array_equal(np.asarray(jax.device_put(given, device)), given)
    np.testing.assert_array_equal(np.asarray(jax.device_put(given.T, device)), given.T)


def test_copies_between_platforms(device: jax.Device, cpu: jax.Device, rng: np.random.Generator) -> None:
    given = rng.standard_normal(1000).astype(np.float32)
    there = jax.device_put(jax.device_put(given, cpu), device)
    back = jax.device_put(there + 0, cpu)
    assert (there.devices(), back.devices()) == ({device}, {cpu})
    np.testing.assert_array_equal(np.asarray(back), given)


@pytest.mark.parametrize("kind", ["pinned_host", "unpinned_host", "device"])
def test_memory_kinds(device: jax.Device, kind: str) -> None:
    if kind not in {memory.kind for memory in device.addressable_memories()}:
        pytest.fail(f"the device has no memory {kind}")
    there = jax.device_put(np.arange(4.0, dtype=np.float32), SingleDeviceSharding(device, memory_kind=kind))
    assert there.sharding.memory_kind == kind
    np.testing.assert_array_equal(np.asarray(there), np.arange(4.0))


def test_outputs_go_to_the_memory_that_is_asked_for(device: jax.Device) -> None:
    host = SingleDeviceSharding(device, memory_kind="pinned_host")
    result = jax.jit(lambda x: x * 2, out_shardings=host)(jnp.arange(3.0))
    assert result.sharding.memory_kind == "pinned_host"
    np.testing.assert_array_equal(np.asarray(result), [0, 2, 4])


# ---- Donation ------------------------------------------------------------------------------------------------------


def test_a_donated_argument_is_gone() -> None:
    x = jnp.arange(1024.0) + 0
    y = jax.jit(lambda x: x * 2, donate_argnums=0)(x)
    assert x.is_deleted()
    np.testing.assert_array_equal(np.asarray(y), np.arange(1024) * 2)


def test_a_donated_argument_cannot_be_used_again() -> None:
    double = jax.jit(lambda x: x * 2, donate_argnums=0)
    x = jnp.ones(4) + 0
    double(x)
    with pytest.raises((RuntimeError, ValueError), match=r"deleted|donated"):
        double(x)


def test_an_argument_given_twice_is_not_donated_under_the_other() -> None:
    x = jnp.ones(4) + 0
    with pytest.raises(Exception, match="donate"):
        jax.jit(lambda a, b: (a * 2, b + 1), donate_argnums=0)(x, x).block_until_ready()


# ---- What a compiled program says of itself ------------------------------------------------------------------------


@pytest.fixture
def compiled() -> Any:
    return jax.jit(lambda x, y: jnp.tanh(x @ y)).lower(jnp.ones((8, 16)), jnp.ones((16, 4))).compile()


def test_cost_analysis(compiled: Any) -> None:
    cost = compiled.cost_analysis()
    assert cost["flops"] >= 2 * 8 * 16 * 4
    assert cost["bytes accessed"] > 0


def test_memory_analysis(compiled: Any) -> None:
    memory = compiled.memory_analysis()
    assert memory.argument_size_in_bytes == 4 * (8 * 16 + 16 * 4)
    assert memory.output_size_in_bytes == 4 * 8 * 4


def test_as_text(compiled: Any) -> None:
    assert "HloModule" in compiled.as_text()
    assert "f32[8,4]" in compiled.as_text()


def test_memory_stats(device: jax.Device) -> None:
    before = device.memory_stats()["bytes_in_use"]
    held = jnp.zeros(1 << 20).block_until_ready()
    assert device.memory_stats()["bytes_in_use"] >= before + (4 << 20)
    held.delete()
    assert device.memory_stats()["bytes_in_use"] < before + (4 << 20)


def test_profiler(tmp_path: Path) -> None:
    with jax.profiler.trace(str(tmp_path)):
        jax.jit(jnp.sin)(jnp.ones(8)).block_until_ready()
    assert list(tmp_path.rglob("*.xplane.pb"))


# ---- Bad input, and life after it ----------------------------------------------------------------------------------


def bad_option(x: jax.Array) -> Any:
    return jax.jit(jnp.sin).lower(x).compile({"fastest": True})


def bad_layout(x: jax.Array) -> Any:
    layout = jax.experimental.layout.Layout((1, 0))
    sharding = jax.experimental.layout.Format(layout, SingleDeviceSharding(next(iter(x.devices()))))
    return jax.jit(jnp.sin, in_shardings=sharding).lower(jax.ShapeDtypeStruct((4, 4), jnp.float32)).compile()


def unknown_custom_call(x: jax.Array) -> Any:
    return jax.jit(jax.ffi.ffi_call("no_such_target", jax.ShapeDtypeStruct(x.shape, x.dtype)))(x)


def jacobi(x: jax.Array) -> Any:
    return jax.lax.linalg.eigh(x, implementation=jax.lax.linalg.EighImplementation.JACOBI)


@pytest.mark.parametrize(
    ("program", "message"),
    [
        (bad_option, "No such compile option: 'fastest'"),
        (bad_layout, "layout"),
        (unknown_custom_call, "no_such_target"),
        (jacobi, "JACOBI"),
    ],
)
def test_bad_input_is_named_and_later_calls_are_unharmed(program: Callable[..., Any], message: str) -> None:
    x = jnp.eye(4)
    with pytest.raises(Exception, match=message):
        jax.block_until_ready(program(x))
    np.testing.assert_array_equal(np.asarray(jax.jit(lambda x: x + 1)(x)), np.eye(4) + 1)


def test_programs_compile_and_run_in_several_threads() -> None:
    results: dict[int, Array] = {}

    def work(n: int) -> None:
        for _ in range(5):
            results[n] = np.asarray(jax.jit(lambda x: jnp.cumsum(x) * n)(jnp.arange(16.0)))

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for n in range(8):
        np.testing.assert_array_equal(results[n], np.cumsum(np.arange(16.0)) * n)


@pytest.mark.skipif(os.environ["FLAGOS_DEVICE"] != "cpu", reason="uploads read the caller's array after the call")
@pytest.mark.parametrize("busy", [False, True])
@pytest.mark.parametrize(
    "copied",
    [jnp.array, lambda a: jnp.array(a, jnp.bfloat16), lambda a: jnp.array(a, ndmin=4)],
    ids=["alike", "converted", "reshaped"],
)
def test_a_copy_does_not_follow_the_array_it_is_of(
    copied: Callable[[Array], jax.Array], busy: bool, device: jax.Device, rng: np.random.Generator
) -> None:
    """Callers fill the array anew as soon as they have the copy, also while the device is at work."""
    square = jax.device_put(rng.standard_normal((400, 400)).astype(np.float32), device)
    work = jax.jit(lambda x: jax.lax.fori_loop(0, 30, lambda _, y: jnp.tanh(y @ y), x))
    work(square).block_until_ready()
    for _ in range(5):
        array = rng.standard_normal((1500, 1001)).astype(np.float32)
        wanted = np.asarray(copied(array.copy()))
        if busy:
            work(square)
        copy = copied(array)
        array[:] = 0
        np.testing.assert_array_equal(np.asarray(copy), wanted)


def test_compiling_leaves_no_reference_cycles() -> None:
    def program(x: jax.Array) -> Any:
        looped, sums = jax.lax.scan(lambda c, row: (jnp.tanh(c + row), c.sum()), x[0], x)
        return looped, sums, jnp.sort(x), x @ x.T, x.at[jnp.array([1, 0])].add(2.0)

    jax.jit(program)(np.ones((2, 5), np.float32))  # imports leave some
    lowered = jax.jit(program).lower(np.ones((3, 4), np.float32))
    gc.collect()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        lowered.compile()(np.ones((3, 4), np.float32))
        gc.collect()
        assert gc.garbage == []
    finally:
        gc.set_debug(0)
        gc.garbage.clear()


def test_nothing_is_said_above_info(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        jax.jit(lambda x: x * 3)(jnp.ones(3)).block_until_ready()
    assert not [r for r in caplog.records if r.levelno > logging.INFO and r.name.startswith("flagos")]
