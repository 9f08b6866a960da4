"""log |Gamma|, whose zeros at 1 and 2 the default expansion of JAX approaches with the error of its summands: here a
polynomial carries each zero as a factor. Everything is plain operations, which fuse on every device."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import jax.numpy as jnp
import numpy as np

from flagos_backend.frontends.jax import jax_internals
from flagos_backend.frontends.jax.lowering.rule import LoweringRule


@dataclass(frozen=True)
class _Series:
    """``near_two``: log Gamma(2 + t) / t for |t| <= 1/2, interpolated by Chebyshev. ``stirling``: what multiplies
    1/x, 1/x^3, ... in Stirling's series, B(2k) / (2k (2k - 1))."""

    near_two: tuple[float, ...]
    stirling: tuple[float, ...]
    stirling_from: float


_STIRLING: Final = (1 / 12, -1 / 360, 1 / 1260, -1 / 1680, 1 / 1188, -691 / 360360, 1 / 156, -3617 / 122400)
_SINGLE: Final = _Series(
    near_two=(
        0.4227843350004583,
        0.32246703346894252,
        -0.0673522814721006001,
        0.0205807994715182532,
        -0.00738617415563341295,
        0.00289079532155969593,
        -0.00118586003449832081,
        0.000506517142951816114,
        -0.000253817095672782611,
        0.000113472819945546914,
    ),
    stirling=_STIRLING[:4],
    stirling_from=4.0,
)
_DOUBLE: Final = _Series(
    near_two=(
        0.422784335098467136,
        0.32246703342411322,
        -0.0673523010531956387,
        0.0205808084277833798,
        -0.0073855510289355447,
        0.00289051033086590093,
        -0.00119275390099830869,
        0.000509669519652667278,
        -0.000223154977462927232,
        0.0000994576169215713313,
        -0.0000449237275642476526,
        0.0000205060197017476186,
        -9.45628851510171917e-6,
        4.38285453838466677e-6,
        -1.97431068884210674e-6,
        9.24285222516227674e-7,
        -5.8112777689212462e-7,
        2.74753900519096639e-7,
    ),
    stirling=_STIRLING,
    stirling_from=8.0,
)
_HALF_LOG_TWO_PI: Final = 0.5 * math.log(2 * math.pi)


def _polynomial(coefficients: Sequence[float], x: Any) -> Any:
    value = jnp.full_like(x, coefficients[-1])
    for coefficient in reversed(coefficients[:-1]):
        value = value * x + coefficient
    return value


def _log_gamma(x: Any) -> Any:
    """[...] of float32 or float64, relative to its size except near the zeros between negative integers."""
    series = _DOUBLE if x.dtype == np.float64 else _SINGLE
    reflects = x < -0.5
    z = jnp.where(reflects, -x, x)
    is_small, is_near_one, is_large = jnp.abs(z) <= 0.5, z < 1.5, z >= series.stirling_from

    # z is t, 1 + t, or 2 + t times as many factors, each 1 less, as that takes.
    product = jnp.ones_like(z)
    for step in range(1, math.ceil(series.stirling_from - 1.5)):
        product = jnp.where(z >= step + 1.5, product * (z - step), product)
    two_and_t = z - jnp.floor(z - 1.5)
    t = jnp.where(is_small, z, jnp.where(is_near_one, z - 1, two_and_t - 2))
    t = jnp.where(is_large, 0, t)
    near = t * _polynomial(series.near_two, t) - jnp.where(is_near_one, jnp.log1p(t), 0)

    log = jnp.log(jnp.where(is_small, jnp.abs(z), jnp.where(is_large, z, product)))
    inverse = 1 / jnp.where(is_large, z, 1)
    rest = inverse * _polynomial(series.stirling, inverse * inverse) + (_HALF_LOG_TWO_PI - 0.5)
    value = jnp.where(is_large, (z - 0.5) * (log - 1) + rest, near + jnp.where(is_small, -log, log))

    sine = jnp.abs(jnp.sin(math.pi * (z - jnp.round(z))))
    reflected = math.log(math.pi) - jnp.log(z * sine) - value
    value = jnp.where(reflects, reflected, value)
    is_pole = reflects & (sine == 0)
    return jnp.where(is_pole | jnp.isinf(x), jnp.inf, value)


def _lgamma(x: Any) -> tuple[Any]:
    wide = x if x.dtype in (np.float32, np.float64) else x.astype(jnp.float32)
    return (_log_gamma(wide).astype(x.dtype),)


def _rule(ctx: Any, x: Any, **_: Any) -> Any:
    return jax_internals.lower_function(_lgamma)(ctx, x)


RULES: Final = (LoweringRule("jax._src.lax.special", "lgamma_p", _rule),)
