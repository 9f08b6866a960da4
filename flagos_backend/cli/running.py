"""Random arguments for a program, and one run of it with its times. For the subcommands that run programs."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack

import numpy as np

from flagos_backend.cli.failure import CommandFailed
from flagos_backend.ir.types import ArrayShape, ElementType
from plugin_abi.host import Buffer, Executable
from plugin_abi.host import ElementType as AbiElementType

_NUMPY_FLOATS = {ElementType.F16: "<f2", ElementType.F32: "<f4", ElementType.F64: "<f8"}


def run_once(executable: Executable, arguments: Sequence[Buffer]) -> tuple[float, float]:
    """Seconds until the launch returned, and until its outputs were there. No argument is given up."""
    began = time.perf_counter()
    outputs, events = executable.execute([list(arguments)], non_donatable=range(len(arguments)))
    launched = time.perf_counter()
    for event in events:
        event.wait()
    ended = time.perf_counter()
    for handle in (*outputs[0], *events):
        handle.close()
    return launched - began, ended - began


def random_arguments(executable: Executable, shapes: Sequence[object], seed: int, stack: ExitStack) -> list[Buffer]:
    """Random arrays of ``shapes`` in the memory of the executable's first device, until ``stack`` is closed. Raises
    CommandFailed for what is no array."""
    rng = np.random.default_rng(seed)
    memory = executable.describe().devices[0].default_memory
    buffers = []
    for number, shape in enumerate(shapes):
        if not isinstance(shape, ArrayShape) or shape.element_type is ElementType.TOKEN:
            raise CommandFailed(f"parameter {number} is {shape}; bench gives arrays only")
        data = random_bytes(shape, rng)
        buffer = memory.from_host(data, shape.dims, AbiElementType(shape.element_type))
        buffers.append(stack.enter_context(buffer))
    return buffers


def random_bytes(shape: ArrayShape, rng: np.random.Generator) -> bytes:
    """A dense array's bytes: floats in [-1, 1), integers and booleans 0 or 1, so that any of them may be an index."""
    kind, count = shape.element_type, int(np.prod(shape.dims, dtype=np.int64))
    if kind.is_complex:
        return random_bytes(ArrayShape(kind.real, (2 * count,)), rng)
    values = rng.uniform(-1, 1, count)
    if kind in _NUMPY_FLOATS:
        return values.astype(_NUMPY_FLOATS[kind]).tobytes()
    if kind is ElementType.BF16:  # the upper half of a float32
        return (values.astype("<f4").view("<u4") >> 16).astype("<u2").tobytes()
    if kind.is_float:  # small non-negative bit patterns are small finite numbers in each 8- and 4-bit format
        return rng.integers(0, 8, count, dtype=np.uint8).tobytes()
    if kind is ElementType.PRED or kind.is_integer:
        return (values > 0).astype(f"<u{kind.bytes}").tobytes()
    raise CommandFailed(f"there are no random values of the type {kind.name}")
