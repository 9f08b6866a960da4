"""CompileOptionsProto as a value: how many devices, which ones, and what the user asks of this backend."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from google.protobuf.message import DecodeError

from flagos_backend.frontends.jax import jax_internals
from flagos_backend.frontends.jax.errors import (
    InvalidCompileOption,
    MalformedCompileOptions,
    UnknownCompileOption,
    UnsupportedPartitioning,
)
from flagos_backend.importer import schema
from flagos_backend.importer.options import EXCESS_PRECISION

logger = logging.getLogger("flagos.jax")

#: XLA's options that jit(compiler_options=...) may give and that this backend follows, by its own names for them.
FOLLOWED_OPTIONS: Final[Mapping[str, str]] = {"xla_allow_excess_precision": EXCESS_PRECISION}
MAX_PARTITIONS: Final = 8192


@dataclass(frozen=True)
class CompileOptions:
    """What a compile needs to know. `native` is jaxlib's object, for the partitioner."""

    native: Any
    num_replicas: int
    num_partitions: int
    #: [num_replicas][num_partitions], flat; empty: the program may run on any device.
    device_ids: Sequence[int]
    backend_options: Mapping[str, str]


def parse(data: bytes) -> CompileOptions:
    """Reads a serialized CompileOptionsProto. Raises MalformedCompileOptions, UnsupportedPartitioning,
    UnknownCompileOption and InvalidCompileOption."""
    try:
        # jaxlib's own parser takes what it understands of malformed bytes and leaves out the rest.
        schema.CompileOptionsProto.FromString(data)
        native = jax_internals.parse_compile_options(data)
        replicas, partitions = max(native.num_replicas, 1), max(native.num_partitions, 1)
        device_ids = _device_ids(native, replicas, partitions)
    except (RuntimeError, ValueError, DecodeError) as error:
        raise MalformedCompileOptions(reason=error) from error
    _check_partitioning(native, partitions)
    return CompileOptions(native, replicas, partitions, device_ids, _overrides(native))


def _device_ids(native: Any, replicas: int, partitions: int) -> Sequence[int]:
    """Device ids by replica and partition. Raises ValueError where the assignment is for another number of them."""
    if native.compile_portable_executable or native.device_assignment is None:
        return ()
    proto = schema.DeviceAssignmentProto.FromString(native.device_assignment.serialize())
    columns = [list(computation.replica_device_ids) for computation in proto.computation_devices]
    if len(columns) != partitions or any(len(column) != replicas for column in columns):
        raise ValueError(
            f"device_assignment is for {proto.replica_count} replicas of {proto.computation_count} partitions, "
            f"the program for {replicas} of {partitions}"
        )
    return [columns[partition][replica] for replica in range(replicas) for partition in range(partitions)]


def _check_partitioning(native: Any, partitions: int) -> None:
    build = native.executable_build_options
    if partitions > MAX_PARTITIONS:
        reason, cure = f"{MAX_PARTITIONS} is the limit", "Use fewer devices"
    elif partitions > 1 and build.use_auto_spmd_partitioning:
        reason, cure = "automatic SPMD partitioning is not available", "Annotate the shardings"
    elif partitions > 1 and not build.use_spmd_partitioning:
        reason, cure = "it asks for one program per partition (MPMD)", "Set use_spmd_partitioning"
    else:
        return
    raise UnsupportedPartitioning(partitions=partitions, reason=reason, cure=cure)


# ---- jit(compiler_options=...) -------------------------------------------------------------------------------------


def _overrides(native: Any) -> dict[str, str]:
    """The options for this backend. All are XLA's, which checks them; those that are not followed have no effect."""
    overrides = dict(native.env_option_overrides)
    unknown = sorted(name for name in overrides if not name.startswith("xla_"))
    if unknown:
        known = f"{', '.join(sorted(FOLLOWED_OPTIONS))}, and XLA's other debug options, which it accepts and ignores"
        raise UnknownCompileOption(name=unknown[0], known=known)
    if overrides:
        _check_xla_options(overrides)
    ignored = sorted(overrides.keys() - FOLLOWED_OPTIONS.keys())
    if ignored:
        logger.info("compiler_options %s steer XLA; flagos ignores them", ", ".join(ignored))
    return {FOLLOWED_OPTIONS[name]: _switch(overrides[name]) for name in overrides.keys() & FOLLOWED_OPTIONS.keys()}


def _switch(value: Any) -> str:
    """1 or 0 for what XLA takes as a boolean: one, or its text."""
    return str(int(str(value) == "True"))


_EMPTY_PROGRAM: Final = b"module @empty { func.func @main() { return } }"


def _check_xla_options(overrides: Mapping[str, Any]) -> None:
    """Raises InvalidCompileOption with XLA's own words for a debug option that it does not know or a wrong value."""
    options = jax_internals.new_compile_options()
    options.env_option_overrides = list(overrides.items())
    try:
        jax_internals.compile_on_client(jax_internals.new_cpu_client(1), _EMPTY_PROGRAM, options)
    except RuntimeError as error:
        raise InvalidCompileOption(reason=str(error)) from error
