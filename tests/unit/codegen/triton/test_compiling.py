"""What of a program's kernels is compiled ahead of its first run, and in which order; and what compilers are told."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import torch

from flagos_backend.codegen.triton import RegionKernel, compiling, prepare, schedule, sources
from flagos_backend.importer import import_module
from flagos_backend.kernels.triton import launching
from flagos_backend.loop_ir.flat import flatten
from flagos_backend.loop_ir.region import Region
from programs import hlo_bytes
from support.passes import for_accelerator
from support.triton_compiled import compile_kernel, pointer
from support.triton_programs import H100, f32, s32


def kernel_of(function: Callable[..., Any], *shapes: jax.ShapeDtypeStruct) -> RegionKernel:
    flat = flatten(for_accelerator(import_module(hlo_bytes(function, *shapes))).entry)
    (region,) = (item for item in schedule(flat, H100).items if isinstance(item, Region))
    return prepare(region, H100)


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, tuple[torch.dtype, ...]]]:
    """The name of each function that is compiled, and the types of its arrays."""
    seen: list[tuple[str, tuple[torch.dtype, ...]]] = []

    def compile_only(function: Any, grid: tuple[int, ...], arguments: Sequence[torch.dtype], options: object) -> None:
        if torch.float64 in arguments:
            raise RuntimeError("no such type")
        seen.append((function.__name__, tuple(arguments)))

    def together(
        function: Callable[[Any], str], items: Sequence[Any], device: object, then: Callable[[int], object]
    ) -> list[str]:
        found = []
        for number, item in enumerate(items):
            found.append(function(item))
            then(number)
        return found

    monkeypatch.setattr(launching, "compile_only", compile_only)
    monkeypatch.setattr(compiling, "side_by_side", together)
    return seen


def warm_up(*kernels: RegionKernel, **warm_ups: Callable[[], object]) -> None:
    compiling.warm_up_together(kernels, warm_ups, torch.device("cuda"))


def reverse(x: jax.Array) -> jax.Array:
    return x[::-1]


def test_equal_kernels_are_compiled_once(compiled: list[Any]) -> None:
    warm_up(*(kernel_of(reverse, f32(512)) for _ in range(3)))
    assert compiled == [("kernel", (torch.float32, torch.float32))]


def test_one_source_is_compiled_for_each_type(compiled: list[Any]) -> None:
    """A copy says nothing of what it copies."""
    floats, numbers = kernel_of(reverse, f32(512)), kernel_of(reverse, s32(512))
    assert floats.source == numbers.source
    warm_up(floats, numbers)
    assert {types for _, types in compiled} == {(torch.float32,) * 2, (torch.int32,) * 2}


def test_what_takes_longest_begins_first(compiled: list[Any]) -> None:
    short, long = kernel_of(jnp.negative, f32(512)), kernel_of(lambda x: jnp.tanh(x) * jnp.exp(x) + 1, f32(512, 512))
    parts = kernel_of(lambda x: (jnp.tanh(x) * jnp.exp(x) * jnp.sin(x)).sum(0), f32(32768, 64))
    assert [launch.function for launch in parts.launches] == ["kernel", "finish"]
    warm_up(short, long, parts, library=lambda: compiled.append("library"))
    assert compiled[0] == "library"
    assert [name for name, _ in compiled[1:]] == ["kernel", "finish", "kernel", "kernel"]
    assert len(short.source) < len(long.source) < len(parts.source)


def test_what_is_measured_waits_for_its_own_kernels_alone(compiled: list[Any]) -> None:
    short, long = kernel_of(jnp.negative, f32(512)), kernel_of(lambda x: jnp.tanh(x) * jnp.exp(x) + 1, f32(512, 512))
    seen: dict[str, int] = {}

    def measure(name: str) -> Callable[[], object]:
        return lambda: seen.setdefault(name, len(compiled))

    def fail() -> None:
        seen["fails"] = len(compiled)
        raise RuntimeError("cannot run")

    measurements = [
        compiling.Measurement(measure("all"), (short, long), ["library"]),
        compiling.Measurement(measure("short"), (short,)),
        compiling.Measurement(fail, (long,)),
        compiling.Measurement(measure("long"), (long,), ["library"]),
        compiling.Measurement(measure("library"), (), ["library"]),
        compiling.Measurement(measure("nothing")),
    ]
    library = {"library": lambda: compiled.append("library")}
    compiling.warm_up_together((short, long), library, torch.device("cuda"), measurements)
    assert seen == {"library": 1, "nothing": 1, "fails": 2, "long": 2, "short": 3, "all": 3}
    assert len(compiled) == 3


def test_what_fails_is_left_to_the_first_run(compiled: list[Any], caplog: pytest.LogCaptureFixture) -> None:
    with jax.enable_x64(True):
        bad = kernel_of(reverse, jax.ShapeDtypeStruct((512,), jnp.float64))
    with caplog.at_level("DEBUG", "flagos_backend"):
        warm_up(bad, kernel_of(reverse, f32(512)))
    assert "is compiled when it is needed" in caplog.text and "no such type" in caplog.text
    assert compiled == [("kernel", (torch.float32, torch.float32))]


def test_integers_wrap_around_in_debug_mode_as_well() -> None:
    """Triton would trap where a sum of integers overflows, which HLO's wraps."""
    kernel = kernel_of(lambda x, y: x * y + x, s32(512), s32(512))
    function = getattr(sources.load(kernel.source), "kernel")  # noqa: B009
    types = [pointer(buffer.shape) for buffer in (*kernel.inputs, *kernel.outputs)]
    options = kernel.options | {"debug": True}
    assert "assertfail" not in compile_kernel(function, types, {}, 1, **options)
    assert "assertfail" in compile_kernel(function, types, {}, 1, **options | {"sanitize_overflow": True})
