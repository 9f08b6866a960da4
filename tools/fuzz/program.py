"""Makes a random well-typed HLO module out of a tape, and the arguments to run it on."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from flagos_backend.ir.hlo import Instruction, Module
from flagos_backend.ir.types import ArrayShape, ElementType
from tools.fuzz import contraction, control, elementwise, movement
from tools.fuzz.scope import NUMPY_DTYPE, Scope, shape_of
from tools.fuzz.tape import Blocks, Tape

Array = np.ndarray[Any, Any]

_MAX_INSTRUCTIONS = 16
_MAX_OUTPUTS = 8


@dataclass(frozen=True)
class Program:
    """``blocks`` make the module again; ``seed`` is that of the arguments."""

    module: Module
    blocks: Blocks
    seed: int

    def arguments(self) -> list[Array]:
        return arguments_of(self.module, self.seed)


def random_program(seed: int) -> Program:
    return _program(Tape(random.Random(seed)), seed)


def replayed_program(blocks: Blocks, seed: int) -> Program:
    return _program(Tape(None, blocks), seed)


def _program(tape: Tape, seed: int) -> Program:
    tape.open_block()
    scope = Scope(tape, "main")
    _fill(scope, 1 + tape.below(_MAX_INSTRUCTIONS))
    tape.open_block()
    module = Module(f"fuzz_{seed}", scope.builder.build(scope.builder.tuple(_outputs(scope))))
    return Program(module, tape.blocks, seed)


def _fill(scope: Scope, count: int) -> None:
    """Adds ``count`` random productions; in a replay no more than the tape has blocks for."""
    for _ in range(count):
        if scope.tape.is_empty:
            return
        scope.tape.open_block()
        scope.tape.pick(_PRODUCTIONS)(scope)


def _outputs(scope: Scope) -> list[Instruction]:
    """Values that nobody uses, and some that somebody does: an instruction with two users is fused differently."""
    unused = scope.unused()
    outputs = unused[-_MAX_OUTPUTS:]
    others = [value for value in scope.values if value not in outputs]
    outputs += [others[number] for number in scope.tape.subset(len(others)) if scope.tape.chance(4)]
    return outputs[:_MAX_OUTPUTS] or scope.values[-1:]


def _weighted() -> tuple[Callable[[Scope], Instruction | None], ...]:
    """Each production as often as its weight says."""
    control_flow = tuple(
        (2, partial(make, fill=_fill)) for make in (control.while_loop, control.conditional, control.call)
    )
    tables = (elementwise.PRODUCTIONS, movement.PRODUCTIONS, contraction.PRODUCTIONS, control_flow)
    return tuple(make for table in tables for weight, make in table for _ in range(weight))


_PRODUCTIONS = _weighted()


# ---- arguments ----


def arguments_of(module: Module, seed: int) -> list[Array]:
    """Random arrays for the entry's parameters, each of its own kind of contents; equal seeds give equal arrays."""
    return [
        _argument(shape_of(parameter), np.random.default_rng([seed, number]))
        for number, parameter in enumerate(module.entry.parameters)
    ]


def _argument(shape: ArrayShape, rng: np.random.Generator) -> Array:
    kind, dtype, dims = shape.element_type, NUMPY_DTYPE[shape.element_type], shape.dims
    if kind is ElementType.PRED:
        return np.asarray(rng.integers(0, 2, dims)).astype(bool)
    if kind.is_integer:
        return _integers(kind, dims, rng).astype(dtype)
    with np.errstate(over="ignore", invalid="ignore"):
        if kind.is_complex:
            return np.asarray(_floats(dims, rng, bits=32) + 1j * _floats(dims, rng, bits=32)).astype(dtype)
        return np.asarray(_floats(dims, rng, kind.bits)).astype(dtype)


def _integers(kind: ElementType, dims: tuple[int, ...], rng: np.random.Generator) -> Array:
    low = -(1 << (kind.bits - 1)) if kind.is_signed else 0
    high = low + (1 << kind.bits) - 1
    if rng.integers(3):
        return np.asarray(rng.integers(max(low, -8), min(high, 12) + 1, dims))
    wide = np.uint64 if kind.is_unsigned else np.int64
    values = np.asarray(rng.integers(low, high, dims, dtype=wide, endpoint=True))
    ends = np.asarray(rng.choice(np.array([low, high, 0, 1, high // 2], wide), dims))
    return np.where(rng.integers(0, 4, dims) == 0, ends, values)


def _floats(dims: tuple[int, ...], rng: np.random.Generator, bits: int) -> Array:
    """Normal numbers, small integers, or many magnitudes with special values; no subnormal ones, which XLA flushes."""
    match rng.integers(4):
        case 0:
            return np.asarray(rng.integers(-4, 5, dims)).astype(float)
        case 1:
            values = rng.standard_normal(dims) * 10.0 ** rng.integers(-2, 3 if bits <= 16 else 6, dims)
            special = rng.choice(np.array([np.nan, np.inf, -np.inf, 0.0, -0.0, 1.0]), dims)
            return np.where(rng.integers(0, 8, dims) == 0, special, values)
        case _:
            return np.asarray(rng.standard_normal(dims) * 2)
