"""A corpus of named JAX programs, their HLO bytes, and stock XLA as the oracle that runs them.

``PROGRAMS[name]`` holds a function and its argument specs; ``hlo_bytes`` lowers it, ``run_on_xla`` runs HLO on jaxlib's
CPU client.
"""

from __future__ import annotations

import functools
import io
import re
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import lax
from jaxlib import _jax

Array = np.ndarray

_DTYPES: dict[str, Any] = {
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
    ``special`` (NaN, infinities, signed zeros, denormals, the integer extremes), ``index<n>`` in [-1, n],
    ``small`` integers in [0, 8), ``spd`` (positive definite), ``key`` (threefry key data).
    """
    match = _SPEC.match(spec)
    if match is None:
        raise ValueError(f"bad argument spec {spec!r}")
    dtype = np.dtype(_DTYPES[match["dtype"]])
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
        real, imag = (_floats(part, dims, kind, rng) for _ in range(2))
        return np.asarray(real + 1j * imag if kind != "special" else lax.complex(real, imag)).astype(dtype)
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

    def hlo(self, platform: str = "flagos") -> bytes:
        """``platform`` "flagos" (any name without rules of its own): JAX's generic lowerings; "cpu": its CPU ones."""
        with jax.enable_x64(self.x64):
            return _lower(self, platform)


@functools.cache
def _lower(program: Program, platform: str) -> bytes:
    return hlo_bytes(program.function, *program.arguments(), platform=platform)


def hlo_bytes(fn: Callable[..., Any], *args: Any, platform: str = "flagos") -> bytes:
    """The serialized HloModuleProto of ``jax.jit(fn)`` at ``args``, converted by jaxlib, before any optimization."""
    lowered = jax.jit(fn, keep_unused=True).trace(*args).lower(lowering_platforms=(platform,))
    bytecode = io.BytesIO()
    lowered.compiler_ir("stablehlo").operation.write_bytecode(bytecode)
    computation = _jax.mlir.mlir_module_to_xla_computation(
        bytecode.getvalue(), use_tuple_args=False, return_tuple=False
    )
    return computation.as_serialized_hlo_module_proto()


def run_on_xla(hlo: bytes, args: Sequence[Any], *, optimize: bool = True) -> list[Array]:
    """Runs serialized HLO on one device of jaxlib's CPU client; the flat outputs.

    ``optimize=False`` asks LLVM for no optimization, which makes large programs compile faster.
    """
    client = jax.devices("cpu")[0].client
    options = _jax.CompileOptions()
    debug = options.executable_build_options.debug_options
    if not optimize:
        debug.xla_backend_optimization_level = 0
    debug.xla_cpu_enable_fast_math = False
    devices = client.local_devices()[:1]
    executable = client.compile_and_load(_jax.mlir.hlo_to_stablehlo(hlo), _jax.DeviceList(tuple(devices)), options)
    with jax.enable_x64(True):
        outputs = executable.execute([jax.device_put(arg, devices[0]) for arg in args])
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


def _table(prefix: str, table: dict[str, tuple[Callable[..., Any], Sequence[str]]], exact: bool = False) -> None:
    for key, (function, specs) in table.items():
        program(*specs, name=f"{prefix}_{key}", exact=exact, x64=any("64" in s or "c128" in s for s in specs))(function)


# Elementwise: one program an operation and type, random and special values together.

_FLOAT_UNARY = {
    "abs": lax.abs,
    "acos": lax.acos,
    "acosh": lax.acosh,
    "asin": lax.asin,
    "asinh": lax.asinh,
    "atan": lax.atan,
    "atanh": lax.atanh,
    "bessel_i1e": lax.bessel_i1e,
    "cbrt": lax.cbrt,
    "ceil": lax.ceil,
    "cos": lax.cos,
    "cosh": lax.cosh,
    "digamma": lax.digamma,
    "erf": lax.erf,
    "erf_inv": lax.erf_inv,
    "erfc": lax.erfc,
    "exp": lax.exp,
    "exp2": lax.exp2,
    "expm1": lax.expm1,
    "floor": lax.floor,
    "is_finite": lax.is_finite,
    "lgamma": lax.lgamma,
    "log": lax.log,
    "log1p": lax.log1p,
    "logistic": lax.logistic,
    "neg": lax.neg,
    "round_afz": lambda x: lax.round(x, lax.RoundingMethod.AWAY_FROM_ZERO),
    "round_even": lambda x: lax.round(x, lax.RoundingMethod.TO_NEAREST_EVEN),
    "rsqrt": lax.rsqrt,
    "sign": lax.sign,
    "sin": lax.sin,
    "sinh": lax.sinh,
    "sqrt": lax.sqrt,
    "tan": lax.tan,
    "tanh": lax.tanh,
}
_table(
    "unary",
    {f"{op}_f32": (lambda x, y, f=f: (f(x), f(y)), ("f32[33]", "f32[64]:special")) for op, f in _FLOAT_UNARY.items()},
)
_table("unary", {f"{op}_f16": (_FLOAT_UNARY[op], ("f16[64]",)) for op in ("exp", "tanh", "floor", "logistic")})
_table("unary", {f"{op}_bf16": (_FLOAT_UNARY[op], ("bf16[64]",)) for op in ("exp", "tanh", "floor", "rsqrt")})
_table("unary", {f"{op}_f64": (_FLOAT_UNARY[op], ("f64[64]:special",)) for op in ("exp", "log1p", "sin", "sqrt")})
_table(
    "unary",
    {
        f"{op}_{t}": (f, (f"{t}[40]",))
        for t in ("s8", "u16", "s32", "u64")
        for op, f in {
            "abs": lax.abs if t[0] == "s" else lambda x: x + x,
            "clz": lax.clz,
            "neg": lax.neg,
            "not": lax.bitwise_not,
            "popcnt": lax.population_count,
            "sign": lax.sign,
        }.items()
    },
    exact=True,
)
_table(
    "unary",
    {
        f"{op}_c64": (f, ("c64[32]",))
        for op, f in {
            **{k: _FLOAT_UNARY[k] for k in ("abs", "cos", "exp", "log", "sqrt", "rsqrt", "tan", "tanh", "sign", "neg")},
            **{k: _FLOAT_UNARY[k] for k in ("log1p", "expm1", "logistic", "sinh", "acos")},
            "real_imag_conj": lambda x: (lax.real(x), lax.imag(x), lax.conj(x)),
        }.items()
    },
)

_BINARY = {
    "add": lax.add,
    "sub": lax.sub,
    "mul": lax.mul,
    "div": lax.div,
    "max": lax.max,
    "min": lax.min,
    "rem": lax.rem,
}
_BITWISE = {
    "and": lax.bitwise_and,
    "or": lax.bitwise_or,
    "xor": lax.bitwise_xor,
    "shl": lax.shift_left,
    "shr_arithmetic": lax.shift_right_arithmetic,
    "shr_logical": lax.shift_right_logical,
}
_table(
    "binary",
    {
        f"{op}_{t}": (f, (f"{t}[96]:special", f"{t}[96]:special"))
        for t in ("f32", "f64", "bf16", "f16", "s8", "s32", "u8", "u32", "s64", "u64")
        for op, f in _BINARY.items()
    },
    exact=True,
)
_table(
    "binary",
    {
        f"{op}_{t}": (f, (f"{t}[96]", f"{t}[96]:small"))
        for t in ("s8", "u16", "s32", "u64")
        for op, f in _BITWISE.items()
    },
    exact=True,
)
_table(
    "binary",
    {
        "atan2_f32": (lax.atan2, ("f32[64]:special", "f32[64]:special")),
        "pow_f32": (lax.pow, ("f32[64]:special", "f32[64]:special")),
        "nextafter_f32": (lax.nextafter, ("f32[64]:special", "f32[64]:special")),
        "complex_div": (lax.div, ("c64[32]", "c64[32]")),
        "complex_mul": (lax.mul, ("c64[32]", "c64[32]")),
        "complex_pow": (lax.pow, ("c128[32]:positive", "c128[32]:unit")),
        "shift_overflow": (lax.shift_left, ("s32[32]", "s32[32]")),
        "logical_pred": (lambda a, b: (a & b, a | b, a ^ b, ~a, lax.max(a, b)), ("pred[16]", "pred[16]")),
    },
)


@program("f32[64]:special", "f32[64]:special", exact=True)
def compare_all(x, y):
    return x == y, x != y, x < y, x <= y, x > y, x >= y


@program("f32[64]:special", "f32[64]:special", exact=True)
def compare_total_order(x, y):
    return lax.lt_to_p.bind(x, y), lax.le_to_p.bind(x, y), lax.eq_to_p.bind(x, y)


@program("u32[64]:special", "u32[64]:special", "c64[5]", "pred[7]", "pred[7]", exact=True)
def compare_other_types(u, v, c, p, q):
    return u < v, u >= v, c == c, p == q, p != q


@program("pred[4,5]", "f32[4,5]", "f32[4,5]", "pred[]", exact=True)
def select_array_and_scalar(p, x, y, s):
    return lax.select(p, x, y), lax.select_n(s, x, y)


@program("f32[]", "f32[4,5]:special", "f32[]", "f32[4,5]", exact=True)
def clamp_scalar_and_array(low, x, high, other):
    return lax.clamp(low, x, high), lax.clamp(other - 1, x, other + 1)


@program("f32[64]:special", exact=True)
def reduce_precision(x):
    return lax.reduce_precision(x, 5, 10), lax.reduce_precision(x, 8, 7), lax.reduce_precision(x, 4, 3)


# Types

_CONVERT_TYPES = (
    "pred",
    "s8",
    "u8",
    "s16",
    "u16",
    "s32",
    "u32",
    "s64",
    "u64",
    "bf16",
    "f16",
    "f32",
    "f64",
    "c64",
    "c128",
)
for _source in _CONVERT_TYPES:
    _targets = tuple(t for t in _CONVERT_TYPES if not (_source.startswith("c") and not t.startswith("c")))
    program(f"{_source}[40]", f"{_source}[40]:special", name=f"convert_from_{_source}", x64=True, exact=True)(
        lambda x, y, targets=_targets: [lax.convert_element_type(v, _DTYPES[t]) for v in (x, y) for t in targets]
    )

_SMALL_FLOATS = tuple(t for t in _DTYPES if t.startswith(("f8", "f4")))
for _small in _SMALL_FLOATS:
    program(f"{_small}[48]", "f32[48]", "bf16[16]", name=f"convert_{_small}", exact=True)(
        lambda x, y, z, t=_small: (
            lax.convert_element_type(x, np.float32),
            lax.convert_element_type(y, _DTYPES[t]),
            lax.convert_element_type(z, _DTYPES[t]),
            jnp.asarray(np.arange(5), _DTYPES[t]),
        )
    )
for _small in ("s4", "u4", "s2", "u2"):
    program(f"{_small}[24]", "s32[24]", name=f"convert_{_small}", exact=True)(
        lambda x, y, t=_small: (
            lax.convert_element_type(x, np.int32) * 3,
            lax.convert_element_type(y, _DTYPES[t]),
            jnp.asarray(np.arange(3) % 2, _DTYPES[t]),
        )
    )


@program("f32[3,4]", "u8[6,4]", "s64[5]", "f64[2]", x64=True, exact=True)
def bitcast_convert(x, b, w, d):
    return (
        lax.bitcast_convert_type(x, np.uint32),
        lax.bitcast_convert_type(b, np.int32),
        lax.bitcast_convert_type(w, np.uint8),
        lax.bitcast_convert_type(d, np.int64),
        lax.bitcast_convert_type(x, np.float16),
    )


@program(exact=True, x64=True)
def constants_of_every_type():
    values = [np.arange(-3, 4).astype(_DTYPES[t]) for t in _CONVERT_TYPES]
    small = [np.arange(0, 4).astype(_DTYPES[t]) for t in _SMALL_FLOATS]
    special = np.array([np.nan, np.inf, -np.inf, -0.0, 1e-45], np.float32)
    return [jnp.asarray(v) for v in (*values, *small, special, np.zeros((0, 3), np.int16), np.float64(2.5))]


@program(exact=True)
def splat_and_large_constants():
    large = np.arange(60_000, dtype=np.int32).reshape(200, 300) * 7919
    return jnp.full((7, 9), 3.5), jnp.asarray(large), jnp.full((4,), True), jnp.asarray(large.astype(np.float32))


# Shape and data movement


@program("f32[3,4]", "s32[4]", "f32[]", exact=True)
def broadcasts(x, y, z):
    return (
        lax.broadcast_in_dim(x, (2, 3, 5, 4), (1, 3)),
        lax.broadcast_in_dim(y, (4, 6), (0,)),
        jnp.broadcast_to(z, (2, 2)),
        jnp.broadcast_to(x[:, :1], (3, 7)),
        lax.broadcast_in_dim(y, (0, 4), (1,)),
    )


@program("f32[2,3,4]", exact=True)
def reshapes_and_transposes(x):
    return (
        x.reshape(6, 4),
        x.reshape(-1),
        x.transpose(2, 0, 1),
        x.T.reshape(4, 6),
        x[None, ..., None],
        x[:1, :1, :1].squeeze(),
    )


@program("f32[7,9]", "f32[2,9]", exact=True)
def slices_and_concatenate(x, y):
    return x[1:6:2, 2:], lax.concatenate([x, y, x[3:3]], 0), lax.rev(x, (1,)), lax.rev(x, (0, 1)), x[::-2]


@program("f32[4,5]", "f32[]", exact=True)
def pads(x, value):
    return (
        lax.pad(x, value, [(1, 2, 0), (0, 3, 0)]),
        lax.pad(x, value, [(-1, 0, 1), (2, -2, 2)]),
        lax.pad(x, value, [(0, 0, 3), (-3, -2, 0)]),
    )


@program("f32[6,7]", "s32[]:index7", "s32[]:index7", "f32[2,3]", exact=True)
def dynamic_slices(x, i, j, update):
    return lax.dynamic_slice(x, (i, j), (3, 2)), lax.dynamic_update_slice(x, update, (i - 3, j + 40))


@program(exact=True)
def iotas():
    return (
        lax.iota(np.int32, 5),
        lax.broadcasted_iota(np.float32, (2, 3, 4), 1),
        lax.broadcasted_iota(np.uint8, (300, 2), 0),
        lax.broadcasted_iota(jnp.bfloat16, (3, 3), 1),
        lax.broadcasted_iota(np.complex64, (3,), 0),
        jnp.eye(4),
        jnp.tril(jnp.ones((3, 3))),
    )


@program("f32[0,3]", "s32[4,0]", exact=True)
def zero_size_arrays(x, y):
    return (
        x.sum(0),
        x @ jnp.ones((3, 2)),
        jnp.concatenate([y, y], 1),
        x.T.reshape(0),
        x.max(1, initial=-1.0),
        jnp.sort(x, 0),
    )


# Indexing


@program("f32[6,7]", "s32[5]:index6", exact=True)
def gather_take_modes(x, i):
    return [jnp.take(x, i, axis=0, mode=mode) for mode in ("clip", "wrap", "fill")]


@program("f32[6,7]", "s32[3,2]:index6", "s32[4]:index6", exact=True)
def gather_fancy(x, i, j):
    return x[i[:, 0], i[:, 1]], x[:, j], x[j][:, ::2], x.at[i[:, 0]].get(mode="fill", fill_value=-7), x[i]


@program("f32[3,5,4]", "s32[3,2]:index5", exact=True)
def gather_batched(x, i):
    return jax.vmap(lambda row, index: row[index])(x, i), jnp.take_along_axis(x, i[:, :, None], 1)


@program("f32[3,4,5]", "s64[2,6,2]:index4", x64=True, exact=True)
def gather_general(x, i):
    dnums = lax.GatherDimensionNumbers(offset_dims=(1, 3), collapsed_slice_dims=(1,), start_index_map=(2, 1))
    return lax.gather(x, i, dnums, (2, 1, 3), mode="clip")


@program("f32[6,7]", "s32[4]:index6", "f32[4,7]", "f32[4]")
def scatter_modes(x, i, u, v):
    return (
        x.at[i].add(u),
        x.at[i].set(1.5),
        x.at[i].mul(u),
        x.at[i].min(u),
        x.at[i].max(u, mode="drop"),
        x.at[i, i].add(v, mode="clip"),
        x.at[:, i].set(u.T[:6], unique_indices=True),
    )


@program("f32[3,5,4]", "s32[3,2]:index5", "f32[3,2,4]")
def scatter_batched(x, i, u):
    return jax.vmap(lambda row, index, update: row.at[index].add(update))(x, i, u)


@program("s32[8]", "s32[6]:index8", "s32[6]", exact=True)
def scatter_apply_integer(x, i, u):
    return x.at[i].apply(lambda v: v * 3 + 1), x.at[i].add(u), jnp.zeros(8, np.int32).at[i].max(u)


@program("f32[5,4]", "s32[3,1]:index5", "f32[3,4]")
def scatter_general_window(x, i, u):
    dnums = lax.ScatterDimensionNumbers(
        update_window_dims=(1,), inserted_window_dims=(0,), scatter_dims_to_operand_dims=(0,)
    )
    return lax.scatter_add(x, i, u, dnums, mode="fill"), lax.scatter(x, i, u, dnums, mode="clip")


@program("f32[40]", "s32[40]:small")
def segment_sum_and_bincount(x, i):
    return jax.ops.segment_sum(x, i, 8), jnp.bincount(i, length=8), jnp.histogram(x, bins=5)


# Reductions, windows, sorts


@program("f32[5,6,7]")
def reduces(x):
    return x.sum(1), x.max((0, 2)), x.min(), x.prod(0), x.mean(-1), x.var(1), jax.nn.logsumexp(x, 2)


@program("f32[5,6]:special", "s32[5,6]", exact=True)
def arg_reduces(x, y):
    return jnp.argmax(x, 1), jnp.argmin(y, 0), jnp.argmax(y), jnp.nanargmin(jnp.where(jnp.isnan(x), 3.0, x), 1)


@program("pred[5,6]", "s8[5,6]", "u32[4]", exact=True)
def reduce_logical(p, x, u):
    return p.all(1), p.any(), x.sum(0, dtype=np.int8), jnp.bitwise_xor.reduce(u), jnp.bitwise_and.reduce(x, 1)


@program("f32[4,6]", "s32[4,6]")
def reduce_variadic_custom(x, i):
    def closest(a, b):
        take = jnp.abs(a[0]) <= jnp.abs(b[0])
        return jnp.where(take, a[0], b[0]), jnp.where(take, a[1], b[1])

    return lax.reduce((x, i), (np.float32(np.inf), np.int32(0)), closest, (1,))


@program("f32[4,9]", "f32[2,3,8,8]")
def reduce_windows(x, image):
    return (
        jnp.cumsum(x, 1),
        lax.cummax(x, 0),
        lax.cumprod(x, 1, reverse=True),
        lax.cumlogsumexp(x, 1),
        lax.reduce_window(image, -np.inf, lax.max, (1, 1, 3, 3), (1, 1, 2, 2), "SAME"),
        lax.reduce_window(image, 0.0, lax.add, (1, 1, 2, 2), (1, 1, 2, 2), "VALID"),
        lax.reduce_window(x, 1.0, lax.mul, (2, 3), (1, 2), [(1, 0), (2, 1)], (2, 1), (1, 2)),
    )


@program("f32[2,8,8,3]")
def select_and_scatter(image):
    def pool(v):
        return lax.reduce_window(v, -np.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID").sum()

    def average(v):
        return (lax.reduce_window(v, 0.0, lax.add, (1, 3, 3, 1), (1, 1, 1, 1), "SAME") ** 2).sum()

    return jax.grad(pool)(image), jax.grad(average)(image)


@program("f32[5,8]:special", "s32[5,8]", exact=True)
def sorts(x, y):
    return jnp.sort(x, 1), jnp.argsort(x, 0), lax.sort((y, x), dimension=1, num_keys=1), lax.sort((x, y), num_keys=2)


@program("f32[4,16]", "s32[4,16]", exact=True)
def top_k(x, y):
    return lax.top_k(x, 3), lax.top_k(y, 16), lax.approx_max_k(x, 2)


@program("f32[64]")
def order_statistics(x):
    return jnp.median(x), jnp.quantile(x, 0.3), jnp.unique(jnp.round(x), size=8), jnp.searchsorted(jnp.sort(x), x[:9])


@program("s32[6,5]", "s32[6,5]", exact=True)
def map_scalar_function(x, y):
    return jax.vmap(jax.vmap(lambda a, b: a * b - a))(x, y)


# Contractions


@program("f32[4,5]", "f32[5,6]", "f32[2,4,5]", "f32[2,5,3]")
def dots(a, b, x, y):
    return a @ b, x @ y, jnp.einsum("bij,bjk->kbi", x, y), a[0] @ b, jnp.outer(a[0], b[0]), jnp.vdot(a, a)


@program("bf16[4,5]", "bf16[5,6]", "s8[3,4]", "s8[4,2]")
def dots_mixed_types(a, b, x, y):
    return (
        lax.dot(a, b, preferred_element_type=np.float32),
        lax.dot(x, y, preferred_element_type=np.int32),
        a @ b,
        lax.dot(x, y),
    )


@program("f64[3,4]", "f64[4,3]", "c64[3,4]", "c64[4,3]", "u32[3,4]", "u32[4,3]", x64=True)
def dots_wide_types(a, b, c, d, u, v):
    return a @ b, c @ d, u @ v, lax.dot(a, b, precision="highest")


@program("f32[3,4,5,2]", "f32[5,3,2,6]")
def dot_general_batch(x, y):
    return lax.dot_general(x, y, (((2, 3), (0, 2)), ((0,), (1,)))), lax.dot_general(x, y, (((3,), (2,)), ((), ())))


@program("f32[2,8,9,3]", "f32[3,3,3,4]", "f32[3,2,3,4]")
def convolutions(image, kernel, odd):
    dims = ("NHWC", "HWIO", "NHWC")
    return (
        lax.conv_general_dilated(image, kernel, (1, 1), "SAME", dimension_numbers=dims),
        lax.conv_general_dilated(image, kernel, (2, 1), [(1, 2), (0, 1)], (1, 2), (2, 1), dims),
        lax.conv_general_dilated(image, odd, (1, 2), "VALID", dimension_numbers=dims),
        lax.conv_transpose(image, kernel, (2, 2), "SAME", dimension_numbers=dims),
    )


@program("f32[2,6,10]", "f32[4,3,3]", "f32[6,1,5]", "f32[4,2,2]")
def convolutions_grouped(x, grouped, depthwise, batched):
    return (
        lax.conv_general_dilated(x, grouped, (1,), "SAME", feature_group_count=2),
        lax.conv_general_dilated(x, depthwise, (2,), "VALID", feature_group_count=6),
        lax.conv_general_dilated(x[:, :2], batched, (1,), "SAME", batch_group_count=2),
    )


@program("f32[1,2,4,5,6]", "f32[3,2,2,2,3]", "f32[2,3]", "f32[4,3]")
def convolutions_other_ranks(volume, kernel, x, w):
    return (
        lax.conv_general_dilated(volume, kernel, (1, 2, 1), "SAME"),
        lax.conv_general_dilated(x, w, (), [], dimension_numbers=("NC", "OI", "NC")),
    )


@program("f32[2,6,6,3]", "f32[3,3,3,4]")
def convolution_gradients(image, kernel):
    def loss(x, k):
        y = lax.conv_general_dilated(x, k, (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        return (y**2).sum()

    return jax.grad(loss, (0, 1))(image, kernel)


@program("f32[8,4]", "f32[3,4,5]")
def ragged_dot(x, w):
    return lax.ragged_dot(x, w, np.array([2, 5, 1], np.int32))


# Library shaped


@program("f32[4,8]", "c64[4,8]", "f32[3,4,6]")
def ffts(x, z, cube):
    return (
        jnp.fft.fft(z),
        jnp.fft.ifft(z, axis=0),
        jnp.fft.rfft(x),
        jnp.fft.irfft(z),
        jnp.fft.rfftn(cube),
        jnp.fft.fft2(z),
    )


@program("f32[3,4,4]:spd", "c64[4,4]:spd", "f64[3,3]:spd", x64=True)
def choleskys(x, z, d):
    return lax.linalg.cholesky(x), lax.linalg.cholesky(z), lax.linalg.cholesky(d, symmetrize_input=False)


@program("f32[2,4,4]:spd", "f32[2,4,3]", "f32[3,4]")
def triangular_solves(a, b, c):
    solve = lax.linalg.triangular_solve
    return (
        solve(a, b, left_side=True, lower=True),
        solve(a, b, left_side=True, lower=False, transpose_a=True),
        solve(a[0], c, lower=True, unit_diagonal=True),
        jax.scipy.linalg.cho_solve((a[0], True), b[0]),
    )


@program("f32[4,4]:spd", "f32[4]")
def linear_algebra_in_plain_ops(a, b):
    return jax.scipy.linalg.expm(a / 16), jnp.trace(a), jnp.linalg.norm(a), jnp.kron(a[:2, :2], b[None, :2]), jnp.cov(a)


@program("u32[2]", exact=True)
def random_bits(key):
    k = jax.random.wrap_key_data(key)
    return (
        jax.random.bits(k, (5, 3)),
        jax.random.randint(k, (7,), -5, 100),
        jax.random.key_data(jax.random.split(k, 3)),
        jax.random.permutation(k, 9),
        jax.random.bernoulli(k, 0.3, (8,)),
    )


@program("u32[2]")
def random_distributions(key):
    k = jax.random.wrap_key_data(key)
    return (
        jax.random.uniform(k, (6,)),
        jax.random.normal(k, (6,)),
        jax.random.gumbel(k, (3,)),
        jax.random.gamma(k, 2.0, (2,)),
    )


@program("u32[4]", exact=True)
def rng_bit_generator(state):
    return lax.rng_bit_generator(state, (5, 4)), lax.rng_bit_generator(state, (3,), np.uint8)


# Control flow


@program("s32[]:small", "f32[4]")
def while_counted_and_dynamic(n, x):
    def body(carry):
        i, value = carry
        return i + 1, value * 1.5 - i.astype(np.float32)

    return lax.fori_loop(0, 7, lambda i, v: v + i, x), lax.while_loop(lambda c: c[0] < n, body, (np.int32(0), x))


@program("f32[6,3]", "f32[3]")
def scan_with_outputs(xs, init):
    def body(carry, x):
        carry = jnp.tanh(carry + x)
        return carry, carry * 2

    return lax.scan(body, init, xs), lax.scan(body, init, xs, reverse=True), lax.scan(body, init, xs, unroll=3)


@program("f32[5,3]", "f32[3]")
def scan_gradient(xs, init):
    def loss(init, xs):
        return lax.scan(lambda c, x: (jnp.sin(c * x), c.sum()), init, xs)[1].sum()

    return jax.grad(loss, (0, 1))(init, xs)


@program("pred[]", "s32[]:index3", "f32[4]")
def conditionals(p, i, x):
    branches = [lambda v: v + 1, lambda v: v * 2, lambda v: -v]
    return (
        lax.cond(p, jnp.sin, jnp.cos, x),
        lax.switch(i, branches, x),
        lax.cond(p, lambda v: (v, v.sum()), lambda v: (-v, 1.0), x),
    )


@program("s32[3]:small", "f32[3]")
def while_batched(n, x):
    return jax.vmap(lambda m, v: lax.while_loop(lambda c: c[0] < m, lambda c: (c[0] + 1, c[1] * 2), (np.int32(0), v)))(
        n, x
    )


@program("f32[4]")
def nested_calls(x):
    @jax.jit
    def inner(v):
        return v * 2 + 1

    @jax.jit
    def outer(v):
        return inner(v) + inner(-v)

    return outer(x), jax.checkpoint(outer)(x), jax.named_call(inner, name="named")(x)


@program("f32[4]", "s32[]", exact=True)
def optimization_barrier(x, i):
    return lax.optimization_barrier((x * 2, i + 1))


@program("f32[3]", "s32[2]", exact=True)
def passthrough_and_duplicates(x, i):
    return x, x, i, x * 2, (x * 2, i)


@program("f32[3]", "f32[5]", exact=True)
def unused_argument(x, unused):
    del unused
    return x + 1


@program(exact=True)
def no_arguments_no_work():
    return jnp.float32(3), jnp.int32(-1)


@program("f32[4]", exact=True)
def nothing_returned(x):
    del x
    return ()


# Neural-network shaped


@program("f32[4,16]", "f32[16,32]", "f32[32]", "f32[32,8]", "s32[4]:small")
def mlp_loss_and_gradient(x, w1, b1, w2, labels):
    def loss(params):
        w1, b1, w2 = params
        logits = jax.nn.gelu(x @ w1 + b1) @ w2
        return -jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], 1).mean()

    return jax.value_and_grad(loss)((w1 / 8, b1, w2 / 8))


@program("f32[2,6,2,8]", "f32[2,6,2,8]", "f32[2,6,2,8]")
def attention_causal_gradient(q, k, v):
    def attend(q, k, v):
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(8).astype(np.float32)
        scores = jnp.where(jnp.tril(jnp.ones((6, 6), bool)), scores, -1e9)
        return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)

    return jax.value_and_grad(lambda *a: (attend(*a) ** 2).sum(), (0, 1, 2))(q, k, v)


@program("bf16[4,16]", "f32[16]", "f32[16]")
def layer_norm_mixed(x, scale, bias):
    wide = x.astype(np.float32)
    mean = wide.mean(-1, keepdims=True)
    inverse = lax.rsqrt(((wide - mean) ** 2).mean(-1, keepdims=True) + 1e-5)
    return ((wide - mean) * inverse * scale + bias).astype(jnp.bfloat16)


@program("f32[8,4,4,3]", "f32[3]", "f32[3]")
def batch_norm_by_hand(x, scale, offset):
    def normalize(x, scale, offset):
        mean, variance = x.mean((0, 1, 2)), x.var((0, 1, 2))
        return (x - mean) * lax.rsqrt(variance + 1e-3) * scale + offset

    y, pull = jax.vjp(normalize, x, scale, offset)
    return y, pull(jnp.ones_like(y))


@program("s32[2,8]:small", "f32[8,6]")
def embedding_and_gradient(tokens, table):
    return jax.value_and_grad(lambda t: (t[tokens] ** 3).mean())(table)


@program("f32[4,6]", "f32[4,6]", "f32[4,6]", "f32[4,6]", "s32[]:small")
def adam_update(p, g, m, v, step):
    m = 0.9 * m + 0.1 * g
    v = 0.999 * jnp.abs(v) + 0.001 * g * g
    t = (step + 1).astype(np.float32)
    return p - 1e-3 * (m / (1 - 0.9**t)) / (jnp.sqrt(v / (1 - 0.999**t)) + 1e-8), m, v, step + 1


@program("f32[6,3]", "f32[3,16]", "f32[4,16]")
def lstm_scan(xs, w, u):
    def cell(carry, x):
        h, c = carry
        i, f, g, o = jnp.split(x @ w + h @ u, 4)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = jax.nn.sigmoid(o) * jnp.tanh(c)
        return (h, c), h

    return lax.scan(cell, (jnp.zeros(4), jnp.zeros(4)), xs)
