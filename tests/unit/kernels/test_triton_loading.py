"""Kernels that threads load at once, with Triton's own class of compiled kernels on a device that is not there."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel

from flagos_backend.kernels.triton import loading
from flagos_backend.kernels.triton.loading import prepare_triton


class Launcher:
    """Of the vendor's: each is the attribute of a module, and there is one module for all."""

    module: ClassVar[SimpleNamespace] = SimpleNamespace()

    def __init__(self, source: ASTSource, metadata: Any) -> None:
        self.module.launch = source.signature
        time.sleep(0.05)
        self.signature = self.module.launch


def load_binary(name: str, binary: bytes, shared: int, device: int) -> tuple[object, ...]:
    time.sleep(0.05)
    return SimpleNamespace(), f"handle of {name}", 16, 0, 1024


@triton.jit
def double(x, y):
    tl.store(y, tl.load(x) * 2)


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], CompiledKernel]]:
    """Compiles ``double`` for arrays of a type."""
    utilities = SimpleNamespace(
        load_binary=load_binary,
        unload_module=lambda module: None,
        get_device_properties=lambda device: {"max_shared_mem": 1 << 16},
    )
    driver = SimpleNamespace(
        get_current_device=lambda: 0,
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
        launcher_cls=Launcher,
        utils=utilities,
    )
    monkeypatch.setattr(type(triton.runtime.driver), "active", driver)
    kernels = []

    def compile_for(element: str) -> CompiledKernel:
        source = ASTSource(double, {"x": element, "y": element}, {})
        kernels.append(triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 1}))
        return kernels[-1]

    yield compile_for
    for kernel in kernels:
        kernel.module = None  # nothing to unload


def together(*calls: Any) -> list[Any]:
    barrier = threading.Barrier(len(calls))

    def run(call: Any) -> Any:
        barrier.wait()
        return call()

    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(run, calls))


def test_each_kernel_gets_its_own_launcher(compiled: Callable[[str], CompiledKernel]) -> None:
    prepare_triton()
    kernels = [compiled(element) for element in ("*fp32", "*fp16", "*i32", "*i64")]
    launchers = together(*(lambda kernel=kernel: kernel.run for kernel in kernels))
    assert [launcher.signature for launcher in launchers] == [kernel.src.signature for kernel in kernels]


def test_a_kernel_that_two_threads_ask_for_is_loaded_for_both(compiled: Callable[[str], CompiledKernel]) -> None:
    prepare_triton()
    kernel = compiled("*fp32")

    def ask(number: int) -> str:
        time.sleep(0.02 * number)
        return (kernel.run, kernel.function)[1]

    assert together(*(partial(ask, number) for number in range(5))) == ["handle of double"] * 5


@pytest.fixture
def unprepared(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As if nothing had been launched yet; Triton's own classes stay as they are."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(loading, "serialize", lambda compiled_kernel: None)
    monkeypatch.setattr(loading, "launchers", lambda: "nobody's")
    for function in (loading.prepare_triton, loading._prepare):
        function.cache_clear()
    yield
    for function in (loading.prepare_triton, loading._prepare):
        function.cache_clear()
    monkeypatch.undo()
    prepare_triton()


@pytest.mark.usefixtures("unprepared")
def test_threads_that_come_together_prepare_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of them would read half a gigabyte, and run a C compiler for the driver."""
    done: list[str] = []

    def slow(what: str) -> None:
        time.sleep(0.05)
        done.append(what)

    monkeypatch.setattr(loading, "_driver", lambda: slow("driver"))
    monkeypatch.setattr(loading, "_key", lambda: slow("key"))
    states = together(*(lambda: (prepare_triton(), [*done])[1] for _ in range(6)))
    assert states == [["driver", "key"]] * 6
    prepare_triton()
    assert done == ["driver", "key"]


@pytest.mark.usefixtures("unprepared")
def test_what_is_not_there_is_left_to_the_launch(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        raise RuntimeError("0 active drivers")

    keys: list[str] = []
    monkeypatch.setattr(loading, "_driver", fail)
    monkeypatch.setattr(loading, "_key", lambda: keys.append("key"))
    with caplog.at_level("DEBUG", "flagos_backend"):
        prepare_triton()
    assert "Triton's driver is not there ahead of the first kernel: 0 active drivers" in caplog.text
    assert keys == ["key"]


def test_the_key_is_what_triton_keys_its_cache_by() -> None:
    """It keeps what it found, so that compiling reads nothing again."""
    from triton.runtime import cache

    loading._key()
    known = cache.triton_key.cache_info()
    assert cache.triton_key() in triton.runtime.cache.get_cache_key(
        ASTSource(double, {"x": "*fp32", "y": "*fp32"}, {}),
        triton.compiler.make_backend(GPUTarget("cuda", 90, 32)),
        triton.compiler.make_backend(GPUTarget("cuda", 90, 32)).parse_options({}),
        {},
    )
    assert cache.triton_key.cache_info().misses == known.misses
