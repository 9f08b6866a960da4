"""JAX's program to flagos.Program: StableHLO or HLO plus compile options in, the serialized envelope out.

First step of a compile, before the C ABI. jaxlib converts and, for several devices, partitions (partition.py).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import jax

from flagos_backend.frontends.jax import jax_internals
from flagos_backend.frontends.jax.compile_options import CompileOptions, parse
from flagos_backend.frontends.jax.constants import Without, put_back, take_out
from flagos_backend.frontends.jax.errors import MalformedGraph, UnknownProgramFormat, UnsupportedArrayLayout
from flagos_backend.frontends.jax.partition import Partitioned, partition
from flagos_backend.importer import schema
from flagos_backend.importer.program import SCHEMA_VERSION

_MODULE_FIELD: Final = 3
#: Custom calls that make jaxlib's partitioner worth its time for one device too: it takes them out.
_SHARDING_TARGETS: Final = (b"Sharding", b"SPMDFullToShardShape", b"SPMDShardToFullShape")
_MEMORY_KIND: Final = "mhlo.memory_kind"
_LAYOUT_MODE: Final = "mhlo.layout_mode"
_PLAIN_LAYOUTS: Final = frozenset({"default", "auto"})


@dataclass(frozen=True)
class _Converted:
    """A graph for one device, and what the envelope says of its arguments and outputs. Empty: nothing."""

    module: bytes
    argument_shardings: Sequence[bytes] = ()
    output_shardings: Sequence[bytes] = ()
    argument_memory_kinds: Sequence[str] = ()
    output_memory_kinds: Sequence[str] = ()


def convert(format: str, code: bytes, compile_options: bytes) -> bytes:
    """A serialized flagos.Program.

    `format` is "mlir" (StableHLO artifact or text) or "hlo" (serialized HloModuleProto); `compile_options` a serialized
    CompileOptionsProto. Raises the errors of jax/errors.py, each with a status code. Any thread may call it.
    """
    options = parse(compile_options)
    converters = {"mlir": _from_stablehlo, "hlo": _from_hlo}
    if format not in converters:
        raise UnknownProgramFormat(format=format)
    return _envelope(converters[format](code, options), options, compile_options)


def _from_stablehlo(code: bytes, options: CompileOptions) -> _Converted:
    # Partitioned, constants are parts of themselves.
    alone = options.num_partitions == 1
    try:
        without = take_out(code) if alone else Without(code, ())
        module = jax_internals.stablehlo_to_hlo(without.code)
    except RuntimeError as error:
        raise _malformed("StableHLO", error) from error
    argument_kinds, output_kinds = _memory_kinds(without.code)
    if alone and not _has_sharding_constructs(module):
        return _Converted(put_back(module, without.constants), (), (), argument_kinds, output_kinds)
    return _partitioned(partition(code, options), options, argument_kinds, output_kinds)


def _from_hlo(code: bytes, options: CompileOptions) -> _Converted:
    try:
        jax_internals.check_hlo(code)
        if options.num_partitions == 1 and not _has_sharding_constructs(code):
            return _Converted(code)
        stablehlo = jax_internals.hlo_to_stablehlo(code)
    except RuntimeError as error:
        raise _malformed("HLO", error) from error
    return _partitioned(partition(stablehlo, options), options, (), ())


def _malformed(format: str, error: RuntimeError) -> MalformedGraph:
    return MalformedGraph(
        format=format, reason=str(error).strip().replace("\n", "; "), version=jax_internals.JAXLIB_VERSION
    )


def _partitioned(
    result: Partitioned, options: CompileOptions, argument_kinds: Sequence[str], output_kinds: Sequence[str]
) -> _Converted:
    if options.num_partitions == 1:
        return _Converted(result.module, (), (), argument_kinds, output_kinds)
    return _Converted(result.module, result.argument_shardings, result.output_shardings, argument_kinds, output_kinds)


def _has_sharding_constructs(module: bytes) -> bool:
    """Whether a serialized module calls a marker of the partitioner; a name that only looks like one costs time."""
    if _SHARDY_TARGET.search(module) is not None:
        return True
    return any(_string_field(target) in module for target in _SHARDING_TARGETS)


# A custom_call_target that starts so. Shardy's frontend attributes, which jaxlib 0.11 puts into every module, are none.
_SHARDY_TARGET = re.compile(rb"\xe2\x01.xla\.sdy\.", re.DOTALL)


def _string_field(text: bytes) -> bytes:
    """How protobuf writes HloInstructionProto.custom_call_target (field 28, length-delimited)."""
    return b"\xe2\x01" + bytes([len(text)]) + text


# ---- What StableHLO says of arguments and results beyond their types -----------------------------------------------


def _memory_kinds(code: bytes) -> tuple[Sequence[str], Sequence[str]]:
    """The memory kinds of arguments and outputs, "" for the default; both empty where none is named.

    Raises UnsupportedArrayLayout for an argument or output with a layout of its own.
    """
    # Strings lie in the artifact as they are: a search saves parsing the usual program twice.
    if _MEMORY_KIND.encode() not in code and _LAYOUT_MODE.encode() not in code:
        return (), ()
    arguments, results = jax_internals.main_attributes(jax_internals.parse_stablehlo(code))
    for what, values in (("argument", arguments), ("output", results)):
        _check_layouts(what, values)
    return _kinds(arguments), _kinds(results)


def _kinds(values: Iterable[dict[str, str]]) -> Sequence[str]:
    kinds = [attributes.get(_MEMORY_KIND, "") for attributes in values]
    return kinds if any(kinds) else ()


def _check_layouts(what: str, values: Iterable[dict[str, str]]) -> None:
    for index, attributes in enumerate(values):
        layout = attributes.get(_LAYOUT_MODE, "default")
        if layout not in _PLAIN_LAYOUTS and not _is_row_major(layout):
            raise UnsupportedArrayLayout(layout=layout, place=f"{what} {index} of the program")


def _is_row_major(layout: str) -> bool:
    """Whether a layout in XLA's text form, "{1,0}" with the minor dimension first, is the row-major one."""
    inner = layout.strip().removeprefix("{").removesuffix("}").strip()
    try:
        minor_to_major = [int(number) for number in inner.split(",")] if inner else []
    except ValueError:
        return False
    return minor_to_major == list(range(len(minor_to_major)))[::-1]


# ---- The envelope --------------------------------------------------------------------------------------------------


def _envelope(converted: _Converted, options: CompileOptions, compile_options: bytes) -> bytes:
    program = schema.Program(
        schema_version=SCHEMA_VERSION,
        producer=f"jax {jax.__version__}",
        compile_options=compile_options,
        num_replicas=options.num_replicas,
        num_partitions=options.num_partitions,
        device_assignment=options.device_ids,
        argument_shardings=converted.argument_shardings,
        output_shardings=converted.output_shardings,
        argument_memory_kinds=converted.argument_memory_kinds,
        output_memory_kinds=converted.output_memory_kinds,
        options=dict(options.backend_options),
    )
    serialized: bytes = program.SerializeToString()
    # The module goes in as the bytes that it is: parsing a model's constants only to write them again takes seconds.
    head = _varint(_MODULE_FIELD << 3 | 2) + _varint(len(converted.module))
    return b"".join((serialized, head, converted.module))


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)
