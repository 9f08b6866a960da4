"""HLO text compiled and run on the host, beside an interpreter; results compared bit by bit."""

from __future__ import annotations

from collections.abc import Sequence

import ml_dtypes
import numpy as np

from cpu.native.harness import get, put
from flagos_backend.importer import schema
from flagos_backend.importer.export import export_module
from flagos_backend.ir.builder import Builder
from flagos_backend.ir.hlo import Module
from flagos_backend.ir.types import ElementType
from plugin_abi.host import Artifact, Context, Executable

E = ElementType
_SIZE = 1037  # no multiple of a tile or a vector
_NAMES = {E.PRED: np.bool_, E.BF16: ml_dtypes.bfloat16}


def dtype_of(element_type: E) -> np.dtype:
    name = element_type.name.lower()
    kind = {"s": "int", "u": "uint", "f": "float"}.get(name[0], "")
    return np.dtype(_NAMES.get(element_type) or kind + name[1:])


def make(element_type: E, rng: np.random.Generator, size: int = _SIZE) -> np.ndarray:
    """Random values of all magnitudes with the special ones first; floats without denormals, which XLA flushes."""
    dtype = dtype_of(element_type)
    if element_type is E.PRED:
        return rng.integers(0, 2, size).astype(bool)
    if element_type.is_integer:
        info = np.iinfo(dtype)
        values = rng.integers(info.min, info.max, size, dtype=dtype, endpoint=True)
        values[::3] %= 7
        values[:6] = [0, 1, info.max, info.min, info.max // 2, 2]
        return values
    values = rng.standard_normal(size) * 10.0 ** rng.integers(-3, 4, size)
    values[:12] = [0.0, -0.0, 1, -1, np.inf, -np.inf, np.nan, 0.5, -2.5, 1e4, -1e4, 3.0]
    return values.astype(dtype)


def compile_module(context: Context, builder: Builder, root: object) -> tuple[Executable, bytes]:
    module = Module("tiles", builder.build(root))
    hlo = export_module(module)
    message = schema.Program(schema_version=1, producer="tests")
    message.module.MergeFromString(hlo)
    executable = Executable.compile(context, message.SerializeToString())
    assert "runs as native tiles with 0 library calls" in executable.artifact(Artifact.EXPLANATION).decode()
    return executable, hlo


def run(context: Context, executable: Executable, arguments: Sequence[np.ndarray]) -> np.ndarray:
    buffers = [put(context.devices[0].default_memory, np.asarray(a, order="C")) for a in arguments]
    outputs, done = executable.execute([buffers])
    done[0].close()
    return get(outputs[0][0])


def assert_same_bits(ours: np.ndarray, theirs: np.ndarray) -> None:
    """Equal bit for bit, but any NaN equals any other."""
    both_nan = np.isnan(ours.astype(np.float64)) & np.isnan(theirs.astype(np.float64))
    assert np.array_equal(ours[~both_nan].view(np.uint8), np.asarray(theirs)[~both_nan].view(np.uint8))
