"""Native tiles where one rounding too many once showed: against wider arithmetic, in units in the last place."""

from __future__ import annotations

import math

import numpy as np

from cpu.native.harness import compile, get, put, run
from plugin_abi.host import Context


def test_reciprocal_square_root_of_doubles_rounds_once(context: Context, rng: np.random.Generator) -> None:
    x = np.concatenate([rng.uniform(1, 4, 4000), 2.0 ** rng.uniform(-1000, 1000, 1000)])
    text = "ENTRY main {\n  x = f64[5000] parameter(0)\n  ROOT y = f64[5000] rsqrt(x)\n}"
    with compile(context, text) as executable:
        ours = get(run(executable, put(context.devices[0].default_memory, x))[0])
    exact = 1 / np.sqrt(x.astype(np.longdouble))
    assert np.max(np.abs(ours - exact) / np.spacing(ours)) < 0.505


def test_special_values_of_the_reciprocal_square_root(context: Context) -> None:
    x = np.array([0.0, -0.0, np.inf, -1.0, np.nan, 5e-324, 1.7e308])
    text = "ENTRY main {\n  x = f64[7] parameter(0)\n  ROOT y = f64[7] rsqrt(x)\n}"
    with compile(context, text) as executable:
        ours = get(run(executable, put(context.devices[0].default_memory, x))[0])
    np.testing.assert_array_equal(ours[:5], [np.inf, -np.inf, 0.0, np.nan, np.nan])
    np.testing.assert_allclose(ours[5:], [1 / math.sqrt(5e-324), 1 / math.sqrt(1.7e308)], rtol=1e-15)


_SUM = """
add {
  a = f64[] parameter(0)
  b = f64[] parameter(1)
  ROOT c = f64[] add(a, b)
}
ENTRY main {
  x = f64[4,100001] parameter(0)
  zero = f64[] constant(0)
  ROOT y = f64[4] reduce(x, zero), dimensions={1}, to_apply=add
}"""


def test_a_long_sum_of_doubles_loses_next_to_nothing(context: Context, rng: np.random.Generator) -> None:
    x = rng.uniform(0.5, 1.5, (4, 100001))
    x[1] *= rng.choice([-1.0, 1.0], 100001)
    x[2, 50000] = np.inf
    x[3, 7] = np.nan
    with compile(context, _SUM) as executable:
        ours = get(run(executable, put(context.devices[0].default_memory, x))[0])
    for row in (0, 1):
        assert abs(ours[row] - math.fsum(x[row])) <= np.spacing(math.fsum(np.abs(x[row])))
    assert ours[2] == np.inf
    assert np.isnan(ours[3])
