"""Compiles Triton kernels in processes, one for each processor, where threads would share the interpreter's lock for a
quarter of the work. loading.py has Triton ask here; compile_server.py is the other side.

What goes over is where a function is, and what Triton's compile is given; what comes back is an entry of Triton's own
cache, from which this process then takes the kernel as if it had been there before. So nothing depends on a process:
what none of them can compile, or names differently, is compiled here.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

import flagos_backend
from flagos_backend.kernels.triton import compile_server
from flagos_backend.process import interrupts
from plugin_abi import ending
from plugin_abi.trial import python_program

logger = logging.getLogger("flagos_backend")

#: How many processes compile; 0 for none.
PROCESSES: Final = "FLAGOS_COMPILE_PROCESSES"
#: Where there are fewer processors, threads wait little for the lock, and a second process to start takes one of them.
_MIN_PROCESSORS: Final = 4
#: Fewer kernels than this are compiled in threads.
_MIN_KERNELS: Final = 3
# So many kernels may be compiled twice before none is compiled ahead in processes any more.
_MOST_OTHER_NAMES: Final = 8
#: Memory that should be free for each process, in bytes: five times what compiling most kernels takes.
_FREE: Final = 1 << 29
#: After the last kernel processes wait for more, and then end.
_IDLE_SECONDS: Final = 30.0
#: Modules of generated sources: no part of the package, but files that can be loaded anywhere.
GENERATED: Final = "flagos_triton_"
#: Backends of Triton's that compile without a device, and were tried.
_BACKENDS: Final = frozenset({"cuda"})
#: Of a kernel's files in Triton's cache, in characters.
_LONGEST_NAME: Final = 150
_PACKAGE: Final = flagos_backend.__name__
_OURS: Final = f"{_PACKAGE}.kernels.triton."


class CompileEnded(RuntimeError):
    """An interrupt ended the process that compiled."""


@dataclass(eq=False)
class _Process:
    """``number``: of the process, once it has said so. ``ended``: by an interrupt."""

    connection: Connection
    number: int = 0
    ended: bool = False

    def ask(self, request: bytes) -> tuple[str, str]:
        """Raises EOFError and OSError when the process ends."""
        self.connection.send_bytes(request)
        if not self.number:
            self.number = self.connection.recv()
        answer: tuple[str, str] = self.connection.recv()
        return answer

    def end(self) -> None:
        self.ended = True
        with suppress(OSError):
            if self.number:
                os.killpg(self.number, signal.SIGKILL)
        with suppress(OSError), socket.fromfd(self.connection.fileno(), socket.AF_UNIX, socket.SOCK_STREAM) as end:
            end.shutdown(socket.SHUT_RDWR)  # wakes who waits for an answer, and tells a process that begins


@dataclass(eq=False)
class Processes:
    """A server and what it forks, started at once. ``size``: how many compile at most; others wait for them."""

    target: tuple[str, Any, int]
    size: int
    _control: socket.socket = field(init=False)
    _server: subprocess.Popen[bytes] = field(init=False)
    _idle: list[_Process] = field(default_factory=list, init=False)
    _busy: dict[int, _Process] = field(default_factory=dict, init=False)  # by the thread that waits
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)
    _free: threading.Semaphore = field(init=False)

    def __post_init__(self) -> None:
        """Raises OSError when no process can be started."""
        self._free = threading.Semaphore(self.size)
        python = python_program()
        if python is None:
            raise FileNotFoundError("there is no Python to start")
        folder = Path(flagos_backend.__file__).parent
        setup = {
            "path": sys.path,
            "bytecode": [sys.pycache_prefix, sys.dont_write_bytecode],
            "package": _PACKAGE,
            "folder": str(folder),
            "target": list(self.target),
            "parent": os.getpid(),
            "idle": _IDLE_SECONDS,
        }
        self._control, theirs = socket.socketpair()
        try:
            command = [python, "-S", compile_server.__file__, str(theirs.fileno()), json.dumps(setup)]
            nothing = subprocess.DEVNULL
            self._server = subprocess.Popen(
                command, stdin=nothing, stdout=nothing, stderr=nothing, pass_fds=[theirs.fileno()]
            )
        except BaseException:
            self._control.close()
            raise
        finally:
            theirs.close()

    @property
    def alive(self) -> bool:
        """Until the server ends: it then closes its socket, and says something there only if it could not begin."""
        return self._server.poll() is None and not select.select([self._control], [], [], 0)[0]

    @property
    def failure(self) -> str:
        """Why the server ended, or "" where it only had nothing to do."""
        status = self._server.wait()
        with suppress(OSError):
            text = self._control.recv(1 << 16, socket.MSG_DONTWAIT).decode(errors="replace")
            return f"the process that starts others ended with status {status}: {text}" if status else ""
        return f"the process that starts others ended with status {status}" if status else ""

    def compile(self, request: bytes) -> tuple[str, str]:
        """What a process answers to a pickled Request, a tuple. Raises EOFError and OSError when it ended, CompileEnded
        when that was an interrupt."""
        thread = threading.get_ident()
        with self._free:
            for attempt in range(2):
                with self._lock:
                    waited = bool(self._idle) and not attempt
                    process = self._idle.pop() if waited else self._begin()
                    self._busy[thread] = process
                try:
                    answer = process.ask(request)
                except (EOFError, OSError):
                    process.connection.close()
                    if process.ended:
                        raise CompileEnded("compiling was interrupted") from None
                    if waited:  # it ended for want of work
                        continue
                    raise
                except BaseException:
                    process.connection.close()
                    raise
                else:
                    with self._lock:
                        self._idle.append(process)
                    return answer
                finally:
                    with self._lock:
                        del self._busy[thread]
        raise AssertionError("the second attempt ends")

    def _begin(self) -> _Process:
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                socket.send_fds(self._control, [b"\0"], [theirs.fileno()])
            except OSError:
                ours.close()
                raise
        return _Process(Connection(ours.detach()))

    def interrupt(self, threads: Iterable[threading.Thread]) -> None:
        """Ends the processes that these threads wait for."""
        with self._lock:
            waited_for = [self._busy[thread.ident] for thread in threads if thread.ident in self._busy]
        for process in waited_for:
            process.end()

    def end(self) -> None:
        """Of all processes, also where one compiles."""
        with suppress(OSError):
            self._server.kill()  # whose children end with it
        self._server.wait()
        self.forget()

    def forget(self) -> None:
        """Closes what a forked process has of it."""
        self._control.close()
        for process in [*self._idle, *self._busy.values()]:
            process.connection.close()
        self._idle.clear()


class _State:
    """``processes``: those of this process, if they run. ``programs``: how many of many kernels compile now.
    ``refusal``: why there are none from now on. ``other_names``: of how many kernels theirs was not the one here."""

    def __init__(self) -> None:
        self.registered = False
        self.lock = threading.Lock()
        self.processes: Processes | None = None
        self.programs = 0
        self.refusal = ""
        self.other_names = 0
        self.ahead = threading.local()


_state = _State()
#: CPython 3.11 counts the depth of a tree for all threads that parse together, and refuses what it then finds too deep.
_parsing = threading.Lock()


def _forget_in_child() -> None:
    global _parsing, _state
    before, _state, _parsing = _state, _State(), threading.Lock()
    _state.refusal = before.refusal
    if before.processes is not None:
        before.processes.forget()
        before.processes._server.returncode = 0  # it is not the child of this process, which is not to wait for it


os.register_at_fork(after_in_child=_forget_in_child)


def _end() -> None:
    with _state.lock:
        if _state.processes is not None:
            _state.processes.end()
            _state.processes = None
        _state.refusal = "the interpreter ends"


def _interrupt(threads: Sequence[threading.Thread]) -> None:
    processes = _state.processes
    if processes is not None:
        processes.interrupt(threads)


def size() -> int:
    """How many processes this machine would have, by its processors and the memory that is free."""
    text = os.environ.get(PROCESSES, "")
    if text.isdecimal():
        return int(text)
    if text:
        logger.warning("%s is %r, not a number of processes", PROCESSES, text)
    processors = len(os.sched_getaffinity(0))
    return min(processors, _available_memory() // _FREE) if processors >= _MIN_PROCESSORS else 0


def _available_memory() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    return 0


def start(target: tuple[str, Any, int]) -> Processes | None:
    """The processes for kernels of ``target``, Triton's backend, architecture and size of a warp: those that run, or
    new ones. They get ready by themselves. None where there shall be none, or could not be."""
    with _state.lock:
        if _state.refusal:
            return None
        if _state.processes is not None:
            if _state.processes.alive:
                return _state.processes
            _state.processes.end()
            _state.processes = None
        try:
            count = size()
            if count < 1:
                return None
            _state.processes = Processes(target, count)
        except OSError as error:
            _refuse(f"no process can be started: {error}")
            return None
        if not _state.registered:
            _state.registered = True
            interrupts.on_end_of_children(_interrupt)
            ending.register(_end)
        return _state.processes


def _refuse(reason: str) -> None:
    """Says once why kernels are compiled in this process from now on."""
    if not _state.refusal:
        logger.warning("kernels are compiled in this process, by threads: %s", reason)
        _state.refusal = reason


def _note_other_name(kernel: str) -> None:
    """It was compiled twice, as what a process made has a name that Triton does not look for here. A few may: where all
    do, processes only cost."""
    logger.info("a process gave the Triton function %s another name than this process does", kernel)
    with _state.lock:
        _state.other_names += 1
        too_many = _state.other_names > _MOST_OTHER_NAMES
    if too_many:
        _refuse(f"they give kernels other names than this one, {kernel} the last of them")


@contextmanager
def many(kernels: int) -> Iterator[None]:
    """While the caller has ``kernels`` compiled ahead, processes take part if these are enough."""
    counts = kernels >= _MIN_KERNELS
    with _state.lock:
        _state.programs += counts
    try:
        yield
    finally:
        with _state.lock:
            _state.programs -= counts


@contextmanager
def ahead() -> Iterator[None]:
    """What the calling thread has Triton compile here is for later: processes may."""
    _state.ahead.now = True
    try:
        yield
    finally:
        _state.ahead.now = False


def install(compiler: Any) -> None:
    """Has ``compiler``, Triton's module triton.compiler, ask the processes first, and kernels have their names."""
    compile_server.name_by_content()
    if not hasattr(compiler.compile, "__wrapped__"):
        compiler.compile = _by_processes(compiler.compile)


def _by_processes(compile_here: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(compile_here)
    def compile(src: Any, target: Any = None, options: Any = None, **others: Any) -> Any:
        wanted = getattr(_state.ahead, "now", False) and _state.programs and not _state.refusal
        if not wanted or target is None or not (request := _request(src, target, options)):
            return compile_here(src, target=target, options=options, **others)
        found = _ask(src.fn.__name__, (target.backend, target.arch, target.warp_size), request)
        kernel = compile_here(src, target=target, options=options, **others)
        if found and kernel.hash != found:
            _note_other_name(f"{src.fn.__module__}.{src.fn.__name__}")
        return kernel

    return compile


def _ask(name: str, target: tuple[str, Any, int], request: bytes) -> str:
    """The hash of the kernel that a process compiled, or ""."""
    processes = start(target)
    if processes is None:
        return ""
    try:
        state, text = processes.compile(request)
    except (EOFError, OSError) as error:
        if processes.alive:
            logger.warning("%s is compiled in this process: another one ended while it did: %s", name, error)
        elif failure := processes.failure:
            _refuse(failure)
        return ""
    if state != "compiled":
        logger.debug("%s is compiled in this process: %s", name, text)
        return ""
    return text


def _request(src: Any, target: Any, options: Any) -> bytes:
    """Empty for what is there already, and what a process could not find or would compile differently; also where this
    Triton, as some vendors' own, lacks what is asked for here."""
    try:
        return _request_of(src, target, options)
    except (AttributeError, ImportError) as error:
        logger.debug("Triton compiles in this process: %s", error)
        return b""


def _request_of(src: Any, target: Any, options: Any) -> bytes:
    from triton import knobs
    from triton.compiler import ASTSource
    from triton.runtime import cache

    if target.backend not in _BACKENDS or type(src) is not ASTSource:
        return b""
    function, module = src.fn, str(src.fn.__module__)
    generated = module.startswith(GENERATED)
    if not generated and not module.startswith(_OURS):
        return b""
    compilation, hook = knobs.compilation, getattr(knobs.runtime, "add_stages_inspection_hook", None)
    if hook or any((compilation.listener, compilation.override, compilation.dump_ir, compilation.always_compile)):
        return b""
    with _parsing:
        src.hash()  # parses the function, which then has it
    if _is_kept(src, target, options):
        return b""
    request = compile_server.Request(
        module,
        function.fn.__code__.co_filename if generated else "",
        function.__name__,
        src.signature,
        src.constants,
        src.attrs,
        (target.backend, target.arch, target.warp_size),
        dict(options or {}),
        cache.triton_key(),
        dict(os.environ),
    )
    try:
        return pickle.dumps(tuple(request))
    except (pickle.PicklingError, TypeError, AttributeError):  # a function among the constants
        return b""


def _is_kept(src: Any, target: Any, options: Any) -> bool:
    """Whether Triton's cache has the kernel. It is asked in the way of its own compile; a version that has another way
    costs a question to a process, which finds the kernel."""
    from triton.compiler import make_backend
    from triton.runtime import cache

    try:
        from triton._C.libtriton import get_cache_invalidating_env_vars

        backend = make_backend(target)
        parsed = backend.parse_options({**(options or {}), **src.parse_options()})
        key = cache.get_cache_key(src, backend, parsed, env_vars=get_cache_invalidating_env_vars())
        folder = cache.get_cache_manager(hashlib.sha256(key.encode()).hexdigest())
        name = f"{src.name[:_LONGEST_NAME]}.json"
        return name in (folder.get_group(name) or {})
    except (AttributeError, ImportError, TypeError):
        return False
