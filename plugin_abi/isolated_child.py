"""The Python of a backend's own process: loads one library, checked as always, and serves it to the host.

Started by libflagos_isolation.so with the command of isolation.py; main() never returns.
"""

from __future__ import annotations

import ctypes
import functools
import os
import socket as sockets
import struct
from dataclasses import fields
from pathlib import Path
from typing import Any, Final, NoReturn

from plugin_abi import cabi, isolation, loader, rights, seccomp
from plugin_abi.errors import Refusal
from plugin_abi.negotiation import PluginInfo

#: PyTorch, where the backend imports it, would load a backend once more for the device flagos. A trial load of that
#: fails for the rights of this process, and its verdict would be kept.
_TORCH_DEVICE_VARIABLE: Final = "FLAGOS_TORCH_DEVICE"


def _plugin_info(info: PluginInfo) -> tuple[Any, list[Any]]:
    """A FlagosPluginInfo, and what must stay alive as long as it."""
    ffi = cabi.ffi()
    made: Any = ffi.new("FlagosPluginInfo*")
    made.struct_size = ffi.sizeof("FlagosPluginInfo")
    kept: list[Any] = [made]
    for field in fields(PluginInfo):
        value = getattr(info, field.name)
        if isinstance(value, str):
            kept.append(ffi.new("char[]", value.encode()))
            value = kept[-1]
        setattr(made, field.name, value)
    return made, kept


#: Of docs/isolation.md: a frame's header, and its first bytes.
_HEADER: Final = struct.Struct("=IIQ")
_MAGIC: Final = 0x31474C46
_WIRE_VERSION: Final = 5


def _listener_frame(calls: list[str]) -> bytes:
    """A Hello with the version of the wire (field 1) and what the filter denies (field 16), in its frame."""
    message = bytes((0x08, _WIRE_VERSION))
    message += b"".join(b"\x82\x01" + bytes((len(call),)) + call.encode() for call in calls)
    return _HEADER.pack(_MAGIC, len(message), 0) + message


def _hand_over(socket: int, listener: int) -> None:
    """Gives the host the listener of this process's filter."""
    end = sockets.socket(fileno=socket)
    try:
        data = _listener_frame(seccomp.denied_calls())
        sent = sockets.send_fds(end, [data], [listener])
        end.sendall(data[sent:])
    finally:
        end.detach()


def main(request: dict[str, Any], socket: int) -> NoReturn:
    """Serves the library of request["manifest"] to the host at the other end of `socket`."""
    serve = isolation.library().FlagosServe
    os.environ[_TORCH_DEVICE_VARIABLE] = "0"
    if request["rights"] is not None:
        try:
            rights.take(request["rights"], functools.partial(_hand_over, socket))
        except OSError as error:
            serve(socket, None, 0, None, f"its process cannot be confined: {error}".encode("utf-8", "replace"))
    loaded = loader.load_manifest(Path(request["manifest"]))
    if isinstance(loaded, Refusal):
        serve(socket, None, 0, None, str(loaded).encode("utf-8", "replace"))
    else:
        info, _kept = _plugin_info(loaded.info)
        address = int(cabi.ffi().cast("uintptr_t", info))
        serve(socket, ctypes.c_void_p(loaded.address), loaded.version.number, ctypes.c_void_p(address), None)
    raise AssertionError("FlagosServe does not return")
