"""Elementwise operations of every type, comparisons, conversions, constants. Part of the corpus."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax import lax

from programs.core import DTYPES, program, table

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
table(
    "unary",
    {f"{op}_f32": (lambda x, y, f=f: (f(x), f(y)), ("f32[33]", "f32[64]:special")) for op, f in _FLOAT_UNARY.items()},
)
table("unary", {f"{op}_f16": (_FLOAT_UNARY[op], ("f16[64]",)) for op in ("exp", "tanh", "floor", "logistic")})
table("unary", {f"{op}_bf16": (_FLOAT_UNARY[op], ("bf16[64]",)) for op in ("exp", "tanh", "floor", "rsqrt")})
table("unary", {f"{op}_f64": (_FLOAT_UNARY[op], ("f64[64]:special",)) for op in ("exp", "log1p", "sin", "sqrt")})
table(
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
table(
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
table(
    "binary",
    {
        f"{op}_{t}": (f, (f"{t}[96]:special", f"{t}[96]:special"))
        for t in ("f32", "f64", "bf16", "f16", "s8", "s32", "u8", "u32", "s64", "u64")
        for op, f in _BINARY.items()
    },
    exact=True,
)
table(
    "binary",
    {
        f"{op}_{t}": (f, (f"{t}[96]", f"{t}[96]:small"))
        for t in ("s8", "u16", "s32", "u64")
        for op, f in _BITWISE.items()
    },
    exact=True,
)
table(
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
        lambda x, y, targets=_targets: [lax.convert_element_type(v, DTYPES[t]) for v in (x, y) for t in targets]
    )

_SMALL_FLOATS = tuple(t for t in DTYPES if t.startswith(("f8", "f4")))
for _small in _SMALL_FLOATS:
    program(f"{_small}[48]", "f32[48]", "bf16[16]", name=f"convert_{_small}", exact=True)(
        lambda x, y, z, t=_small: (
            lax.convert_element_type(x, np.float32),
            lax.convert_element_type(y, DTYPES[t]),
            lax.convert_element_type(z, DTYPES[t]),
            jnp.asarray(np.arange(5), DTYPES[t]),
        )
    )
for _small in ("s4", "u4", "s2", "u2"):
    program(f"{_small}[24]", "s32[24]", name=f"convert_{_small}", exact=True)(
        lambda x, y, t=_small: (
            lax.convert_element_type(x, np.int32) * 3,
            lax.convert_element_type(y, DTYPES[t]),
            jnp.asarray(np.arange(3) % 2, DTYPES[t]),
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
    values = [np.arange(-3, 4).astype(DTYPES[t]) for t in _CONVERT_TYPES]
    small = [np.arange(0, 4).astype(DTYPES[t]) for t in _SMALL_FLOATS]
    special = np.array([np.nan, np.inf, -np.inf, -0.0, 1e-45], np.float32)
    return [jnp.asarray(v) for v in (*values, *small, special, np.zeros((0, 3), np.int16), np.float64(2.5))]


@program(exact=True)
def splat_and_large_constants():
    large = np.arange(60_000, dtype=np.int32).reshape(200, 300) * 7919
    return jnp.full((7, 9), 3.5), jnp.asarray(large), jnp.full((4,), True), jnp.asarray(large.astype(np.float32))
