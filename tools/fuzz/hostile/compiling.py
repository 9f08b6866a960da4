"""Targets of the backend: what reads programs, serialized executables, and what it keeps in the cache folder."""

from __future__ import annotations

import functools
import hashlib
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from flagos_backend.errors import FlagosBackendError, StatusCode
from flagos_backend.importer import import_program
from flagos_backend.process.cache import private_folder
from flagos_backend.runtime.serialization import _HEADER
from plugin_abi import loader
from plugin_abi.errors import FlagosStatusError
from plugin_abi.errors import StatusCode as AbiStatusCode
from plugin_abi.host import Artifact, Context, Executable
from tools.fuzz.hostile.mutations import changed_bytes, changed_json
from tools.fuzz.hostile.programs import changed_program, random_call, valid_calls, valid_programs
from tools.fuzz.hostile.target import ACCEPTED, Target


class InternalError(Exception):
    """The backend blames itself for an input."""


def _take_by_importer(data: bytes) -> str:
    try:
        import_program(data)
    except FlagosBackendError as error:
        if error.code is StatusCode.INTERNAL:
            raise
        return type(error).__name__
    return ACCEPTED


# ---- Through the table ----


@functools.cache
def _context() -> Context:
    backend = loader.load().accepted
    if backend is None:
        raise RuntimeError(loader.no_such_device_message())
    return Context(backend)


def _status(error: FlagosStatusError) -> str:
    if error.code is AbiStatusCode.INTERNAL:
        raise InternalError(error.message) from error
    return error.payloads.get("flagos.error", error.code.name.encode()).decode()


def _take_program(data: bytes) -> str:
    try:
        with Executable.compile(_context(), data) as executable:
            executable.describe()
    except FlagosStatusError as error:
        return _status(error)
    return ACCEPTED


@functools.cache
def _executables() -> tuple[bytes, ...]:
    made = []
    for program in valid_programs()[:8]:
        with Executable.compile(_context(), program) as executable:
            made.append(executable.artifact(Artifact.SERIALIZED))
    return tuple(made)


def _changed_executable(rng: random.Random) -> bytes:
    """Bytes changed; or the header's fields; or the program inside, with the sizes and the checksum that it needs."""
    data = rng.choice(_executables())
    magic, version, build_size, _, _ = _HEADER.unpack_from(data)
    build, program = data[_HEADER.size : _HEADER.size + build_size], data[_HEADER.size + build_size :]
    match rng.randrange(4):
        case 0:
            return changed_bytes(rng, data)
        case 1:
            header = changed_bytes(rng, data[: _HEADER.size])
            return header + data[_HEADER.size :]
        case 2:
            build = changed_bytes(rng, build)
        case _:
            program = changed_program(rng)
    digest = hashlib.sha256(build + program).digest()
    return _HEADER.pack(magic, version, len(build), len(program), digest) + build + program


def _take_executable(data: bytes) -> str:
    try:
        with Executable.load(_context(), data) as executable:
            executable.describe()
    except FlagosStatusError as error:
        return _status(error)
    return ACCEPTED


# ---- What is kept in the cache folder ----


def _kept(name: str) -> Path:
    folder = private_folder("fuzz")
    assert folder is not None, "the cache folder is not this user's alone"
    return folder / name


def _times() -> Sequence[bytes]:
    return (json.dumps({"a kernel": 0.5, "another": None, "a third": 1e-6}).encode(),)


def _take_times(data: bytes) -> str:
    from flagos_backend.kernels import tuning

    path = _kept("times.json")
    path.write_bytes(data)
    return "none" if tuning._read(path) is None else ACCEPTED


_BASIS: Final = ["3.11", "2.13", [["FLAGOS_DEVICE", "cpu"]], [["/nowhere/a.json", 1, 2]]]


def _answers() -> Sequence[bytes]:
    kept = {"basis": _BASIS, "libraries": [["/nowhere/lib.so", 0, 0]], "accepted": True, "warnings": []}
    return (json.dumps(kept).encode(), json.dumps({**kept, "warnings": [["/nowhere/a.json", 203, "a line"]]}).encode())


def _take_answer(data: bytes) -> str:
    from flagos_backend.frontends.torch.device import verdict

    path = _kept("torch.json")
    path.write_bytes(data)
    return "none" if verdict._read(path, _BASIS) is None else ACCEPTED


_SOURCE: Final = "VALUE = 7\n"


def _take_source(data: bytes) -> str:
    from flagos_backend.codegen.triton import sources

    path = sources.path_of(_SOURCE)
    path.write_bytes(data)
    assert sources._loaded.__wrapped__(_SOURCE).VALUE == 7
    assert path.read_text() == _SOURCE
    return ACCEPTED


TARGETS: Final = (
    Target("importer", valid_programs, changed_program, _take_by_importer, seconds=5.0, megabytes=256),
    Target("program", valid_programs, changed_program, _take_program, seconds=10.0, megabytes=512),
    Target("custom call", valid_calls, random_call, _take_program, seconds=10.0, megabytes=512),
    Target("executable", _executables, _changed_executable, _take_executable, seconds=10.0, megabytes=512),
    Target("times", _times, lambda rng: changed_json(rng, _times()[0]), _take_times),
    Target("torch answer", _answers, lambda rng: changed_json(rng, rng.choice(_answers())), _take_answer),
    Target("source", lambda: (_SOURCE.encode(),), lambda rng: changed_bytes(rng, _SOURCE.encode()), _take_source),
)
