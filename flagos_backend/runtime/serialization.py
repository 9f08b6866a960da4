"""Executables as bytes: a checked header, then the program that they were compiled from. Used by bridge.py.

What the passes and the plan made of the program is not stored: a load makes it again, and so cannot run anything that
this build would not have made itself.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence

from flagos_backend.errors import SerializedExecutableDamaged, SerializedExecutableForeign, SerializedExecutableInvalid
from flagos_backend.importer import schema
from flagos_backend.importer.graph import parse

_MAGIC = b"FLAGOSEX"
_FORMAT = 1
# magic, format, bytes of the build id, bytes of the program, SHA-256 of build id and program
_HEADER = struct.Struct("<8sIIQ32s")


def serialize(program: bytes, build_id: str) -> bytes:
    """``program`` is a serialized flagos.Program."""
    build = build_id.encode()
    digest = hashlib.sha256(build + program).digest()
    return _HEADER.pack(_MAGIC, _FORMAT, len(build), len(program), digest) + build + program


def deserialize(data: bytes, build_id: str) -> bytes:
    """The program of ``serialize``. Raises SerializedExecutableInvalid, ...Foreign or ...Damaged."""
    if len(data) < _HEADER.size or not data.startswith(_MAGIC):
        raise SerializedExecutableInvalid(reason=f"{len(data)} bytes without the header of one")
    _, version, build_size, program_size, digest = _HEADER.unpack_from(data)
    if version != _FORMAT:
        raise SerializedExecutableForeign(theirs=f"with format {version}", ours=f"format {_FORMAT}")
    if len(data) != _HEADER.size + build_size + program_size:
        stated = _HEADER.size + build_size + program_size
        raise SerializedExecutableDamaged(reason=f"it has {len(data)} bytes and states {stated}")
    build = data[_HEADER.size : _HEADER.size + build_size]
    program = data[_HEADER.size + build_size :]
    if hashlib.sha256(build + program).digest() != digest:
        raise SerializedExecutableDamaged(reason="its contents do not match its checksum")
    if build != build_id.encode():
        raise SerializedExecutableForeign(theirs=build.decode("utf-8", "replace"), ours=build_id)
    return program


def reassign(program: bytes, device_ids: Sequence[int]) -> bytes:
    """The program for other devices: ``device_ids`` is [num_replicas][num_partitions], flat."""
    proto = parse(schema.Program, program, "flagos.Program")
    proto.device_assignment[:] = device_ids
    return bytes(proto.SerializeToString())
