"""Convolutions laid out for accelerators compute what stock XLA does, and leave the library nothing to rearrange."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from jax import lax

from flagos_backend.importer import import_module
from flagos_backend.ir.attributes import ConvolutionAttributes
from flagos_backend.ir.hlo import Instruction
from flagos_backend.ir.opcode import Opcode
from flagos_backend.ir.verifier import verify
from flagos_backend.kernels.reference import convolution
from flagos_backend.passes.accelerator.canonicalize_convolutions import canonicalize_convolutions
from programs import hlo_bytes
from support.against_xla import hlo_of_text
from support.convolution_gradients import compare, gradients
from support.convolutions import convolution_text, random_convolution
from support.passes import simplified


def laid_out(function: Callable[..., Any], *arguments: np.ndarray) -> list[Instruction]:
    """The instructions of the program for an accelerator, which computes the same as stock XLA."""
    hlo = hlo_bytes(function, *arguments)
    module = simplified(import_module(hlo))
    compare(hlo, module, *arguments)
    module = canonicalize_convolutions(module)
    verify(module)
    compare(hlo, module, *arguments)
    assert canonicalize_convolutions(module) is module
    return [i for c in module.computations() for i in c.instructions]


def convolve(layout: str, stride: int = 1, padding: Any = "SAME", dilation: int = 1, groups: int = 1) -> Any:
    spec = ("NHWC", "HWIO", "NHWC") if layout == "NHWC" else ("NCHW", "OIHW", "NCHW")

    def function(x: jax.Array, w: jax.Array) -> jax.Array:
        return lax.conv_general_dilated(
            x, w, (stride,) * 2, padding, None, (dilation,) * 2, spec, feature_group_count=groups
        )

    return function


def operands(
    layout: str, rng: np.random.Generator, size: int = 8, kernel: int = 3, groups: int = 1
) -> tuple[np.ndarray, np.ndarray]:
    x, w = rng.standard_normal((2, 4 * groups, size, size)), rng.standard_normal((6 * groups, 4, kernel, kernel))
    if layout == "NHWC":
        x, w = x.transpose(0, 2, 3, 1), w.transpose(2, 3, 1, 0)
    return np.ascontiguousarray(x, np.float32), np.ascontiguousarray(w, np.float32)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is asked of the library, in order."""
    names: list[str] = []
    for name in ("_by_torch", "_by_transposed_torch", "_by_weight_gradient", "_by_patches"):
        original = getattr(convolution, name)
        monkeypatch.setattr(
            convolution, name, lambda *a, name=name, original=original: names.append(name) or original(*a)
        )
    return names


@pytest.mark.parametrize("layout", ["NHWC", "NCHW"])
@pytest.mark.parametrize(
    ("size", "kernel", "stride", "padding", "dilation", "groups"),
    [
        (8, 3, 1, "SAME", 1, 1),
        (8, 3, 2, "SAME", 1, 1),
        (9, 3, 2, "SAME", 1, 1),
        (8, 3, 2, "VALID", 1, 1),
        (11, 7, 2, "SAME", 1, 1),
        (8, 1, 1, "SAME", 1, 1),
        (8, 1, 2, "SAME", 1, 1),
        (9, 3, 1, "VALID", 2, 1),
        (9, 3, 3, ((2, 0), (1, 3)), 2, 1),
        (8, 3, 1, "SAME", 1, 3),
        (8, 3, 2, "SAME", 1, 3),
    ],
)
def test_gradients(
    layout: str, size: int, kernel: int, stride: int, padding: Any, dilation: int, groups: int, rng: np.random.Generator
) -> None:
    x, w = operands(layout, rng, size, kernel, groups)
    function = convolve(layout, stride, padding, dilation, groups)
    laid_out(function, x, w)
    laid_out(gradients(function), x, w)


@pytest.mark.parametrize("stride", [1, 2])
def test_gradients_are_asked_for_as_such(stride: int, asked: list[str], rng: np.random.Generator) -> None:
    x, w = operands("NHWC", rng)
    hlo = hlo_bytes(gradients(convolve("NHWC", stride, ((1, 1), (1, 1)))), x, w)
    module = canonicalize_convolutions(simplified(import_module(hlo)))
    compare(hlo, module, x, w)
    inputs = "_by_torch" if stride == 1 else "_by_transposed_torch"
    assert sorted(asked) == sorted(["_by_torch", inputs, "_by_weight_gradient"])


@pytest.mark.parametrize("layout", ["NHWC", "NCHW"])
def test_the_library_rearranges_nothing(layout: str, rng: np.random.Generator) -> None:
    x, w = operands(layout, rng)
    for function in (convolve(layout, 2), gradients(convolve(layout, 2))):
        for instruction in laid_out(function, x, w):
            if instruction.opcode is not Opcode.CONVOLUTION:
                continue
            a = instruction.attributes_as(ConvolutionAttributes)
            outer, inner = a.kernel_output_feature, a.kernel_input_feature
            if a.window[0].size != 3:  # the gradient of the weights: inputs and gradients are images, the result is one
                channel = 3 if layout == "NHWC" else 1
                assert inner == a.input_feature == a.output_feature == 0
                assert outer == a.input_batch == a.output_batch == channel
                continue
            if any(w.base_dilation > 1 for w in a.window):
                assert all(w.window_reversal for w in a.window)
                # The library's own padding crops both sides alike, or the last less than that.
                assert all(0 <= w.padding_high - w.padding_low < w.base_dilation for w in a.window)
                outer, inner = inner, outer
            else:
                assert all(w.padding_low == w.padding_high and not w.window_reversal for w in a.window)
            assert outer == 0
            assert inner == (3 if a.input_feature == 3 else 1)


def test_a_window_of_one_point_is_a_product(rng: np.random.Generator) -> None:
    opcodes = [i.opcode for i in laid_out(convolve("NHWC"), *operands("NHWC", rng, kernel=1))]
    assert Opcode.CONVOLUTION not in opcodes and opcodes.count(Opcode.DOT) == 1
    # One with another stride reads only some of the points.
    opcodes = [i.opcode for i in laid_out(convolve("NHWC", 2), *operands("NHWC", rng, kernel=1))]
    assert Opcode.DOT not in opcodes


@pytest.mark.parametrize("outputs_first", [False, True])
def test_gradients_of_a_window_of_one_point_are_products(outputs_first: bool, rng: np.random.Generator) -> None:
    def function(x: jax.Array, w: jax.Array) -> jax.Array:
        w = w.transpose(0, 1, 3, 2) if outputs_first else w
        return convolve("NHWC")(x, w)

    x, w = operands("NHWC", rng, kernel=1)
    opcodes = [i.opcode for i in laid_out(gradients(function), x, w.swapaxes(2, 3) if outputs_first else w)]
    assert Opcode.CONVOLUTION not in opcodes and opcodes.count(Opcode.DOT) == 3


@pytest.mark.parametrize("rank", [1, 2, 3])
@pytest.mark.parametrize("number", range(12))
def test_random_convolutions(rank: int, number: int, rng: np.random.Generator) -> None:
    c = random_convolution(rank, rng)
    x, w = (rng.standard_normal(dims).astype(np.float32) for dims in (c.lhs, c.rhs))
    hlo = hlo_of_text(convolution_text(c, "f32", "f32", "f32"))
    module = canonicalize_convolutions(import_module(hlo))
    verify(module)
    compare(hlo, module, x, w)
