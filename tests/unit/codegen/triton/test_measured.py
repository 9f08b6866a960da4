"""Regions that may be tiled in several ways: which are measured, and that the fastest is taken."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from flagos_backend.codegen.triton import RegionKernels, prepare, schedule
from flagos_backend.devices.target import Target
from flagos_backend.importer import import_module
from flagos_backend.kernels import tuning
from flagos_backend.kernels.reference.registry import Kernel
from flagos_backend.loop_ir.flat import flatten
from flagos_backend.loop_ir.region import Region
from programs import hlo_bytes
from support.passes import for_accelerator

H200 = Target("cuda", "nvidia", "sm_90", multiprocessors=132, shared_memory_bytes=232448, warp_size=32)


def region_of(function: Callable[..., Any], *dims: int) -> Region:
    flat = flatten(for_accelerator(import_module(hlo_bytes(function, jax.ShapeDtypeStruct(dims, jnp.bfloat16)))).entry)
    (region,) = schedule(flat, H200).items
    assert isinstance(region, Region)
    return region


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The names of what was measured each time. The last is the fastest."""
    seen: list[list[str]] = []

    def fastest(
        task: tuning.Task,
        target: Target,
        kernels: Mapping[str, Kernel],
        seconds: float,
        warm_ups: Mapping[str, Callable[[], object]],
    ) -> tuning.Outcome:
        assert warm_ups.keys() == kernels.keys() and seconds > 0
        seen.append([*kernels])
        return tuning.Outcome([*kernels][-1], "measured 1 ms")

    monkeypatch.setattr(tuning, "fastest", fastest)
    return seen


def softmax(x: jax.Array) -> jax.Array:
    return jax.nn.softmax(x.astype(jnp.float32), -1).astype(x.dtype)


@pytest.mark.parametrize(
    ("length", "warps", "unrolled"), [(50257, (32, 16), (2, 2)), (128256, (32, 32), (4, 2))], ids=["long", "longer"]
)
def test_rows_that_are_walked_again(
    length: int, warps: tuple[int, int], unrolled: tuple[int, int], measured: list[list[str]]
) -> None:
    region = region_of(softmax, 8192, length)
    kernels, usual = RegionKernels.of(region, H200), prepare(region, H200)
    chosen = kernels.fastest()
    assert measured == [["one on a multiprocessor", "several on a multiprocessor"]]
    for kernel, of_kernel, factor in zip((usual, chosen), warps, unrolled, strict=True):
        assert kernel.launches[0].warps == of_kernel
        assert kernel.tiling.unroll == factor
    assert kernels.fastest() is chosen  # as where a computation is planned twice
    assert (chosen.text, chosen.choice) == (usual.text, "several on a multiprocessor: measured 1 ms")


@pytest.mark.parametrize(
    ("function", "dims"),
    [
        pytest.param(softmax, (8192, 4096), id="held in registers"),
        pytest.param(softmax, (8192, 32000), id="loaded ahead"),
        pytest.param(lambda x: x.sum(-1), (8192, 50257), id="walked once"),
        pytest.param(lambda x: x.sum(0), (50257, 256), id="columns"),
        pytest.param(lambda x: x * 2, (8192, 50257), id="points"),
    ],
)
def test_what_has_one_way_is_not_measured(
    function: Callable[..., Any], dims: tuple[int, int], measured: list[list[str]]
) -> None:
    region = region_of(function, *dims)
    assert RegionKernels.of(region, H200).fastest().launches == prepare(region, H200).launches
    assert not measured


def test_where_nothing_is_measured_it_is_the_usual_one() -> None:
    region, target = region_of(softmax, 8192, 50257), replace(H200, device_type="cpu")
    chosen = RegionKernels.of(region, target).fastest()
    assert chosen.launches == prepare(region, target).launches
    assert "one on a multiprocessor: first of 2, not measured" in chosen.choice
