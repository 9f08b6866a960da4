"""The child of a trial load: loads one library, calls its entry once and writes down what it answered.

A script for `python -I -S`, run by trial.py; it imports neither this package nor anything outside the standard library.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import sys
from typing import Any, NoReturn

_PR_SET_PDEATHSIG = 1
_MAX_TEXT = 4096

#: Exit statuses beside what a signal gives.
DONE, NOT_LOADED = 0, 3


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


def _main() -> NoReturn:
    request = json.loads(sys.argv[1])
    # Nobody wants a core file of a plugin on trial, nor a plugin that outlives its judge.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    signal.alarm(int(request["timeout"]) + 2)

    def answer(value: dict[str, Any]) -> None:
        os.write(request["result_fd"], json.dumps(value).encode())

    try:
        library = ctypes.CDLL(request["library"], mode=os.RTLD_NOW | os.RTLD_LOCAL)
        entry = library.flagos_plugin_entry
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


if __name__ == "__main__":
    _main()
