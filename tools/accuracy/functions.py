"""The functions that are measured: how JAX calls them, their exact values, and points where they are hard."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import mpmath
import numpy as np
import scipy.special
from jax import lax

Array = np.ndarray[Any, Any]
Function = Callable[..., Any]

_HALF_PI = math.pi / 2


@dataclass(frozen=True)
class Elementary:
    """A function of one or two arrays.

    ``wide`` is exact enough for types of up to 32 bits, in float64; ``exact`` takes and gives mpmath numbers, and is
    for float64 and complex numbers. ``near``: poles, zeros and ends of the domain, around which points crowd.
    """

    name: str
    call: Function
    wide: Function
    exact: Function
    near: tuple[float, ...] = ()
    arity: int = 1
    complex: bool = False


def _functions() -> tuple[Elementary, ...]:
    m = mpmath
    trigonometric = tuple(k * _HALF_PI for k in (-2, -1, 1, 2, 3, 4, 100, 10**5))
    return (
        Elementary("exp", jnp.exp, np.exp, m.exp, (0, 1, 88.7, -87.3, -103), complex=True),
        Elementary("exp2", jnp.exp2, np.exp2, lambda x: m.power(2, x), (0, 127.9, -126)),
        Elementary("expm1", jnp.expm1, np.expm1, m.expm1, (0, 88.7, -17), complex=True),
        Elementary("log", jnp.log, np.log, m.log, (1, 0), complex=True),
        Elementary("log1p", jnp.log1p, np.log1p, m.log1p, (0, -1), complex=True),
        Elementary("log2", jnp.log2, np.log2, lambda x: m.log(x, 2), (1, 0)),
        Elementary("sin", jnp.sin, np.sin, m.sin, (0, *trigonometric), complex=True),
        Elementary("cos", jnp.cos, np.cos, m.cos, (0, *trigonometric), complex=True),
        Elementary("tan", jnp.tan, np.tan, m.tan, (0, *trigonometric), complex=True),
        Elementary("asin", jnp.arcsin, np.arcsin, m.asin, (0, 1, -1), complex=True),
        Elementary("acos", jnp.arccos, np.arccos, m.acos, (0, 1, -1), complex=True),
        Elementary("atan", jnp.arctan, np.arctan, m.atan, (0, 1), complex=True),
        Elementary("sinh", jnp.sinh, np.sinh, m.sinh, (0, 1, 89), complex=True),
        Elementary("cosh", jnp.cosh, np.cosh, m.cosh, (0, 1, 89), complex=True),
        Elementary("tanh", jnp.tanh, np.tanh, m.tanh, (0, 0.5, 9), complex=True),
        Elementary("asinh", jnp.arcsinh, np.arcsinh, m.asinh, (0, 1), complex=True),
        Elementary("acosh", jnp.arccosh, np.arccosh, m.acosh, (1, 2), complex=True),
        Elementary("atanh", jnp.arctanh, np.arctanh, m.atanh, (0, 1, -1, 0.5), complex=True),
        Elementary("sqrt", jnp.sqrt, np.sqrt, m.sqrt, (0, 1, 4), complex=True),
        Elementary("rsqrt", lax.rsqrt, lambda x: 1 / np.sqrt(x), lambda x: 1 / m.sqrt(x), (0, 1), complex=True),
        Elementary("cbrt", jnp.cbrt, np.cbrt, _cbrt, (0, 1, 8)),
        Elementary("logistic", jax.nn.sigmoid, scipy.special.expit, lambda x: 1 / (1 + m.exp(-x)), (0, -88, -104, 17)),
        Elementary("erf", lax.erf, scipy.special.erf, m.erf, (0, 0.5, 1, 4)),
        Elementary("erfc", lax.erfc, scipy.special.erfc, m.erfc, (0, 0.5, 1, 10)),
        Elementary("erf_inv", lax.erf_inv, scipy.special.erfinv, m.erfinv, (0, 1, -1)),
        Elementary("lgamma", lax.lgamma, scipy.special.gammaln, lambda x: m.log(abs(m.gamma(x))), (1, 2, 0.5)),
        Elementary("digamma", lax.digamma, scipy.special.digamma, m.digamma, (1.4616321449683622, 1, 0)),
        Elementary("softplus", jax.nn.softplus, lambda x: np.logaddexp(x, 0), lambda x: m.log1p(m.exp(x)), (0, 17)),
        Elementary("power", jnp.power, np.power, m.power, (0, 1, 2), arity=2),
        Elementary("atan2", jnp.arctan2, np.arctan2, m.atan2, (0, 1), arity=2),
        Elementary("divide", jnp.divide, np.divide, lambda x, y: x / y, (0, 1), arity=2, complex=True),
        Elementary("multiply", jnp.multiply, np.multiply, lambda x, y: x * y, (0, 1), arity=2, complex=True),
        Elementary("remainder", lax.rem, np.fmod, _remainder, (0, 1), arity=2),
        Elementary("hypot", jnp.hypot, np.hypot, m.hypot, (0, 1), arity=2),
        Elementary("logaddexp", jnp.logaddexp, np.logaddexp, lambda x, y: m.log(m.exp(x) + m.exp(y)), (0, 1), arity=2),
    )


def _cbrt(x: Any) -> Any:
    return mpmath.cbrt(x) if x >= 0 else -mpmath.cbrt(-x)


def _remainder(x: Any, y: Any) -> Any:
    """With the sign of x; mpmath's own has that of y."""
    return mpmath.sign(x) * mpmath.fmod(abs(x), abs(y))


FUNCTIONS = _functions()
