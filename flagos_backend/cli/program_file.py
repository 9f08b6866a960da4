"""Reads a program file, whatever of the usual forms it has, as a serialized flagos.Program."""

from __future__ import annotations

import enum
import re
from pathlib import Path

from google.protobuf.message import DecodeError

from flagos_backend import __version__
from flagos_backend.cli.failure import CommandFailed
from flagos_backend.importer import schema
from flagos_backend.importer.program import SCHEMA_VERSION

_MLIR_BYTECODE = b"ML\xefR"
_MLIR_TEXT = re.compile(rb"\s*(//[^\n]*\n\s*|#[^\n]*\n\s*)*(module|func\.func)\b")
_HLO_TEXT = re.compile(rb"\s*(//[^\n]*\n\s*)*HloModule\b")


class Form(enum.Enum):
    """What a program file holds, found from its content; names of files say nothing reliable."""

    MLIR = "StableHLO, text or bytecode"
    HLO_TEXT = "HLO text"
    PROGRAM = "a serialized flagos.Program"
    HLO_PROTO = "a serialized HloModuleProto"


def form_of(data: bytes) -> Form | None:
    """The form of a file's content; None if it has none of them."""
    if data.startswith(_MLIR_BYTECODE) or _MLIR_TEXT.match(data):
        return Form.MLIR
    if _HLO_TEXT.match(data):
        return Form.HLO_TEXT
    for form, message in ((Form.PROGRAM, schema.Program), (Form.HLO_PROTO, schema.HloModuleProto)):
        try:
            parsed = message.FromString(data)
        except DecodeError:
            continue
        if (parsed.schema_version and parsed.HasField("module")) if form is Form.PROGRAM else parsed.computations:
            return form
    return None


def read_program(path: Path) -> bytes:
    """The program of a file. Raises CommandFailed if it cannot be read or holds no program."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise CommandFailed(f"{path} cannot be read ({error.strerror}); name a program file") from error
    form = form_of(data)
    if form is None:
        known = "; ".join(form.value for form in Form)
        raise CommandFailed(f"{path} holds no program; known are: {known}")
    return data if form is Form.PROGRAM else program_of(data, form, str(path))


def program_of(data: bytes, form: Form, name: str) -> bytes:
    """A serialized flagos.Program for one device out of ``data``. Raises CommandFailed, which calls it ``name``."""
    return _envelope(_module(data, form, name))


def _module(data: bytes, form: Form, path: str) -> bytes:
    """The serialized HloModuleProto of a file's content."""
    if form is Form.HLO_PROTO:
        return data
    try:
        from flagos_backend.frontends.jax import jax_internals
    except ImportError as error:
        cure = "pip install 'flagos[jax]', or give a serialized HloModuleProto"
        raise CommandFailed(f"{path} is {form.value}, which jaxlib reads; {error}. Cure: {cure}") from error
    convert = jax_internals.stablehlo_to_hlo if form is Form.MLIR else jax_internals.hlo_text_to_hlo
    try:
        return convert(data)
    except RuntimeError as error:
        raise CommandFailed(f"{path} is not valid {form.value}: {error}") from error


def _envelope(module: bytes) -> bytes:
    """A program for one device, the first."""
    program = schema.Program(
        schema_version=SCHEMA_VERSION,
        producer=f"flagos {__version__} command line",
        num_replicas=1,
        num_partitions=1,
        device_assignment=[0],
    )
    program.module.MergeFromString(module)
    serialized: bytes = program.SerializeToString(deterministic=True)
    return serialized
