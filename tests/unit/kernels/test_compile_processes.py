"""Kernels that other processes compile for this one, for a chip that is not there."""

from __future__ import annotations

import logging
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.compiler import ASTSource, CompilationError

from flagos_backend.codegen.triton import sources
from flagos_backend.devices.target import HOPPER, HOST
from flagos_backend.kernels.triton import compile_processes, compile_server, launching, swaps_kernels
from flagos_backend.process import interrupts

H100 = ("cuda", 90, 32)
SOURCE = """import triton
import triton.language as tl
from flagos_backend.codegen.triton import formulas as fm


@triton.jit
def kernel(source, target):
    number = tl.arange(0, 128)
    tl.store(target + number, {})
"""


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[str]]:
    """With empty caches and processes of its own: the stages of kernels that this process compiles."""
    stages: list[str] = []
    add_stages = CUDABackend.add_stages

    def counted(self: Any, table: dict[str, Any], *arguments: Any) -> None:
        add_stages(self, table, *arguments)
        first = table["ttir"]
        table["ttir"] = lambda *given: (stages.append("ttir"), first(*given))[1]

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv(compile_processes.PROCESSES, "2")
    monkeypatch.setattr(CUDABackend, "add_stages", counted)
    monkeypatch.setattr(compile_processes, "_state", compile_processes._State())
    monkeypatch.setattr(triton.compiler, "compile", triton.compiler.compile)
    compile_processes.install(triton.compiler)
    yield stages
    processes = compile_processes._state.processes
    if processes is not None:
        processes.end()


def source_of(expression: str) -> ASTSource:
    function = sources.load(SOURCE.format(expression)).kernel
    aligned = {(number,): [["tt.divisibility", 16]] for number in range(2)}
    return ASTSource(function, {"source": "*fp32", "target": "*fp32"}, {}, aligned)


def fresh(expression: str = "fm.negate(tl.load(source + number)) + {}") -> ASTSource:
    return source_of(expression.format(random.SystemRandom().random()))


def compile_ahead(source: ASTSource, kernels: int = 3) -> Any:
    with compile_processes.many(kernels), compile_processes.ahead():
        return triton.compiler.compile(source, target=GPUTarget(*H100), options={"num_warps": 2})


def test_a_process_compiles_what_this_one_would(
    here: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    source = fresh()
    kernel = compile_ahead(source)
    assert not here
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "other"))
    own = triton.compile(source, target=GPUTarget(*H100), options={"num_warps": 2})
    assert here == ["ttir"]
    assert kernel.asm["cubin"] == own.asm["cubin"]
    assert kernel.hash == own.hash


def test_names_do_not_go_by_the_order_of_kernels(here: list[str], tmp_path: Path) -> None:
    """Triton 3.6 and 3.7 take constants that a function reads into its callers' names, once it has its own."""
    text = """import triton
import triton.language as tl

SHARED = tl.constexpr(0.5)


@triton.jit
def shared(x):
    return x * SHARED


@triton.jit
def first(source):
    tl.store(source, shared(tl.load(source)))


@triton.jit
def second(source):
    tl.store(source, shared(tl.load(source)) + 1)
"""
    names = []
    for number, order in enumerate((("first", "second"), ("second", "first"))):
        file = tmp_path / f"order{number}.py"
        file.write_text(text)
        module = compile_server._load(f"order{number}", str(file))
        names.append({function: getattr(module, function).cache_key for function in order})
    assert names[0] == names[1]


def test_more_threads_than_processes_share_them(here: list[str]) -> None:
    found: dict[int, Any] = {}
    threads = [
        threading.Thread(target=lambda n=n: found.update({n: compile_ahead(fresh())}))  # type: ignore[misc]
        for n in range(5)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({kernel.hash for kernel in found.values()}) == 5
    assert not here
    processes = compile_processes._state.processes
    assert processes is not None
    assert len(processes._idle) <= 2


def test_kernels_of_modules_are_found_by_name(here: list[str]) -> None:
    """Those of ours that are not generated, with a constant."""
    signature = {"pivots": "*i32", "order": "*i32", "SWAPS": "i32", "ROWS": "i32", "BLOCK": "constexpr"}
    source = ASTSource(swaps_kernels.compose_swaps, signature, {(4,): 128}, {})
    assert compile_ahead(source).asm["cubin"]
    assert not here


def test_a_kept_kernel_starts_no_process(here: list[str]) -> None:
    source = fresh()
    triton.compile(source, target=GPUTarget(*H100), options={"num_warps": 2})
    compile_ahead(source)
    assert here == ["ttir"]
    assert compile_processes._state.processes is None


@pytest.mark.parametrize("kernels", [1, 2])
def test_few_kernels_are_compiled_in_threads(here: list[str], kernels: int) -> None:
    compile_ahead(fresh(), kernels)
    assert here == ["ttir"]
    assert compile_processes._state.processes is None


def test_what_launches_compile_is_not_ahead(here: list[str]) -> None:
    with compile_processes.many(9):
        triton.compiler.compile(fresh(), target=GPUTarget(*H100), options={})
    assert here == ["ttir"]


def test_an_error_is_this_process_own(here: list[str]) -> None:
    with pytest.raises(CompilationError, match="no_such_function"):
        compile_ahead(fresh("fm.no_such_function({})"))
    compile_ahead(fresh())
    assert not here, "the process goes on"


def running(processes: compile_processes.Processes) -> list[int]:
    return [process.number for process in processes._idle]


def is_there(number: int) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False


def wait_until(condition: Callable[[], bool]) -> None:
    limit = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.02)


def test_what_a_process_does_not_answer_is_compiled_here(here: list[str], caplog: pytest.LogCaptureFixture) -> None:
    compile_ahead(fresh())
    processes = compile_processes._state.processes
    assert processes is not None
    (number,) = running(processes)
    os.kill(number, signal.SIGSTOP)  # it takes the next one, and does not begin
    waiting = threading.Thread(target=lambda: compile_ahead(fresh()))
    with caplog.at_level(logging.WARNING, "flagos_backend"):
        waiting.start()
        wait_until(lambda: bool(processes._busy))
        processes._server.kill()
        waiting.join()
        compile_ahead(fresh())
        compile_ahead(fresh())
    assert len(here) == 3
    assert caplog.text.count("kernels are compiled in this process, by threads: the process that starts others") == 1


def test_a_process_that_ended_is_followed_by_another(here: list[str]) -> None:
    compile_ahead(fresh())
    processes = compile_processes._state.processes
    assert processes is not None
    (number,) = running(processes)
    os.kill(number, signal.SIGKILL)
    wait_until(lambda: not is_there(number))
    compile_ahead(fresh())
    assert not here
    assert running(processes) != [number]


def test_idle_processes_end_and_come_again(here: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_processes, "_IDLE_SECONDS", 0.05)
    compile_ahead(fresh())
    first = compile_processes._state.processes
    assert first is not None
    wait_until(lambda: not first.alive)
    monkeypatch.setattr(compile_processes, "_IDLE_SECONDS", 30.0)
    compile_ahead(fresh())
    assert not here
    assert compile_processes._state.processes is not first


def test_an_interrupt_ends_what_its_threads_wait_for(here: list[str]) -> None:
    compile_ahead(fresh())
    processes = compile_processes._state.processes
    assert processes is not None
    (number,) = running(processes)
    os.kill(number, signal.SIGSTOP)
    errors: list[BaseException] = []

    def work() -> None:
        try:
            compile_ahead(fresh())
        except compile_processes.CompileEnded as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    wait_until(lambda: bool(processes._busy))
    interrupts.end_children([thread])
    thread.join(60)
    assert len(errors) == 1
    assert not here
    wait_until(lambda: not is_there(number))
    compile_ahead(fresh())
    assert not here, "others go on"


def test_a_forked_process_leaves_them_alone(here: list[str]) -> None:
    compile_ahead(fresh())
    processes = compile_processes._state.processes
    assert processes is not None
    child = os.fork()
    if not child:
        os._exit(3 if compile_processes._state.processes is None else 4)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
    compile_ahead(fresh())
    assert not here
    assert compile_processes._state.processes is processes


_STARTS = """
import ctypes, os, signal, sys, time
from flagos_backend.kernels.triton import compile_processes
processes = compile_processes.start(("cuda", 90, 32))
process = processes._begin()
print(processes._server.pid, process.connection.recv(), flush=True)
"""


@pytest.mark.parametrize(
    "end",
    [
        "os.kill(os.getpid(), signal.SIGKILL)",
        "os._exit(0)",
        "sys.exit(0)",
        "ctypes.PyDLL(None).fork() or time.sleep(60); os._exit(0)",
    ],
)
def test_they_end_with_their_process(end: str) -> None:
    """However it ends; the last has a child that holds its sockets and that Python does not know of."""
    environment = os.environ | {compile_processes.PROCESSES: "1"}
    started = subprocess.Popen(
        [sys.executable, "-c", _STARTS + end], env=environment, stdout=subprocess.PIPE, text=True
    )
    assert started.stdout is not None
    numbers = [int(word) for word in started.stdout.readline().split()]
    assert len(numbers) == 2
    started.wait(60)
    wait_until(lambda: not any(map(is_there, numbers)))


def test_their_number(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(compile_processes, "_available_memory", lambda: 5 << 30)
    for processors, expected in ((1, 0), (3, 0), (4, 4), (16, 10)):
        monkeypatch.setattr(os, "sched_getaffinity", lambda process, count=processors: set(range(count)))
        monkeypatch.delenv(compile_processes.PROCESSES, raising=False)
        assert compile_processes.size() == expected
        monkeypatch.setenv(compile_processes.PROCESSES, "3")
        assert compile_processes.size() == 3
    monkeypatch.setenv(compile_processes.PROCESSES, "many")
    assert compile_processes.size() == 10
    assert "is 'many', not a number of processes" in caplog.text


def test_none_where_none_are_wanted(here: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(compile_processes.PROCESSES, "0")
    compile_ahead(fresh())
    assert here == ["ttir"]
    assert compile_processes.start(H100) is None


def test_none_where_none_can_start(
    here: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(compile_processes, "python_program", lambda: None)
    for _ in range(2):
        compile_ahead(fresh())
    assert here == ["ttir", "ttir"]
    assert caplog.text.count("there is no Python to start") == 1


def test_a_server_that_cannot_begin_says_why(
    here: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if not Path(entry, "triton").is_dir()])
    compile_ahead(fresh())
    assert here == ["ttir"]
    assert "ModuleNotFoundError: No module named 'triton'" in caplog.text


def test_kernels_that_are_compiled_ahead_come_from_processes(here: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Through Triton's own functions, which know the driver of a device that is not there."""
    driver = SimpleNamespace(
        get_current_device=lambda: 0,
        get_current_stream=lambda device: 0,
        get_current_target=lambda: GPUTarget(*H100),
        launcher_cls=lambda source, metadata: None,
        utils=SimpleNamespace(
            load_binary=lambda name, binary, shared, device: (None, len(binary), 16, 0, 1024),
            unload_module=lambda module: None,
            get_device_properties=lambda device: {"max_shared_mem": 1 << 16},
        ),
    )
    monkeypatch.setattr(type(triton.runtime.driver), "active", driver)
    monkeypatch.setattr(launching, "prepare_triton", lambda: None)
    function = fresh().fn
    with compile_processes.many(3):
        launching.compile_only(function, (1, 1, 1), [torch.float32, torch.float16], {"num_warps": 2})
    ((compiled,),) = (caches[0].values() for caches in function.device_caches.values())
    assert compiled.function == len(compiled.asm["cubin"])
    assert not here
    assert not compile_processes._state.ahead.now


def test_where_processes_were_not_tried_none_are_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another backend; or a Triton without what is read, as vendors have of their own."""
    source = fresh()
    assert compile_processes._request(source, GPUTarget(*H100), {})
    assert not compile_processes._request(source, GPUTarget("hip", "gfx942", 64), {})
    monkeypatch.delattr(triton, "knobs")
    monkeypatch.setitem(sys.modules, "triton.knobs", None)
    assert not compile_processes._request(source, GPUTarget(*H100), {})


def test_targets_as_triton_names_them() -> None:
    assert HOPPER.triton_target == H100
    assert HOST.triton_target is None
