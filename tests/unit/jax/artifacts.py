"""What jaxlib hands to a PJRT plugin: StableHLO artifacts and compile options, made as jaxlib makes them."""

from __future__ import annotations

from typing import Any

import jaxlib._jax as _jax
import numpy as np
from jax._src.lib import xla_client

from flagos_backend.frontends.jax.convert import convert
from flagos_backend.importer import schema

#: The oldest StableHLO that a plugin of twelve weeks must read: what jaxlib 0.10.2 writes for one that names none.
STABLEHLO = "1.13.7"


def artifact(lowered: Any) -> bytes:
    code: bytes = _jax.mlir.serialize_portable_artifact(lowered.compiler_ir(), STABLEHLO, True)
    return code


def compile_options(
    *,
    replicas: int = 1,
    partitions: int = 1,
    ids: Any = None,
    outputs: int = 1,
    arguments: int = 1,
    overrides: dict[str, Any] | None = None,
) -> bytes:
    options = xla_client.CompileOptions()
    build = options.executable_build_options
    build.num_replicas, build.num_partitions = replicas, partitions
    build.use_spmd_partitioning = build.use_shardy_partitioner = partitions > 1
    ids = np.arange(replicas * partitions).reshape(replicas, partitions) if ids is None else np.array(ids)
    build.device_assignment = xla_client.DeviceAssignment.create(ids)
    build.allow_spmd_sharding_propagation_to_parameters = [False] * arguments
    build.allow_spmd_sharding_propagation_to_output = [True] * outputs
    options.env_option_overrides = list((overrides or {}).items())
    data: bytes = options.SerializeAsString()
    return data


def program(lowered: Any, **options: Any) -> Any:
    """The flagos.Program of something lowered."""
    return schema.Program.FromString(convert("mlir", artifact(lowered), compile_options(**options)))


def instructions(program: Any) -> list[Any]:
    return [instruction for computation in program.module.computations for instruction in computation.instructions]


def opcodes(program: Any) -> set[str]:
    return {instruction.opcode for instruction in instructions(program)}
