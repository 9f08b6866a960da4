"""Programs for several devices to one program per device: jaxlib's own XLA runs Shardy and the SPMD partitioner.

A private CPU client compiles the program with only the partitioner's passes enabled; the module is taken between the
passes and the code generator, which never runs. See convert.py for what comes before and after.
"""

from __future__ import annotations

import contextlib
import functools
import re
import secrets
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from flagos_backend.frontends.jax import callbacks, jax_internals
from flagos_backend.frontends.jax.compile_options import CompileOptions
from flagos_backend.frontends.jax.errors import PartitioningFailed, UnsupportedPartitioning
from flagos_backend.importer import schema
from flagos_backend.importer.shapes import write_shape
from flagos_backend.ir.types import TupleShape

_NAME_PREFIX: Final = "flagos_partition_"
_NAME: Final = re.compile(rb"flagos_partition_[0-9a-f]{16}")
#: XLA's name for the pass that shows modules to register_transform.
_TRANSFORM_PASS: Final = "apply-xla-transforms"
#: The passes that partition, and those that tidy up after them. Everything else is the backend's work.
_PASSES: Final = (
    "strip-memory-placement-annotations",
    "flatten-call-graph",
    "call-inliner",  # without it Shardy reduces what is marked unreduced around each call
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


#: From jaxlib 0.11 on that pass has a number, counting the compiles of all programs of the process. Past this one,
#: modules are compiled to the end, which costs time, and which XLA's CPU cannot do for reductions of bfloat16.
_LARGEST_NUMBER: Final = 20_000


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
    if proto.host_program_shape.result == write_shape(TupleShape(())):
        return []  # XLA writes one sharding for no element
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
    with _modules.expect() as expected:
        name = jax_internals.rename_module(module, expected.name)
        try:
            client = _client(options.num_replicas * options.num_partitions)
            executable = jax_internals.compile_on_client(client, module, _native_options(options))
            # A jaxlib that does not show modules compiled this one to the end, with the same passes.
            expected.module = expected.module or jax_internals.partitioned_module(executable)
        except RuntimeError:
            if expected.module is None:
                raise
    proto = schema.HloModuleProto.FromString(expected.module)
    proto.name = name or proto.name
    _name_callbacks(proto)
    return proto


@dataclass
class _Expected:
    """A module that is being compiled under a name of its own, and its bytes once XLA has shown them."""

    name: str
    module: bytes | None = None


class _Modules:
    """The modules that XLA shows, told apart by name: also those of programs that compile just now on JAX's own CPU."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._expected: dict[bytes, _Expected] = {}
        self._shown = self._take
        # jaxlib copies and drops references to the function without holding the GIL. So many stay here that no count
        # which went wrong in that way comes near zero.
        self._references = [self._shown] * 16384

    @contextlib.contextmanager
    def expect(self) -> Iterator[_Expected]:
        """Within it, a module with the name that it gives is taken and its compile is ended."""
        expected = _Expected(f"{_NAME_PREFIX}{secrets.token_hex(8)}")
        key = expected.name.encode()
        with self._lock:
            if not self._expected:
                jax_internals.register_transform(_NAME_PREFIX, self._shown)
            self._expected[key] = expected
        try:
            yield expected
        finally:
            with self._lock:
                del self._expected[key]
                if not self._expected:
                    jax_internals.clear_transform(_NAME_PREFIX)

    def _take(self, module: bytes) -> None:
        match = _NAME.search(module)
        expected = self._expected.get(match[0]) if match is not None else None
        if expected is not None:
            expected.module = module
            raise _TakenError


_modules = _Modules()


def _name_callbacks(proto: Any) -> None:
    """Gives host callbacks their own name again, which XLA's partitioners do not know."""
    for computation in proto.computations:
        for instruction in computation.instructions:
            if instruction.custom_call_target in (callbacks.PLACEHOLDER, callbacks.PARTITIONED_PLACEHOLDER):
                instruction.custom_call_target = callbacks.TARGET


@functools.cache
def _enabled_passes() -> str:
    # In some jaxlibs what shows the module is a pass with the name that it was registered under.
    passes = [*_PASSES, _NAME_PREFIX]
    if jax_internals.numbers_transforms():
        passes += [f"{_TRANSFORM_PASS}-{number}" for number in range(_LARGEST_NUMBER)]
    return ",".join(passes)


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
    build.debug_options.xla_enable_hlo_passes_only = _enabled_passes()
    build.debug_options.xla_dump_to = ""
    return native
