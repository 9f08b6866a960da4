"""Time a program on random arguments: compiling it, launching it, and running it to the end."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from contextlib import ExitStack

import numpy as np

from flagos_backend.cli.failure import CommandFailed, WrongUsage
from flagos_backend.cli.session import add_program_argument, compile_file
from flagos_backend.importer.program import import_program
from flagos_backend.ir.types import ArrayShape, ElementType
from plugin_abi.host import Buffer, Executable
from plugin_abi.host import ElementType as AbiElementType

_NUMPY_FLOATS = {ElementType.F16: "<f2", ElementType.F32: "<f4", ElementType.F64: "<f8"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_program_argument(parser)
    parser.add_argument("--rounds", type=int, default=20, help="how often it is run (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the random arguments (default: %(default)s)")
    parser.add_argument("--vs", choices=("cpu", "cuda"), help="run it in turns with XLA's own platform, and compare")
    parser.add_argument("--json", action="store_true", help="with --vs: the comparison as JSON alone")


def run(options: argparse.Namespace) -> int:
    if options.rounds < 1:
        raise CommandFailed(f"--rounds {options.rounds}: at least one round is needed")
    if options.vs:
        from flagos_backend.cli.versus import compare  # takes what is below from here

        found = compare(options.path, options.vs, options.rounds, options.seed)
        print(found.to_json() if options.json else found.text())
        return 0
    if options.json:
        raise WrongUsage("--json is for comparisons; add --vs")
    with compile_file(options.path) as compiled, ExitStack() as stack:
        print(f"compile  {compiled.seconds * 1e3:10.3f} ms, with the start of the backend")
        began = time.perf_counter()
        Executable.compile(compiled.executable.context, compiled.program).close()
        print(f"again    {(time.perf_counter() - began) * 1e3:10.3f} ms")
        if len(compiled.executable.describe().devices) != 1:
            raise CommandFailed(f"{options.path} is a program for several devices; bench runs programs for one")
        parameters = import_program(compiled.program).module.entry.parameters
        arguments = random_arguments(compiled.executable, [p.shape for p in parameters], options.seed, stack)
        launches, totals = zip(
            *(run_once(compiled.executable, arguments) for _ in range(options.rounds + 1)), strict=True
        )
    print(f"first    {totals[0] * 1e3:10.3f} ms")
    for name, times in (("launch", launches[1:]), ("run", totals[1:])):
        print(f"{name:8} {statistics.median(times) * 1e3:10.3f} ms median, {min(times) * 1e3:.3f} ms least")
    return 0


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
