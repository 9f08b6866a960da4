"""Convolutions as products of patches: random windows and layouts, against torch in float64 on padded inputs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from cpu.native.harness import compile, get, put, run
from plugin_abi.host import Artifact, Context

_CASES = 48


@dataclass(frozen=True)
class Case:
    """A convolution over two spatial dimensions; pairs have an entry for each. Layouts as in HLO text."""

    size: tuple[int, int]
    kernel: tuple[int, int]
    stride: tuple[int, int]
    low: tuple[int, int]
    high: tuple[int, int]
    dilation: tuple[int, int]
    base: tuple[int, int]
    reversed: bool
    input_layout: str
    kernel_layout: str
    output_layout: str
    batch: int = 2
    inputs: int = 3
    outputs: int = 5

    @property
    def result(self) -> tuple[int, int]:
        padded = [(n - 1) * b + 1 + p + q for n, b, p, q in zip(self.size, self.base, self.low, self.high, strict=True)]
        windows = [(k - 1) * d + 1 for k, d in zip(self.kernel, self.dilation, strict=True)]
        first, second = ((p - w) // s + 1 for p, w, s in zip(padded, windows, self.stride, strict=True))
        return first, second

    def dims(self, layout: str, letters: dict[str, int]) -> tuple[int, ...]:
        return tuple(letters[c] for c in layout)

    def hlo(self) -> str:
        letters = {"b": self.batch, "f": self.inputs, "0": self.size[0], "1": self.size[1]}
        kernel = {"i": self.inputs, "o": self.outputs, "0": self.kernel[0], "1": self.kernel[1]}
        result = {"b": self.batch, "f": self.outputs, "0": self.result[0], "1": self.result[1]}
        shapes = [
            ",".join(map(str, self.dims(layout, sizes)))
            for layout, sizes in (
                (self.input_layout, letters),
                (self.kernel_layout, kernel),
                (self.output_layout, result),
            )
        ]
        window = f"size={self.kernel[0]}x{self.kernel[1]} stride={self.stride[0]}x{self.stride[1]}"
        window += f" pad={self.low[0]}_{self.high[0]}x{self.low[1]}_{self.high[1]}"
        window += f" lhs_dilate={self.base[0]}x{self.base[1]} rhs_dilate={self.dilation[0]}x{self.dilation[1]}"
        window += " rhs_reversal=1x1" if self.reversed else ""
        labels = f"{self.input_layout}_{self.kernel_layout}->{self.output_layout}"
        return f"""ENTRY main {{
  x = f32[{shapes[0]}] parameter(0)
  w = f32[{shapes[1]}] parameter(1)
  ROOT y = f32[{shapes[2]}] convolution(x, w), window={{{window}}}, dim_labels={labels}
}}"""

    def exact(self, x: np.ndarray, w: np.ndarray) -> np.ndarray:
        """In float64: zeros between and around the input, then torch's plain convolution."""
        wide = torch.from_numpy(x.transpose([self.input_layout.index(c) for c in "bf01"]).astype(np.float64))
        kernel = torch.from_numpy(w.transpose([self.kernel_layout.index(c) for c in "oi01"]).astype(np.float64))
        sizes = [(n - 1) * b + 1 for n, b in zip(self.size, self.base, strict=True)]
        spread = torch.zeros(*wide.shape[:2], *sizes, dtype=torch.float64)
        spread[:, :, :: self.base[0], :: self.base[1]] = wide
        padded = torch.nn.functional.pad(spread, (self.low[1], self.high[1], self.low[0], self.high[0]))
        if self.reversed:
            kernel = kernel.flip(2, 3)
        found = torch.nn.functional.conv2d(padded, kernel, stride=self.stride, dilation=self.dilation).numpy()
        return found.transpose(["bf01".index(c) for c in self.output_layout])


def _random_case(rng: np.random.Generator) -> Case:
    def pair(low: int, high: int) -> tuple[int, int]:
        return int(rng.integers(low, high)), int(rng.integers(low, high))

    kernel = [(1, 1), (3, 3), pair(1, 4)][rng.integers(3)]
    plain = rng.random() < 0.4
    return Case(
        size=pair(7, 12),
        kernel=kernel,
        stride=(1, 1) if plain else pair(1, 3),
        low=(0, 0) if plain else pair(-1, 3),
        high=(0, 0) if plain else pair(-1, 3),
        dilation=(1, 1) if plain else pair(1, 3),
        base=(1, 1) if plain else pair(1, 3),
        reversed=bool(rng.random() < 0.3),
        input_layout=["b01f", "bf01", "f01b", "01bf"][rng.integers(4)],
        kernel_layout=["01io", "oi01", "01oi", "i01o"][rng.integers(4)],
        output_layout=["b01f", "01bf"][rng.integers(2)],
    )


def _check(context: Context, case: Case, rng: np.random.Generator) -> str:
    """What the explanation says of ``case``, whose result is right."""
    x = rng.standard_normal(
        case.dims(case.input_layout, {"b": 2, "f": 3, "0": case.size[0], "1": case.size[1]}), np.float32
    )
    w = rng.standard_normal(
        case.dims(case.kernel_layout, {"i": 3, "o": 5, "0": case.kernel[0], "1": case.kernel[1]}), np.float32
    )
    with compile(context, case.hlo()) as executable:
        explanation = executable.artifact(Artifact.EXPLANATION).decode()
        assert "with 0 library calls" in explanation
        ours = get(run(executable, *(put(context.devices[0].default_memory, a) for a in (x, w)))[0])
    np.testing.assert_allclose(ours, case.exact(x, w), rtol=1e-5, atol=1e-5)
    return explanation


@pytest.mark.parametrize("number", range(_CASES))
def test_convolution(number: int, context: Context) -> None:
    rng = np.random.default_rng(number)
    _check(context, _random_case(rng), rng)


@pytest.mark.parametrize("is_reversed", [True, False])
@pytest.mark.parametrize("kernel", [(1, 1), (2, 5), (4, 3)])
@pytest.mark.parametrize("low", [(0, 0), (-1, 2), (3, 4)])
@pytest.mark.parametrize("base", [(2, 1), (2, 2), (1, 3)])
def test_zeros_between_elements_are_not_multiplied(
    base: tuple[int, int],
    low: tuple[int, int],
    kernel: tuple[int, int],
    is_reversed: bool,
    context: Context,
    rng: np.random.Generator,
) -> None:
    layouts = [["b01f", "bf01"], ["01io", "oi01"], ["b01f", "01bf"]]
    high = (int(rng.integers(-1, 4)), int(rng.integers(-1, 4)))
    case = Case(
        *((6, 7), kernel, (1, 1), low, high, (1, 1), base, is_reversed),
        *(choice[rng.integers(2)] for choice in layouts),
    )
    assert ".phase" in _check(context, case, rng)


def test_a_phase_that_the_kernel_does_not_reach_is_zero(context: Context, rng: np.random.Generator) -> None:
    case = Case((4, 1), (1, 1), (1, 1), (0, 0), (0, 0), (1, 1), (3, 2), False, "b01f", "01io", "b01f")
    _check(context, case, rng)


def test_gradient_of_the_kernel_of_a_convolution_with_strides(context: Context, rng: np.random.Generator) -> None:
    """What the last stride did not reach is padded away."""
    text = """ENTRY main {
  x = f32[2,16,16,6] parameter(0)
  w = f32[2,8,8,5] parameter(1)
  ROOT y = f32[1,1,6,5] convolution(x, w), window={size=8x8 pad=0_-1x0_-1 rhs_dilate=2x2}, dim_labels=f01b_i01o->01bf
}"""
    x, w = rng.standard_normal((2, 16, 16, 6), np.float32), rng.standard_normal((2, 8, 8, 5), np.float32)
    with compile(context, text) as executable:
        assert "with 0 library calls" in executable.artifact(Artifact.EXPLANATION).decode()
        ours = get(run(executable, *(put(context.devices[0].default_memory, a) for a in (x, w)))[0])
    exact = np.einsum("nhwc,nhwo->co", x[:, ::2, ::2].astype(np.float64), w.astype(np.float64))
    np.testing.assert_allclose(ours[0, 0], exact, rtol=1e-5, atol=1e-4)


def test_whole_image_as_the_window(context: Context, rng: np.random.Generator) -> None:
    """As the gradient of a 1x1 kernel: each spatial dimension is summed, and nothing is copied."""
    text = """ENTRY main {
  x = f32[6,8,9,4] parameter(0)
  w = f32[6,8,9,5] parameter(1)
  ROOT y = f32[1,1,4,5] convolution(x, w), window={size=8x9}, dim_labels=f01b_i01o->01bf
}"""
    x, w = (rng.standard_normal((6, 8, 9, n), np.float32) for n in (4, 5))
    with compile(context, text) as executable:
        assert executable.artifact(Artifact.EXPLANATION).decode().count("\nnative ") == 1
        ours = get(run(executable, *(put(context.devices[0].default_memory, a) for a in (x, w)))[0])
    exact = np.einsum("nhwc,nhwo->co", x.astype(np.float64), w.astype(np.float64))
    np.testing.assert_allclose(ours[0, 0], exact, rtol=1e-5, atol=1e-4)
