"""Our Triton kernels of windows, in the interpreter, in programs of an accelerator, against stock XLA; selections
against loops, since XLA's own order decides which of equal numbers it takes where windows reach over the edge."""

from __future__ import annotations

import operator
from dataclasses import replace

import numpy as np
import pytest
import torch

from flagos_backend.compile import accelerator_plan as plan
from flagos_backend.devices.target import Target
from flagos_backend.importer import import_module
from flagos_backend.ir.attributes import WindowDimension
from flagos_backend.ir.types import ElementType
from flagos_backend.kernels.reference.registry import Run
from flagos_backend.kernels.reference.windows import window_count
from programs import run_on_xla
from support.against_xla import hlo_of_text
from support.kernels import to_storage
from support.numbers import random_values
from support.passes import for_accelerator
from support.windows import window_text

E = ElementType
SIMULATED = Target("cpu", vendor="simulated", architecture="host", multiprocessors=2, warp_size=1)
PRECISION = {E.F16: 2e-2, E.BF16: 5e-2, E.F32: 1e-5, E.F64: 1e-12}
ONE = WindowDimension(1)


def random_window(rng: np.random.Generator) -> WindowDimension:
    size, dilation = int(rng.integers(1, 5)), int(rng.integers(1, 3))
    reach = (size - 1) * dilation
    return WindowDimension(
        size=size,
        stride=int(rng.integers(1, 4)),
        padding_low=int(rng.integers(-1, reach + 1)),
        padding_high=int(rng.integers(-1, reach + 1)),
        window_dilation=dilation,
    )


def random_array(rng: np.random.Generator, rank: int) -> tuple[tuple[int, ...], tuple[WindowDimension, ...]]:
    """Sizes, and windows over one or two neighbouring dimensions."""
    dims = tuple(int(size) for size in rng.integers(4, 9, size=rank))
    first, count = int(rng.integers(rank)), int(rng.integers(1, 3))
    window = tuple(random_window(rng) if first <= d < first + count else ONE for d in range(rank))
    if all(w == ONE for w in window) or any(window_count(n, w) == 0 for n, w in zip(dims, window, strict=True)):
        return random_array(rng, rank)
    return dims, window


def compare(
    text: str, element_type: ElementType, arrays: list[np.ndarray], kernel: str, expected: np.ndarray | None = None
) -> None:
    hlo = hlo_of_text(text)
    module = for_accelerator(import_module(hlo))
    built = plan.build(module.entry, (), torch.device("cpu"), SIMULATED)
    assert kernel in built.explain(), built.explain()
    with torch.inference_mode():
        (ours,) = built.run(Run(), [to_storage(array, element_type) for array in arrays])
    theirs = run_on_xla(hlo, arrays)[0] if expected is None else expected
    precision = PRECISION[element_type]
    exact = torch.from_numpy(np.asarray(theirs).astype(np.float64))
    torch.testing.assert_close(ours.double(), exact, rtol=precision, atol=precision, equal_nan=True)


def numbers(rng: np.random.Generator, element_type: ElementType, dims: tuple[int, ...], special: bool) -> np.ndarray:
    """``special``: with NaN, infinities and equal numbers among them."""
    values = random_values(element_type, dims, rng) if special else rng.standard_normal(dims)
    return np.asarray(values).astype(random_values(element_type, (1,), rng).dtype)


def type_name(element_type: ElementType, dims: tuple[int, ...] = ()) -> str:
    return f"{element_type.name.lower()}[{','.join(map(str, dims))}]"


@pytest.mark.parametrize("reducer", ["add", "maximum", "minimum"])
@pytest.mark.parametrize("element_type", list(PRECISION))
@pytest.mark.parametrize("number", range(6))
def test_reductions(reducer: str, element_type: ElementType, number: int, rng: np.random.Generator) -> None:
    dims, window = random_array(rng, 1 + number % 4)
    scalar, result = type_name(element_type), tuple(map(window_count, dims, window))
    text = (
        f"combine {{ a = {scalar} parameter(0) b = {scalar} parameter(1) ROOT r = {scalar} {reducer}(a, b) }}\n"
        f"ENTRY main {{ x = {type_name(element_type, dims)} parameter(0) i = {scalar} parameter(1)\n"
        f" ROOT r = {type_name(element_type, result)} reduce-window(x, i), {window_text(window)}, to_apply=combine }}"
    )
    special = reducer != "add" and number % 2 == 1
    arrays = [numbers(rng, element_type, dims, special), numbers(rng, element_type, (), False)]
    compare(text, element_type, arrays, "triton.reduce_window")


STAYS = {"GE": operator.ge, "GT": operator.gt, "LE": operator.le, "LT": operator.lt}


def selected(
    x: np.ndarray, source: np.ndarray, initial: np.ndarray, window: tuple[WindowDimension, ...], direction: str
) -> np.ndarray:
    """Each window's places one after another, the last dimension first, as the specification has it."""
    result = np.full(x.shape, float(initial))
    for number in np.ndindex(source.shape):
        chosen: tuple[int, ...] | None = None
        for place in np.ndindex(*(w.size for w in window)):
            at = tuple(n * w.stride - w.padding_low + p for n, p, w in zip(number, place, window, strict=True))
            if any(not 0 <= i < size for i, size in zip(at, x.shape, strict=True)):
                continue
            if chosen is None or not STAYS[direction](x[chosen], x[at]):
                chosen = at
        if chosen is not None:
            result[chosen] += float(source[number])
    return result


@pytest.mark.parametrize("direction", STAYS)
@pytest.mark.parametrize("element_type", list(PRECISION))
@pytest.mark.parametrize("number", range(4))
def test_selections(direction: str, element_type: ElementType, number: int, rng: np.random.Generator) -> None:
    """Of equal numbers the first, or the last; NaN neither stays nor is stayed with."""
    dims, window = random_array(rng, 1 + number % 4)
    # XLA knows no dilated windows here.
    window = tuple(
        replace(w, window_dilation=1, padding_low=min(max(w.padding_low, 0), w.size - 1), padding_high=0)
        for w in window
    )
    result = tuple(map(window_count, dims, window))
    scalar, array, windows = (type_name(element_type, d) for d in ((), dims, result))
    text = (
        f"select {{ a = {scalar} parameter(0) b = {scalar} parameter(1)\n"
        f" ROOT r = pred[] compare(a, b), direction={direction} }}\n"
        f"scatter {{ a = {scalar} parameter(0) b = {scalar} parameter(1) ROOT r = {scalar} add(a, b) }}\n"
        f"ENTRY main {{ x = {array} parameter(0) s = {windows} parameter(1) i = {scalar} parameter(2)\n"
        f" ROOT r = {array} select-and-scatter(x, s, i), {window_text(window)}, select=select, scatter=scatter }}"
    )
    values = np.asarray(rng.integers(-2, 3, size=dims)).astype(random_values(element_type, (1,), rng).dtype)
    if number % 2:
        values.reshape(-1)[rng.integers(values.size, size=3)] = np.nan
    arrays = [values, numbers(rng, element_type, result, False), numbers(rng, element_type, (), False)]
    expected = selected(*arrays, window, direction)
    compare(text, element_type, arrays, "triton.select_and_scatter", expected)


@pytest.mark.parametrize(
    ("window", "element_type"),
    [
        ("size=1x3x1x3", "f32"),  # not neighbours
        ("size=2x2x2x1", "f32"),
        ("size=1x9x9x1", "f32"),  # many places
        ("size=1x2x2x1 lhs_dilate=1x2x1x1", "f32"),
        ("size=1x2x2x1", "s32"),
    ],
)
def test_what_is_left_to_others(window: str, element_type: str) -> None:
    dims, scalar = "[2,9,9,3]", f"{element_type}[]"
    array = f"{element_type}{dims}"
    sizes = [tuple(map(int, part.split("=")[1].split("x"))) for part in window.split()]
    dilation = sizes[1] if len(sizes) > 1 else (1,) * 4
    result = [(n - 1) * d + 1 - k + 1 for n, k, d in zip((2, 9, 9, 3), sizes[0], dilation, strict=True)]
    text = (
        f"combine {{ a = {scalar} parameter(0) b = {scalar} parameter(1) ROOT r = {scalar} add(a, b) }}\n"
        f"ENTRY main {{ x = {array} parameter(0) i = {scalar} parameter(1)\n"
        f" ROOT r = {element_type}[{','.join(map(str, result))}] reduce-window(x, i),"
        f" window={{{window}}}, to_apply=combine }}"
    )
    module = for_accelerator(import_module(hlo_of_text(text)))
    built = plan.build(module.entry, (), torch.device("cpu"), SIMULATED)
    assert "not triton.reduce_window" in built.explain(), built.explain()
