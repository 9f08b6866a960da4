"""Which predicates over positions are bands, checked against the predicate's own values."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flagos_backend.importer import import_module
from flagos_backend.passes.attention.bands import split
from flagos_backend.passes.attention.symbols import Term
from programs import hlo_bytes
from support.passes import simplified

T, S = 6, 9
QUERY, KEY = 1, 2


def positions():
    return jnp.arange(T)[:, None], jnp.arange(S)[None, :]


def band_of(function, *args, visible=True):
    """The band of a predicate [T, S] (of its negation unless ``visible``), and how many parts are none."""
    root = simplified(import_module(hlo_bytes(function, *args))).entry.root
    band, rest = split(Term(root, (QUERY, KEY)), visible, QUERY, KEY)
    return band, rest


def array_of(band):
    t, s = np.arange(T)[:, None], np.arange(S)[None, :]
    upper = s <= t + band.upper if band.upper is not None else True
    lower = s >= t - band.lower if band.lower is not None else True
    return np.broadcast_to(np.logical_and(upper, lower), (T, S))


def lower_triangle():
    return jnp.tril(jnp.ones((T, S), bool))


PREDICATES = {
    "tril": lower_triangle,
    "tril, shifted": lambda: jnp.tril(jnp.ones((T, S), bool), 2),
    "tril of floats": lambda: jnp.tril(jnp.ones((T, S))) != 0,
    "tril of floats, inverted": lambda: jnp.logical_not(jnp.tril(jnp.ones((T, S))) == 0),
    "triu, inverted": lambda: ~jnp.triu(jnp.ones((T, S), bool), 1),
    "triu": lambda: jnp.triu(jnp.ones((T, S), bool), -1),
    "greater or equal": lambda: jnp.greater_equal(*positions()),
    "greater": lambda: positions()[0] > positions()[1],
    "less": lambda: positions()[1] < positions()[0] + 3,
    "difference": lambda: positions()[0] - positions()[1] >= -1,
    "key before query": lambda: positions()[1] <= positions()[0],
    "window": lambda: (positions()[0] - positions()[1] < 3) & (positions()[1] <= positions()[0]),
    "both sides": lambda: (positions()[1] - positions()[0] <= 2) & (positions()[0] - positions()[1] <= 1),
    "window of triangles": lambda: jnp.triu(jnp.tril(jnp.ones((T, S), bool), 2), -1),
    "product of triangles": lambda: jnp.triu(jnp.ones((T, S)), -2) * lower_triangle() > 0,
    "window of triangles of floats": lambda: jnp.triu(jnp.tril(jnp.ones((T, S)), 2), -1) == 1,
    "one less a triangle": lambda: 1 - jnp.tril(jnp.ones((T, S), jnp.int32)) < 1,
    "a bias": lambda: (1 - jnp.tril(jnp.ones((T, S)))) * -1e9 > -1,
    "a constant window": lambda: jnp.asarray(np.tri(T, S, 1, dtype=bool) & ~np.tri(T, S, -3, dtype=bool)),
    "everything": lambda: jnp.ones((T, S), bool),
    "a constant": lambda: jnp.asarray(np.tri(T, S, 1, dtype=bool)),
}


@pytest.mark.parametrize("name", PREDICATES)
def test_bands(name):
    band, rest = band_of(PREDICATES[name])
    assert not rest
    np.testing.assert_array_equal(array_of(band), np.asarray(PREDICATES[name]()))


@pytest.mark.parametrize("name", ["tril", "less", "triu", "a constant"])
def test_negations(name):
    band, rest = band_of(PREDICATES[name], visible=False)
    assert not rest
    np.testing.assert_array_equal(array_of(band), ~np.asarray(PREDICATES[name]()))


def test_negation_of_a_select():
    """false where either triangle is true"""
    function = lambda: jnp.where(jnp.triu(jnp.ones((T, S), bool), 2), True, jnp.tril(jnp.ones((T, S), bool), -2))  # noqa: E731
    band, rest = band_of(function, visible=False)
    assert not rest
    np.testing.assert_array_equal(array_of(band), ~np.asarray(function()))


def test_what_is_no_band_stays_beside_it():
    mask = np.ones(S, bool)
    band, rest = band_of(lambda mask: lower_triangle() & mask[None, :], mask)
    assert (band.upper, band.lower) == (0, None)
    assert len(rest) == 1
    assert rest[0][0].labels == (KEY,)


NO_BANDS = {
    "equal": lambda: positions()[0] == positions()[1],
    "twice the query": lambda: 2 * positions()[0] >= positions()[1],
    "the sum": lambda: positions()[0] + positions()[1] >= 4,
    "every second": lambda: (positions()[0] - positions()[1]) % 2 == 0,
    "a disjunction": lambda: lower_triangle() | (positions()[1] == 0),
    "8-bit positions, which wrap around": lambda: jnp.greater_equal(*(p.astype(jnp.int8) for p in positions())),
    "unsigned differences": lambda: (
        positions()[0].astype(jnp.uint32) - positions()[1].astype(jnp.uint32) < jnp.uint32(3)
    ),
    "outside of a window": lambda: jnp.triu(jnp.tril(jnp.ones((T, S)), 2), -1) != 1,
    "bytes, which wrap around": lambda: jnp.tril(jnp.ones((T, S), jnp.uint8)) - jnp.uint8(1) == 0,
    "a constant with a hole": lambda: jnp.asarray(np.tri(T, S, 4, dtype=bool) & ~np.eye(T, S, dtype=bool)),
    "some other constant": lambda: jnp.asarray(np.tri(T, S, 1, dtype=bool) ^ np.eye(T, S, dtype=bool)),
}


@pytest.mark.parametrize("name", NO_BANDS)
def test_no_bands(name):
    band, rest = band_of(NO_BANDS[name])
    assert band.is_all
    assert rest


def test_positions_of_other_dimensions_are_no_band():
    root = simplified(import_module(hlo_bytes(jax.jit(lower_triangle)))).entry.root
    band, rest = split(Term(root, (3, KEY)), True, QUERY, KEY)
    assert band.is_all
    assert rest
