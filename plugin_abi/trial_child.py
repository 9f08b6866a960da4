"""The processes of a trial load: a supervisor, and its child that loads one library and calls its entry once.

A script for `python -I -S`, run by trial.py; it imports nothing outside the standard library, and of this package what
confines the child of a backend that is to have a process of its own.

The supervisor runs no code of the library. It adopts whatever the child leaves behind (PR_SET_CHILD_SUBREAPER), daemons
and processes of other sessions included, and ends with all of it. The child's account goes to `result_fd`. How the
child ended is the supervisor's to say, through `status_fd`, which the child has not.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import json
import os
import resource
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any, NoReturn

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_MAX_TEXT = 4096
#: How long the supervisor insists on the end of what the child left behind.
_END_SECONDS = 5.0
_MAX_DENIED = 100

#: Exit statuses of the child beside what a signal gives.
DONE, NOT_LOADED, NOT_CONFINED = 0, 3, 4


# ---- The child -----------------------------------------------------------------------------------------------------


def _read_text(address: int) -> str:
    """A zero-terminated string, read no further than _MAX_TEXT bytes."""
    data = bytearray()
    while len(data) < _MAX_TEXT:
        byte = ctypes.string_at(address + len(data), 1)
        if byte == b"\0":
            break
        data += byte
    return data.decode("utf-8", "replace")


def _read_struct(address: int, size: int, layout: dict[str, Any]) -> dict[str, Any]:
    """The plain fields of a struct of `size` bytes by their layout: text for char pointers, numbers for all else.
    Fields that lie beyond its end are absent."""
    values: dict[str, Any] = {}
    for name, (offset, width, kind) in layout["fields"].items():
        if offset + width > size:
            continue
        number = int.from_bytes(ctypes.string_at(address + offset, width), sys.byteorder, signed=kind == "int32_t")
        values[name] = (_read_text(number) if number else None) if kind == "char *" else number
    return values


def _look_at(address: int, request: dict[str, Any]) -> dict[str, Any] | None:
    """A function table's size and version, and its slots within that size that hold no function."""
    if not address:
        return None
    size = int.from_bytes(ctypes.string_at(address, 8), sys.byteorder)
    values = _read_struct(address, size, request["table"])
    empty = [name for name in request["slots"] if values.get(name) == 0]
    return {"size": size, "version": values.get("version", 0), "empty": empty}


def _load(request: dict[str, Any]) -> ctypes.CDLL:
    """As the host would load it: with the host's own code, from the descriptors that it has checked."""
    place = Path(__file__).with_name("dynamic_load.py")
    spec = importlib.util.spec_from_file_location("flagos_dynamic_load", place)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Dataclasses look their module up.
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    *dependencies, library = (module.Loadable(*values) for values in request["loads"])
    loaded: ctypes.CDLL = module.load(library, dependencies)
    return loaded


def _confine(values: dict[str, Any], supervisor: socket.socket) -> None:
    """Takes upon this process what the backend's own would have. Raises OSError."""
    sys.path.append(str(Path(__file__).parents[1]))
    from plugin_abi import rights

    def hand_over(listener: int) -> None:
        socket.send_fds(supervisor, [b"."], [listener])

    with supervisor:
        rights.take(values, hand_over)


def _try(request: dict[str, Any], supervisor: socket.socket) -> NoReturn:
    def answer(value: dict[str, Any]) -> None:
        data = json.dumps(value).encode()
        while data:
            data = data[os.write(request["result_fd"], data) :]

    if request["rights"] is not None:
        try:
            _confine(request["rights"], supervisor)
        except OSError as error:
            answer({"error": str(error)})
            os._exit(NOT_CONFINED)
    supervisor.close()
    try:
        entry = _load(request).flagos_plugin_entry
    except (OSError, AttributeError) as error:
        answer({"error": str(error)})
        os._exit(NOT_LOADED)
    layout = request["args"]
    memory = ctypes.create_string_buffer(layout["size"])
    host_name = ctypes.create_string_buffer(request["host_name"].encode())
    given = {
        "struct_size": layout["size"],
        "host_version_min": request["min"],
        "host_version_max": request["max"],
        "host_name": ctypes.addressof(host_name),
    }
    for name, number in given.items():
        offset, width, _ = layout["fields"][name]
        ctypes.memmove(ctypes.addressof(memory) + offset, number.to_bytes(width, sys.byteorder), width)
    entry.restype = ctypes.c_int32
    entry.argtypes = (ctypes.c_void_p,)
    status = entry(ctypes.addressof(memory))
    values = _read_struct(ctypes.addressof(memory), layout["size"], layout)
    info = None
    if values["info"]:
        info_size = int.from_bytes(ctypes.string_at(values["info"], 8), sys.byteorder)
        info = _read_struct(values["info"], info_size, request["info"])
    table = _look_at(values.pop("api"), request) if status == request["entry_ok"] else None
    answer({"status": status, "args": values, "info": info, "table": table})
    # Neither the library's destructors nor Python's own end are part of the trial.
    os._exit(DONE)


# ---- The supervisor ------------------------------------------------------------------------------------------------


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _descendants() -> list[int]:
    """The processes below this one, by their parents in /proc."""
    children: dict[int, list[int]] = {}
    for place in Path("/proc").iterdir():
        if place.name.isdecimal():
            with contextlib.suppress(OSError):
                # The name of the program, in parentheses, may contain anything.
                parent = (place / "stat").read_bytes().rpartition(b")")[2].split()[1]
                children.setdefault(int(parent), []).append(int(place.name))
    found, below = [], [os.getpid()]
    while below:
        below = [child for parent in below for child in children.get(parent, ())]
        found += below
    return found


def _reap() -> tuple[bool, dict[int, int]]:
    """Collect what has ended: whether processes are left, and the exit codes by process."""
    ended: dict[int, int] = {}
    try:
        while True:
            process, status = os.waitpid(-1, os.WNOHANG)
            if process == 0:
                return True, ended
            ended[process] = os.waitstatus_to_exitcode(status)
    except ChildProcessError:
        return False, ended


def _end_descendants() -> None:
    deadline = time.monotonic() + _END_SECONDS
    while _reap()[0] and time.monotonic() < deadline:
        for process in _descendants():
            with contextlib.suppress(OSError):
                os.kill(process, signal.SIGKILL)
        time.sleep(0.001)


def _supervise(child: int, timeout: float) -> int | None:
    """Wait for the child: its exit code, below zero a signal; None when it took too long or the host went away."""
    deadline = time.monotonic() + timeout
    while True:
        left, ended = _reap()
        if child in ended or not left:
            return ended.get(child)
        remaining = deadline - time.monotonic()
        if remaining <= 0:
            return None
        caught = signal.sigtimedwait(_WATCHED, remaining)
        if caught is not None and caught.si_signo == signal.SIGTERM:
            return None


def _refuse(child: socket.socket, denied: list[str]) -> None:
    """Refuses what the child is denied, and adds the name of each such call to `denied`, until the child has ended."""
    with child:
        _, descriptors, _, _ = socket.recv_fds(child, 1, 1)
    if not descriptors:  # it reports nothing
        return
    sys.path.append(str(Path(__file__).parents[1]))
    from plugin_abi import seccomp

    seccomp.refuse_calls(descriptors[0], lambda name: denied.append(name) if name not in denied else None)


_WATCHED = {signal.SIGCHLD, signal.SIGTERM}


def _main() -> NoReturn:
    request = json.loads(sys.argv[1])
    # Nobody wants a core file of a plugin on trial, nor a plugin that outlives its judge.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.pthread_sigmask(signal.SIG_BLOCK, _WATCHED)
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    supervisor = os.getpid()
    if os.getppid() != request["host"]:
        os._exit(DONE)
    ours, theirs = socket.socketpair()
    child = os.fork()
    if child == 0:
        ours.close()
        os.close(request["status_fd"])
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _WATCHED)
        if os.getppid() != supervisor:
            os._exit(DONE)
        _try(request, theirs)
    # Who holds these has not ended: the host reads them up to their end.
    os.close(request["result_fd"])
    os.close(1)
    os.close(2)
    theirs.close()
    denied: list[str] = []
    refusing = threading.Thread(target=_refuse, args=(ours, denied), daemon=True)
    refusing.start()
    status = _supervise(child, request["timeout"])
    _end_descendants()
    refusing.join(_END_SECONDS)
    told = {"status": status, "denied": denied[:_MAX_DENIED]}
    os.write(request["status_fd"], json.dumps(told).encode())
    os._exit(DONE)


if __name__ == "__main__":
    _main()
