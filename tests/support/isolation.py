"""Backends in processes of their own, for tests: loading one, its processes, and its messages as protobuf's own code
reads and writes them."""

from __future__ import annotations

import contextlib
import functools
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from plugin_abi import cabi, isolation, loader
from plugin_abi.errors import FlagosStatusError
from plugin_abi.host import Context, Executable
from plugin_abi.negotiation import call_entry
from plugin_abi.policy import HOST_ABI
from plugin_abi.search import SearchEnvironment
from plugin_abi.versions import AbiVersion

PROTO = Path(__file__).parents[2] / "proto"
PATIENCE = isolation.Patience()
HEADER = struct.Struct("=IIQ")
MAGIC = 0x31474C46

#: Serves the library argv[2] with the library of both ends argv[1]: the least that a child can be.
LIGHT_CHILD = """
import ctypes, sys
library, ends = ctypes.CDLL(sys.argv[2]), ctypes.CDLL(sys.argv[1])
class Args(ctypes.Structure):
    _fields_ = [("struct_size", ctypes.c_size_t), ("min", ctypes.c_uint32), ("max", ctypes.c_uint32),
                ("host_name", ctypes.c_char_p), ("log", ctypes.c_void_p), ("log_user_data", ctypes.c_void_p),
                ("log_level", ctypes.c_int32), ("version", ctypes.c_uint32), ("plugin_min", ctypes.c_uint32),
                ("plugin_max", ctypes.c_uint32), ("api", ctypes.c_void_p), ("info", ctypes.c_void_p),
                ("message", ctypes.c_char_p)]
args = Args(struct_size=ctypes.sizeof(Args), min=1 << 16, max=1 << 16, host_name=b"test")
assert library.flagos_plugin_entry(ctypes.byref(args)) == 0
ends.FlagosServe(ctypes.c_int32(int(sys.argv[3])), ctypes.c_void_p(args.api), ctypes.c_uint32(args.version),
                 ctypes.c_void_p(args.info), None)
"""


def environment(**variables: str) -> SearchEnvironment:
    """This process's environment, with the backends in processes of their own."""
    current = SearchEnvironment.current()
    return replace(current, variables={**current.variables, isolation.MODE_VARIABLE: "process", **variables})


def light_command(library: Path) -> list[str]:
    """Serves a library that was built for a test; starts in a tenth of the time of the loader's child."""
    return [sys.executable, "-I", "-S", "-c", LIGHT_CHILD, str(isolation.LIBRARY), str(library)]


def backend_of(
    command: list[str], patience: isolation.Patience = PATIENCE, environment: list[str] | None = None
) -> loader.Backend | str:
    """The backend that a command serves, or why there is none."""
    ffi = cabi.ffi()
    entry = ffi.cast("FlagosPluginEntry", isolation.entry_of_command(command, patience, environment))
    answer, api = call_entry(ffi, entry, HOST_ABI, ffi.NULL, 0)
    if answer.status != 0:
        return answer.message
    address = int(ffi.cast("uintptr_t", api))
    version = AbiVersion.from_number(api.version)
    return loader.Backend(None, answer.plugin_info, version, address, 0, command[-1], api)


def came_of(context: Context, deed: str) -> str:
    """What the hostile backend, or what ended it, says of a deed."""
    try:
        Executable.compile(context, f"try {deed}".encode())
    except FlagosStatusError as error:
        return error.message
    raise AssertionError("the hostile backend reports by an error")


def process_of(context: Context) -> int:
    """The process of a context's backend."""
    number = context.devices[0].attributes[isolation.PROCESS_ATTRIBUTE]
    assert isinstance(number, int)
    return number


def children() -> set[int]:
    """The processes that this one has started and that have not been waited for."""
    found: set[int] = set()
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # of a thread that has ended meanwhile
            found.update(map(int, (task / "children").read_text().split()))
    return found


def comes_true(condition: Callable[[], bool], seconds: float = 10.0) -> bool:
    """Whether a condition is met within some seconds."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def has_ended(process: int) -> bool:
    """Whether a process, anybody's, is gone or a zombie."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def shared_memory() -> int:
    """How many segments of shared memory this process has open."""
    links = []
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the listing's own
            links.append(str(link.readlink()))
    return sum(link.startswith("/memfd:flagos") for link in links)


@functools.cache
def messages() -> dict[str, Any]:
    """The message classes of proto/isolation.proto by name, as protobuf's own compiler makes them."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "schema"
        command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{PROTO}", f"--descriptor_set_out={output}"]
        subprocess.run([*command, "isolation.proto"], check=True)
        files = descriptor_pb2.FileDescriptorSet.FromString(output.read_bytes())
    pool = descriptor_pool.DescriptorPool()
    for file in files.file:
        pool.Add(file)
    names = [message.name for message in files.file[0].message_type]
    found = {name: pool.FindMessageTypeByName(f"flagos.isolation.{name}") for name in names}
    return {name: message_factory.GetMessageClass(descriptor) for name, descriptor in found.items()}


def frame(message: bytes, sequence: int = 0) -> bytes:
    """A message with its header."""
    return HEADER.pack(MAGIC, len(message), sequence) + message


#: A child that answers each call as `argv[1]` (JSON: a greeting and a reply for each method, in hexadecimal) says, and
#: spoils what it sends, and its rings, at moments that a seed chooses; each start has the next seed, counted in the
#: file argv[2], beside which a file says in which ways it spoiled a ring.
HOSTILE_CHILD = """
import array, json, os, random, socket, struct, sys, threading
answers, counter = json.loads(sys.argv[1]), sys.argv[2]
sys.path.append(answers["support"])
import isolation_ring
log = open(counter + ".ways", "a")
with open(counter, "r+") as file:
    seed = int(file.read())
    file.seek(0)
    file.write(str(seed + 1))
draw = random.Random(seed)
header = struct.Struct("=IIQ")
def spoiled(message):
    frame = header.pack(0x31474C46, len(message), 0) + message
    way = draw.randrange(8)
    if way == 0: return frame[: draw.randrange(len(frame))]
    if way == 1: return frame + frame
    if way == 2: return header.pack(0x31474C46, 0xFFFFFFFF, 0) + message
    if way == 3: return draw.randbytes(draw.randrange(1, 200))
    cut = message[: draw.randrange(len(message) + 1)]
    if way == 4: cut = message + message
    if way == 5: cut = message + draw.randbytes(draw.randrange(1, 40))
    if way >= 6:
        cut = bytearray(message)
        for _ in range(draw.randrange(1, 4)):
            if cut: cut[draw.randrange(len(cut))] = draw.randrange(256)
    return header.pack(0x31474C46, len(cut), 0) + bytes(cut)
def sound(message):
    return header.pack(0x31474C46, len(message), 0) + message
def serve(end):
    channel = isolation_ring.Channel.join(end)
    while True:
        message, sequence = channel.receive()
        method = str(message[1])
        if method in ("6", "12", "24"): continue
        reply = bytes.fromhex(answers["replies"].get(method, ""))
        if draw.randrange(6) == 0: events.sendall(spoiled(bytes.fromhex(answers["done"])))
        if draw.randrange(4) == 0:
            print(channel.send_spoiled(reply, sequence, draw), file=log, flush=True)
            end.shutdown(socket.SHUT_WR)
        else: channel.send(reply, sequence)
events = socket.socket(fileno=int(sys.argv[3]))
magic, size, sequence = header.unpack(isolation_ring.read_exactly(events, header.size))
isolation_ring.read_exactly(events, size)
greeting = bytes.fromhex(answers["greeting"])
events.sendall(spoiled(greeting) if seed and draw.randrange(8) == 0 else sound(greeting))
while True:
    data, rights, _, _ = events.recvmsg(header.size, socket.CMSG_SPACE(4))
    if not data: break
    for _, _, number in rights:
        channel = socket.socket(fileno=array.array("i", number)[0])
        threading.Thread(target=serve, args=(channel,), daemon=True).start()
"""
