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
