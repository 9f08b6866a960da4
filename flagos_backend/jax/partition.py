"""Programs for several devices to one program per device: jaxlib's own XLA runs Shardy and the SPMD partitioner.

A private CPU client compiles the program with only the partitioner's passes enabled; the module is taken between the
passes and the code generator, which never runs. See convert.py for what comes before and after.
"""

from __future__ import annotations

import functools
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from flagos_backend.importer import schema
from flagos_backend.jax import callbacks, jax_internals
from flagos_backend.jax.compile_options import CompileOptions
from flagos_backend.jax.errors import PartitioningFailed, UnsupportedPartitioning

#: XLA's name for the pass that shows modules to register_transform.
_TRANSFORM_PASS: Final = "apply-xla-transforms"
#: The passes that partition, and those that tidy up after them. Everything else is the backend's work.
_PASSES: Final = (
    "strip-memory-placement-annotations",
    "flatten-call-graph",
    "shardy-xla",
    "sharding-propagation",
    "spmd-partitioning",
    "control-dep-rewriter",
    "sharding-remover",
    "collective-permute-motion",
    "tuple-simplifier",
    "dce",
    _TRANSFORM_PASS,
)


@dataclass(frozen=True)
class Partitioned:
    """One device's program, and how its arguments and outputs are parts of the whole: serialized OpSharding each."""

    module: bytes
    argument_shardings: Sequence[bytes]
    output_shardings: Sequence[bytes]


def partition(code: bytes, options: CompileOptions) -> Partitioned:
    """Partitions a StableHLO program. Raises UnsupportedPartitioning and PartitioningFailed."""
    if not jax_internals.can_transform_modules():
        reason = f"jaxlib {jax_internals.JAXLIB_VERSION} does not give out partitioned modules"
        cure = "Install jaxlib 0.10.2 or newer"
        raise UnsupportedPartitioning(partitions=options.num_partitions, reason=reason, cure=cure)
    try:
        module = jax_internals.parse_stablehlo(code)
        proto = _run_passes(module, options)
    except (RuntimeError, ValueError) as error:
        reason = str(error).strip().replace("\n", "; ")
        raise PartitioningFailed(partitions=options.num_partitions, reason=reason) from error
    return Partitioned(proto.SerializeToString(), _serialized(proto.spmd_parameters_shardings), _outputs(proto))


def _outputs(proto: Any) -> list[bytes]:
    """The sharding of each element of a tuple result, or of the one array."""
    if not proto.HasField("spmd_output_sharding"):
        return []
    sharding = proto.spmd_output_sharding
    is_tuple = sharding.type == schema.OpSharding.TUPLE
    return _serialized(sharding.tuple_shardings if is_tuple else [sharding])


def _serialized(shardings: Iterable[Any]) -> list[bytes]:
    return [sharding.SerializeToString() for sharding in shardings]


# ---- XLA's passes --------------------------------------------------------------------------------------------------


class _TakenError(Exception):
    """Ends a compile whose module has been taken."""


@functools.cache
def _client(num_devices: int) -> Any:
    return jax_internals.new_cpu_client(num_devices)


def _run_passes(module: Any, options: CompileOptions) -> Any:
    """The HloModuleProto after the passes. Raises RuntimeError with XLA's message."""
    taken: list[bytes] = []
    # XLA shows the modules of all CPU clients, also of one that compiles just now in another thread: the name tells.
    mark = f"flagos_partition_{secrets.token_hex(8)}"
    name = jax_internals.rename_module(module, mark)

    def take(shown: bytes) -> None:
        if mark.encode() in shown:
            taken.append(shown)
            raise _TakenError

    jax_internals.register_transform(mark, take)
    try:
        client = _client(options.num_replicas * options.num_partitions)
        jax_internals.compile_on_client(client, module, _native_options(options))
    except RuntimeError:
        if not taken:
            raise
    finally:
        jax_internals.clear_transform(mark)
    proto = schema.HloModuleProto.FromString(taken[0])
    proto.name = name or proto.name
    _name_callbacks(proto)
    return proto


def _name_callbacks(proto: Any) -> None:
    """Gives host callbacks their own name again, which XLA's partitioners do not know."""
    for computation in proto.computations:
        for instruction in computation.instructions:
            if instruction.custom_call_target in (callbacks.PLACEHOLDER, callbacks.PARTITIONED_PLACEHOLDER):
                instruction.custom_call_target = callbacks.TARGET


def _native_options(options: CompileOptions) -> Any:
    """The program's own options for the private client: its devices, its passes, and no dumps."""
    native = jax_internals.new_compile_options()
    given, build = options.native.executable_build_options, native.executable_build_options
    replicas, partitions = options.num_replicas, options.num_partitions
    build.num_replicas, build.num_partitions = replicas, partitions
    build.use_spmd_partitioning = True
    build.use_shardy_partitioner = given.use_shardy_partitioner
    build.allow_spmd_sharding_propagation_to_parameters = given.allow_spmd_sharding_propagation_to_parameters
    build.allow_spmd_sharding_propagation_to_output = given.allow_spmd_sharding_propagation_to_output
    ids = np.arange(replicas * partitions).reshape(replicas, partitions)
    build.device_assignment = jax_internals.new_device_assignment(ids)
    build.debug_options.xla_enable_hlo_passes_only = ",".join(_PASSES)
    build.debug_options.xla_dump_to = ""
    return native
