"""Random programs of 16-bit floats, for JAX and for an oracle that computes in float64 and rounds where the rule of
flagos_backend/codegen/transforms/excess_precision.py says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import random

DTYPES = {"bfloat16": np.dtype(ml_dtypes.bfloat16), "float16": np.dtype(np.float16)}
#: Digits of a type, and the exponent of its least normal number as of math.frexp.
_FORMATS = {"bfloat16": (8, -125), "float16": (11, -13), "float32": (24, -125)}


def rounded(x: np.ndarray, kind: str) -> np.ndarray:
    """float64 to the nearest numbers of ``kind``, ties to even: in one step, unlike conversions by way of float32."""
    digits, least = _FORMATS[kind]
    with np.errstate(all="ignore"):
        _, exponent = np.frexp(x)
        step = np.ldexp(1.0, np.maximum(exponent, least) - digits)
        nearest = np.where(np.isfinite(x), np.rint(x / step) * step, x)
        largest = float(jnp.finfo(kind).max)
        return np.where(np.abs(nearest) > largest, np.copysign(np.inf, nearest), nearest)


class Rule(int):
    """How an operation reads 16-bit floats that have more digits than their type, and what becomes of the result."""


#: Reads digits and makes digits; reads digits and passes them on; reads what is rounded, and makes what needs no
#: rounding; reads digits, and rounds by the program's own words; reads what is rounded, and makes digits in float32.
ROUNDS, PASSES, JUMPS, CONVERTS, REDUCTIONS = map(Rule, range(5))


@dataclass(frozen=True)
class Operation:
    rule: Rule
    arity: int
    of_jax: Callable[..., jax.Array]
    of_float64: Callable[..., np.ndarray]


def _product_in_f32(x: jax.Array, y: jax.Array) -> jax.Array:
    return (x.astype(jnp.float32) * y.astype(jnp.float32)).astype(x.dtype)


def _chosen(xp: Any) -> Callable[..., Any]:
    return lambda c, d, x, y: xp.where(c < d, x, y)


#: Divisors are no zeros, whose sign is not always defined. Sums are of whole numbers, and so exact in any order.
OPERATIONS: dict[str, Operation] = {
    "add": Operation(ROUNDS, 2, jnp.add, np.add),
    "subtract": Operation(ROUNDS, 2, jnp.subtract, np.subtract),
    "multiply": Operation(ROUNDS, 2, jnp.multiply, np.multiply),
    "divide": Operation(
        ROUNDS, 2, lambda x, y: x / jnp.maximum(jnp.abs(y), 0.5), lambda x, y: x / np.maximum(np.abs(y), 0.5)
    ),
    "sqrt": Operation(ROUNDS, 1, lambda x: jnp.sqrt(jnp.abs(x)), lambda x: np.sqrt(np.abs(x))),
    "scale": Operation(ROUNDS, 1, lambda x: x * 0.3125, lambda x: x * 0.3125),
    "maximum": Operation(PASSES, 2, jnp.maximum, np.maximum),
    "negate": Operation(PASSES, 1, jnp.negative, np.negative),
    "clamp": Operation(PASSES, 1, lambda x: jnp.clip(x, -3, 3), lambda x: np.clip(x, -3, 3)),
    "choose": Operation(PASSES, 4, _chosen(jnp), _chosen(np)),
    "floor": Operation(JUMPS, 1, jnp.floor, np.floor),
    "remainder": Operation(JUMPS, 1, lambda x: jax.lax.rem(x, jnp.full_like(x, 0.75)), lambda x: np.fmod(x, 0.75)),
    "product in f32": Operation(CONVERTS, 2, _product_in_f32, np.multiply),
    "maximum of rows": Operation(
        REDUCTIONS, 1, lambda x: jnp.broadcast_to(x.max(-1, keepdims=True), x.shape), lambda x: x.max(-1, keepdims=True)
    ),
    "sum of rows": Operation(
        REDUCTIONS,
        1,
        lambda x: jnp.broadcast_to(jnp.floor(jnp.clip(x, -8, 8)).sum(-1, keepdims=True), x.shape),
        lambda x: np.floor(np.clip(x, -8, 8)).sum(-1, keepdims=True),
    ),
}


@dataclass(frozen=True)
class Program:
    """``steps``: the name of an operation, and the numbers of its operands: arguments first, then results."""

    kind: str
    arguments: int
    steps: tuple[tuple[str, tuple[int, ...]], ...]

    def __call__(self, *arguments: jax.Array) -> jax.Array:
        values = list(arguments)
        for name, operands in self.steps:
            values.append(OPERATIONS[name].of_jax(*(values[n] for n in operands)))
        return values[-1]

    def expected(self, arguments: Sequence[np.ndarray], *, excess: bool) -> np.ndarray:
        """``excess``: of a program that is one kernel."""
        held = [a.astype(np.float64) for a in arguments]
        with np.errstate(all="ignore"):
            for name, operands in self.steps:
                operation = OPERATIONS[name]
                read = [held[n] for n in operands]
                if operation.rule in (JUMPS, REDUCTIONS):
                    read = [rounded(x, self.kind) for x in read]
                if name == "choose":
                    read[:2] = (rounded(x, self.kind) for x in read[:2])
                value = np.broadcast_to(operation.of_float64(*read), read[0].shape)
                value = rounded(value, "float32")
                held.append(value if excess and operation.rule in (ROUNDS, PASSES) else rounded(value, self.kind))
        return rounded(held[-1], self.kind).astype(DTYPES[self.kind])


def random_program(
    rng: np.random.Generator, kind: str, *, reductions: bool, arguments: int = 3, steps: int = 12
) -> Program:
    """Each step reads the one before, and whatever else."""
    names = [name for name, operation in OPERATIONS.items() if reductions or operation.rule is not REDUCTIONS]
    made: list[tuple[str, tuple[int, ...]]] = []
    for number in range(arguments - 1, arguments + steps - 1):
        name = str(rng.choice(names))
        others = rng.integers(0, number + 1, OPERATIONS[name].arity)
        others[rng.integers(len(others))] = number
        made.append((name, tuple(map(int, others))))
    return Program(kind, arguments, tuple(made))


def random_arguments(rng: np.random.Generator, program: Program) -> list[np.ndarray]:
    shape = (7, 65)
    values = (rng.standard_normal(shape) * 4 + np.copysign(0.01, rng.standard_normal(shape)) for _ in range(3))
    return [x.astype(DTYPES[program.kind]) for x in values]


def check(program: Program, arguments: Sequence[np.ndarray], device: jax.Device, *, excess: bool) -> None:
    """Every number on ``device`` is the oracle's."""
    function = jax.jit(program, compiler_options={"xla_allow_excess_precision": excess})
    found = np.asarray(function(*jax.device_put(list(arguments), device)))
    np.testing.assert_array_equal(found, program.expected(arguments, excess=excess), err_msg=repr(program))


N = (512,)
#: Of which no function is computed that may differ in a last bit of float32.
EXACT_DRAWS = frozenset({"uniform", "uniform of a range"})
#: How many numbers of others may be rounded the other way: such a bit decides one of some thousand float16.
_ROUNDED_OTHERWISE = 0.01
#: Each takes a key and a type.
DRAWS: dict[str, Callable[[jax.Array, Any], jax.Array]] = {
    "uniform": lambda key, kind: random.uniform(key, N, kind),
    "uniform of a range": lambda key, kind: random.uniform(key, N, kind, -2.5, 7),
    "normal": lambda key, kind: random.normal(key, N, kind),
    "truncated normal": lambda key, kind: random.truncated_normal(key, -2, 2, N, kind),
    "gumbel": lambda key, kind: random.gumbel(key, N, kind),
    "exponential": lambda key, kind: random.exponential(key, N, kind),
    "laplace": lambda key, kind: random.laplace(key, N, kind),
    "logistic": lambda key, kind: random.logistic(key, N, kind),
    "cauchy": lambda key, kind: random.cauchy(key, N, kind),
    "maxwell": lambda key, kind: random.maxwell(key, N, kind),
    "lognormal": lambda key, kind: random.lognormal(key, 0.5, N, kind),
}


def check_draws(
    generator: str, names: Sequence[str], kinds: Sequence[str], device: jax.Device, cpu: jax.Device
) -> None:
    """Numbers on ``device`` are those of JAX's CPU, which rounds each result where it computes one operation at a time:
    in a compiled program it contracts products and sums, and may keep digits itself."""
    words = {"threefry2x32": 2}.get(generator, 4)
    data = np.random.default_rng(words).integers(0, 2**32, words, np.uint32)

    def draw(data: jax.Array) -> dict[str, jax.Array]:
        key = random.wrap_key_data(data, impl=generator)
        return {f"{name} of {kind}": DRAWS[name](key, jnp.dtype(kind)) for name in names for kind in kinds}

    ours = jax.device_get(jax.jit(draw)(jax.device_put(data, device)))
    with jax.disable_jit(), jax.default_device(cpu):
        theirs = jax.device_get(draw(jax.device_put(data, cpu)))
    for name, numbers in theirs.items():
        assert ours[name].dtype == numbers.dtype, name
        bits = f"uint{numbers.dtype.itemsize * 8}"
        allowed = 0 if name.rpartition(" of ")[0] in EXACT_DRAWS else _ROUNDED_OTHERWISE
        assert np.mean(ours[name].view(bits) != numbers.view(bits)) <= allowed, name
