"""Which sums are added up as one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from support.triton_programs import f32
from support.triton_sources import sources


def sum_of(x: jax.Array) -> jax.Array:
    return x.sum(-1, keepdims=True)


@pytest.mark.parametrize(
    ("function", "reductions"),
    [
        pytest.param(lambda x: x * (sum_of(jnp.exp(x)) + sum_of(x * x)), 1, id="at once"),
        pytest.param(lambda x: x * (sum_of(jnp.exp(x)) + sum_of(x * sum_of(x))), 2, id="one after the other"),
        pytest.param(lambda x: x * (sum_of(jnp.exp(x)) - sum_of(x * x)), 2, id="a difference"),
        pytest.param(lambda x: x * (sum_of(x * x) + x.max(-1, keepdims=True)), 2, id="with a maximum"),
        pytest.param(lambda x: x * (sum_of(jnp.exp(x)) + sum_of(x * x)) * sum_of(x * x), 2, id="one is used"),
        pytest.param(lambda x: (x * (sum_of(jnp.exp(x)) + sum_of(x * x)), sum_of(x * x)), 2, id="one is stored"),
    ],
)
def test_sums_that_are_added(function: Callable[..., Any], reductions: int) -> None:
    source = sources(function, [f32(4096, 1024)])
    assert source.count("tl.sum(") + source.count("tl.reduce(") == reductions, source
