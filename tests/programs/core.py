"""What the corpus is made of: argument specs, lowering to HLO bytes, and stock XLA as the oracle that runs them."""

from __future__ import annotations

import functools
import io
import re
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import ml_dtypes
import numpy as np
from jaxlib import _hlo, _jax

from support.older_emitters import overrides

Array = np.ndarray

DTYPES: dict[str, Any] = {
    "pred": np.bool_,
    "bf16": ml_dtypes.bfloat16,
    **{f"s{n}": np.dtype(f"int{n}") for n in (8, 16, 32, 64)},
    **{f"u{n}": np.dtype(f"uint{n}") for n in (8, 16, 32, 64)},
    **{f"f{n}": np.dtype(f"float{n}") for n in (16, 32, 64)},
    "c64": np.complex64,
    "c128": np.complex128,
    "s2": ml_dtypes.int2,
    "u2": ml_dtypes.uint2,
    "s4": ml_dtypes.int4,
    "u4": ml_dtypes.uint4,
    "f8e3m4": ml_dtypes.float8_e3m4,
    "f8e4m3": ml_dtypes.float8_e4m3,
    "f8e4m3b11fnuz": ml_dtypes.float8_e4m3b11fnuz,
    "f8e4m3fn": ml_dtypes.float8_e4m3fn,
    "f8e4m3fnuz": ml_dtypes.float8_e4m3fnuz,
    "f8e5m2": ml_dtypes.float8_e5m2,
    "f8e5m2fnuz": ml_dtypes.float8_e5m2fnuz,
    "f8e8m0fnu": ml_dtypes.float8_e8m0fnu,
    "f4e2m1fn": ml_dtypes.float4_e2m1fn,
}
_SPEC = re.compile(r"(?P<dtype>\w+)\[(?P<dims>[\d,]*)\](?::(?P<kind>\w+))?$")
_SPECIAL = (np.nan, np.inf, -np.inf, 0.0, -0.0, 1.0, -1.0, 0.5, 1e-40, -1e-40, 1e30, -1e30, 2.5, -3.5)


def make_argument(spec: str, rng: np.random.Generator) -> Array:
    """A random array for ``"f32[2,3]"`` or ``"f32[2,3]:kind"``.

    Kinds: ``normal`` (default; integers span their whole range), ``unit`` in (-1, 1), ``positive`` in (0.1, 2),
    ``special`` (NaN, infinities, signed zeros, denormals, the bounds of integers), ``index<n>`` in [-1, n],
    ``small`` integers in [0, 8), ``spd`` (positive definite), ``key`` (threefry key data).
    """
    match = _SPEC.match(spec)
    if match is None:
        raise ValueError(f"bad argument spec {spec!r}")
    dtype = np.dtype(DTYPES[match["dtype"]])
    dims = tuple(int(d) for d in match["dims"].split(",") if d)
    kind = match["kind"] or "normal"
    if kind.startswith("index"):
        return np.asarray(rng.integers(-1, int(kind[5:]) + 1, dims)).astype(dtype)
    if kind == "small":
        return np.asarray(rng.integers(0, 8, dims)).astype(dtype)
    if kind == "spd":
        root = rng.standard_normal(dims) + (1j * rng.standard_normal(dims) if dtype.kind == "c" else 0)
        return (root @ root.conj().swapaxes(-1, -2) + dims[-1] * np.eye(dims[-1])).astype(dtype)
    if dtype == np.bool_:
        return np.asarray(rng.integers(0, 2, dims)).astype(bool)
    if dtype.kind in "iu":
        info = np.iinfo(dtype)
        values = np.asarray(rng.integers(info.min, info.max, dims, dtype=dtype, endpoint=True))
        if kind == "special":
            values = np.asarray(rng.choice(np.array([info.min, info.max, 0, 1, info.max // 2], dtype), dims))
        return values
    if dtype in (ml_dtypes.int2, ml_dtypes.uint2, ml_dtypes.int4, ml_dtypes.uint4):
        info = ml_dtypes.iinfo(dtype)
        return np.asarray(rng.integers(int(info.min), int(info.max) + 1, dims)).astype(dtype)
    if dtype.kind == "c":
        part = np.dtype("f4" if dtype.itemsize == 8 else "f8")
        values = np.empty(dims, dtype)
        values.real, values.imag = (_floats(part, dims, kind, rng) for _ in range(2))
        return values
    return _floats(dtype, dims, kind, rng)


def _floats(dtype: np.dtype, dims: tuple[int, ...], kind: str, rng: np.random.Generator) -> Array:
    if kind == "special":
        values = rng.choice(np.array(_SPECIAL), dims)
    elif kind == "unit":
        values = rng.uniform(-0.99, 0.99, dims)
    elif kind == "positive":
        values = rng.uniform(0.1, 2.0, dims)
    else:
        values = rng.standard_normal(dims) * 3
    with np.errstate(over="ignore", invalid="ignore"):
        return np.asarray(values).astype(dtype)


@dataclass(frozen=True)
class Program:
    """``exact``: two correct executions must agree bit for bit (no transcendental or reassociated float arithmetic)."""

    name: str
    function: Callable[..., Any]
    specs: tuple[str, ...]
    x64: bool = False
    exact: bool = False

    def arguments(self, seed: int = 0) -> tuple[Array, ...]:
        rng = np.random.default_rng([zlib.crc32(self.name.encode()), seed])
        return tuple(make_argument(spec, rng) for spec in self.specs)

    def hlo(self, platform: str = "generic") -> bytes:
        """``platform``: "generic" (a name without rules of its own) gives lowerings that XLA runs anywhere, "cpu"
        JAX's CPU ones, "flagos" what the device is given, custom calls of its own included."""
        with jax.enable_x64(self.x64):
            return _lower(self, platform)


@functools.cache
def _lower(program: Program, platform: str) -> bytes:
    return hlo_bytes(program.function, *program.arguments(), platform=platform)


def hlo_bytes(fn: Callable[..., Any], *args: Any, platform: str = "generic") -> bytes:
    """The serialized HloModuleProto of ``jax.jit(fn)`` at ``args``, converted by jaxlib, before any optimization."""
    lowered = jax.jit(fn, keep_unused=True).trace(*args).lower(lowering_platforms=(platform,))
    bytecode = io.BytesIO()
    lowered.compiler_ir("stablehlo").operation.write_bytecode(bytecode)
    computation = _jax.mlir.mlir_module_to_xla_computation(
        bytecode.getvalue(), use_tuple_args=False, return_tuple=False
    )
    return computation.as_serialized_hlo_module_proto()


@functools.lru_cache(maxsize=16)
def _compile_by_xla(hlo: bytes) -> Any:
    """The latest are kept: tests that run a program at several arguments do so in a row."""
    client = jax.devices("cpu")[0].client
    options = _jax.CompileOptions()
    debug = options.executable_build_options.debug_options
    debug.xla_cpu_enable_fast_math = False
    # An oracle computes what is written. That pass also ends the process (a failed CHECK, jaxlib 0.10.2) at some
    # convolutions with a base dilation of the window's size, whose operands it means to swap.
    debug.xla_disable_hlo_passes = "algsimp"
    options.env_option_overrides = overrides(_hlo.HloModule.from_serialized_hlo_module_proto(hlo).to_string())
    devices = _jax.DeviceList(tuple(client.local_devices()[:1]))
    return client.compile_and_load(_jax.mlir.hlo_to_stablehlo(hlo), devices, options)


def run_on_xla(hlo: bytes, args: Sequence[Any]) -> list[Array]:
    """Runs serialized HLO on one device of jaxlib's CPU client; the flat outputs."""
    executable = _compile_by_xla(hlo)
    device = jax.devices("cpu")[0]
    with jax.enable_x64(True):
        outputs = executable.execute([jax.device_put(arg, device) for arg in args])
        return [np.asarray(output) for output in outputs]


def run_with_jax(program: Program, seed: int = 0) -> list[Array]:
    """The same program through ``jax.jit`` on JAX's CPU: the flat outputs."""
    with jax.enable_x64(program.x64), jax.default_device(jax.devices("cpu")[0]):
        return [np.asarray(leaf) for leaf in jax.tree.leaves(jax.jit(program.function)(*program.arguments(seed)))]


PROGRAMS: dict[str, Program] = {}


def program(*specs: str, name: str = "", x64: bool = False, exact: bool = False) -> Callable[[Any], Any]:
    """Puts the decorated function into the corpus under its own name."""

    def add(function: Callable[..., Any]) -> Callable[..., Any]:
        key = name or function.__name__
        if key in PROGRAMS:
            raise ValueError(f"two programs are called {key}")
        PROGRAMS[key] = Program(key, function, specs, x64, exact)
        return function

    return add


def table(prefix: str, table: dict[str, tuple[Callable[..., Any], Sequence[str]]], exact: bool = False) -> None:
    for key, (function, specs) in table.items():
        program(*specs, name=f"{prefix}_{key}", exact=exact, x64=any("64" in s or "c128" in s for s in specs))(function)
