"""A process that compiles Triton kernels for another one, compile_processes.py's: run as a file, with a socket of that
process and what it says of itself.

It imports Triton alone, no framework and no driver of a device, compiles one small kernel, and then forks a process
for each socket that it is sent, ready to compile. All of them end with the process that started this one, however that
ends, and when nobody has asked them for anything for a while.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import importlib.util
import json
import os
import resource
import select
import signal
import socket
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any, Final, NamedTuple

#: Seconds after which it notices that its parent is gone where the socket does not tell, as others hold it too.
_LOOK: Final = 2.0
#: What a process may hold, in bytes; and beyond which it makes room, once it has answered.
_MEMORY: Final = 4 << 30
_LARGE: Final = 1 << 30
#: What fits a socket that nobody reads yet, in characters.
_REASON: Final = 4000
_PR_SET_PDEATHSIG: Final = 1
#: What sources import: kernels of ours, and the functions of generated ones. Their packages import far more.
_PACKAGES: Final = ("", "codegen", "codegen.triton", "kernels", "kernels.triton")
_FUNCTIONS: Final = ("codegen.triton.formulas", "codegen.triton.complex_formulas", "codegen.triton.nvidia_formulas")


class Request(NamedTuple):
    """A kernel to compile. ``module`` lies in ``file`` where it is no part of the package; ``key``: Triton's own, of
    its version; the rest as of Triton's ASTSource and compile. Plain tuples are sent: this module has another name in
    the process that asks."""

    module: str
    file: str
    function: str
    signature: dict[str, Any]
    constants: dict[Any, Any]
    attributes: dict[Any, Any]
    target: tuple[str, Any, int]
    options: dict[str, Any]
    key: str
    environment: dict[str, str]


def main() -> None:
    control = socket.socket(fileno=int(sys.argv[1]))
    setup = json.loads(sys.argv[2])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent's terminal sends it to all; the parent ends this one
    sys.path[:] = setup["path"]
    sys.pycache_prefix, sys.dont_write_bytecode = setup["bytecode"]
    _make_packages(setup["package"], Path(setup["folder"]))
    modules: dict[str, ModuleType] = {}
    try:
        prepare(setup["package"], setup["target"])
    except Exception as error:
        control.sendall(f"{type(error).__name__}: {error}"[:_REASON].encode())
        raise
    children: set[int] = set()
    busy = time.monotonic()
    while os.getppid() == setup["parent"]:
        ready = select.select([control], [], [], min(_LOOK, setup["idle"]))[0]
        children = {child for child in children if os.waitpid(child, os.WNOHANG) == (0, 0)}
        if children or ready:
            busy = time.monotonic()
        elif time.monotonic() - busy > setup["idle"]:
            return
        if not ready:
            continue
        message, handles, _, _ = socket.recv_fds(control, 1, 1)
        if not message:
            return
        server = os.getpid()
        child = os.fork()
        if not child:
            status = 1
            try:
                control.close()
                work(Connection(handles[0]), server, setup["idle"], modules)
                status = 0
            finally:
                os._exit(status)
        os.close(handles[0])
        children.add(child)


def _make_packages(package: str, folder: Path) -> None:
    """Packages of which nothing is run but what is asked for."""
    for name in _PACKAGES:
        module = ModuleType(".".join(filter(None, (package, name))))
        module.__path__ = [str(folder.joinpath(*name.split(".")))]
        sys.modules[module.__name__] = module


def prepare(package: str, target: list[Any]) -> None:
    """Compiles something, so that all that a first compile finds is found before there are children."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile
    from triton.runtime import cache

    name_by_content()
    for name in _FUNCTIONS:
        importlib.import_module(f"{package}.{name}")
    kernels = importlib.import_module(f"{package}.kernels.triton.compile_server_kernels")
    cache.triton_key = lambda: ""
    before = os.environ.get("TRITON_CACHE_DIR")
    with tempfile.TemporaryDirectory(prefix="flagos-triton-") as folder:
        os.environ["TRITON_CACHE_DIR"] = folder
        try:
            source = ASTSource(kernels.copy, {"source": "*fp32", "target": "*fp32"}, {}, {})
            compile(source, target=GPUTarget(*target), options={})
        finally:
            if before is None:
                del os.environ["TRITON_CACHE_DIR"]
            else:
                os.environ["TRITON_CACHE_DIR"] = before


def name_by_content() -> None:
    """Has Triton name a kernel by what it is alone. It takes constants that a function reads into the name of who calls
    it, but only if that function had a name before: names then go by the order in which kernels were met."""
    from triton.runtime.jit import DependenciesFinder

    update: Any = getattr(DependenciesFinder, "_update_hash", None)
    if update is None or hasattr(update, "__wrapped__"):
        return

    @functools.wraps(update)
    def update_hash(self: Any, function: Any) -> None:
        _ = function.cache_key  # after which it says which constants it reads
        update(self, function)

    DependenciesFinder._update_hash = update_hash


def work(connection: Connection, server: int, idle: float, modules: dict[str, ModuleType]) -> None:
    """Says its number, and answers each request: with the hash under which Triton's cache has the kernel, or why it
    has not. Ends ``idle`` seconds after the last one."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != server:
        return
    os.setpgid(0, 0)  # so that an assembler ends with it
    resource.setrlimit(resource.RLIMIT_DATA, (_MEMORY, resource.getrlimit(resource.RLIMIT_DATA)[1]))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        connection.send(os.getpid())
        while connection.poll(idle):
            try:
                answer = ("compiled", compile_one(Request(*connection.recv()), modules))
            except EOFError:
                raise
            except Exception as error:  # compilers raise what they like
                answer = ("failed", f"{type(error).__name__}: {error}")
            connection.send(answer)
            if resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10 > _LARGE:
                return
    except (EOFError, OSError):  # nobody is there any more
        return


def compile_one(request: Request, modules: dict[str, ModuleType]) -> str:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile
    from triton.runtime import cache

    if request.environment != dict(os.environ):
        os.environ.clear()
        os.environ.update(request.environment)
    cache.triton_key = lambda: request.key
    module = modules.get(request.module)
    if module is None:
        module = modules[request.module] = _load(request.module, request.file)
    function = getattr(module, request.function)
    source = ASTSource(function, request.signature, request.constants, request.attributes)
    found: str = compile(source, target=GPUTarget(*request.target), options=request.options).hash
    return found


def _load(name: str, file: str) -> ModuleType:
    if not file:
        return importlib.import_module(name)
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    main()
