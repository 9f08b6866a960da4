"""Fourier transforms in native code, judged by NumPy's in float64."""

from __future__ import annotations

import numpy as np
import pytest

from cpu.native.harness import compile, get, put, run, run_function
from plugin_abi.host import Artifact, Context

_NUMPY = {"FFT": np.fft.fftn, "IFFT": np.fft.ifftn, "RFFT": np.fft.rfftn, "IRFFT": np.fft.irfftn}
_EPSILON = {"f32": 2.0**-23, "f64": 2.0**-52}
# Batch, then lengths: powers of two, primes, one, more lines than a block has and some left over, enough for threads.
_SHAPES = [
    ((), (1,)),
    ((), (2,)),
    ((3,), (7,)),
    ((2, 3), (16,)),
    ((), (1009,)),
    ((70,), (512,)),
    ((), (4, 6)),
    ((2,), (1, 5)),
    ((3,), (5, 1)),
    ((2,), (256, 258)),
    ((), (1024, 24)),
    ((), (3, 4, 5)),
    ((2,), (32, 33, 64)),
]


def _shape(element: str, dims: tuple[int, ...]) -> str:
    return f"{element}[{','.join(map(str, dims))}]"


def _program(kind: str, element: str, batch: tuple[int, ...], lengths: tuple[int, ...]) -> tuple[str, str]:
    """Types of the operand and the result."""
    halved = (*lengths[:-1], lengths[-1] // 2 + 1)
    complex_type = {"f32": "c64", "f64": "c128"}[element]
    real, half = _shape(element, (*batch, *lengths)), _shape(complex_type, (*batch, *halved))
    whole = _shape(complex_type, (*batch, *lengths))
    return {"RFFT": (real, half), "IRFFT": (half, real)}.get(kind, (whole, whole))


def _operand(rng: np.random.Generator, shape: str) -> np.ndarray:
    element, dims = shape.rstrip("]").split("[")
    sizes = tuple(map(int, dims.split(",")))
    dtype = {"f32": np.float32, "f64": np.float64, "c64": np.complex64, "c128": np.complex128}[element]
    imaginary = 1j * rng.standard_normal(sizes) if element.startswith("c") else 0
    return np.asarray(rng.standard_normal(sizes) + imaginary).astype(dtype)


def _transformed(
    context: Context, kind: str, element: str, batch: tuple[int, ...], lengths: tuple[int, ...], x: np.ndarray
) -> np.ndarray:
    before, after = _program(kind, element, batch, lengths)
    text = f"""ENTRY main {{
  x = {before} parameter(0)
  ROOT y = {after} fft(x), fft_type={kind}, fft_length={{{",".join(map(str, lengths))}}}
}}"""
    with compile(context, text) as executable:
        explanation = executable.artifact(Artifact.EXPLANATION).decode()
        assert "native fft" in explanation
        assert "call fft" not in explanation
        argument = put(context.devices[0].default_memory, x)
        (result,) = run(executable, argument)
        np.testing.assert_array_equal(get(argument), x)
        return get(result)


@pytest.mark.parametrize(("batch", "lengths"), _SHAPES)
@pytest.mark.parametrize("kind", _NUMPY)
@pytest.mark.parametrize("element", _EPSILON)
def test_transforms(
    element: str,
    kind: str,
    batch: tuple[int, ...],
    lengths: tuple[int, ...],
    context: Context,
    rng: np.random.Generator,
) -> None:
    # Half of what a real inverse reads is given, at random: where it is no transform of real numbers, imaginary parts
    # that such a one does not have are left out after the other dimensions were transformed, as in NumPy.
    x = _operand(rng, _program(kind, element, batch, lengths)[0])
    actual = _transformed(context, kind, element, batch, lengths, x)
    axes = tuple(range(-len(lengths), 0))
    wide = x.astype(np.complex128 if x.dtype.kind == "c" else np.float64)
    expected = _NUMPY[kind](wide, s=lengths, axes=axes)
    # In the root mean square an algorithm of n log n is off by some roundings for each of its stages.
    bound = _EPSILON[element] * (4 + 2 * np.log2(np.prod(lengths))) * np.sqrt(np.mean(np.abs(expected) ** 2))
    assert actual.shape == expected.shape
    assert np.max(np.abs(actual - expected), initial=0) <= 4 * bound


@pytest.mark.parametrize("kind", _NUMPY)
def test_what_is_not_finite_stays_in_its_batch(kind: str, context: Context, rng: np.random.Generator) -> None:
    x = _operand(rng, _program(kind, "f32", (3,), (8, 6))[0])
    clean = _transformed(context, kind, "f32", (3,), (8, 6), x)
    x[1, 2, 1] = np.nan
    actual = _transformed(context, kind, "f32", (3,), (8, 6), x)
    np.testing.assert_array_equal(actual[::2], clean[::2])
    assert np.isnan(actual[1]).any()


def test_without_elements_a_library_call_gives_zeros(context: Context) -> None:
    text = """ENTRY main {
  x = c64[0,4] parameter(0)
  ROOT y = c64[0,4] fft(x), fft_type=FFT, fft_length={4}
}"""
    with compile(context, text) as executable:
        (result,) = run(executable, put(context.devices[0].default_memory, np.zeros((0, 4), np.complex64)))
        assert get(result).shape == (0, 4)


def test_steps_of_a_loop(context: Context, rng: np.random.Generator) -> None:
    """As in spectral solvers: what is carried is transformed, changed, and transformed back; there is no Python."""
    from jax import lax
    from jax import numpy as jnp

    def diffuse(u: np.ndarray, decay: np.ndarray) -> object:
        return lax.fori_loop(0, 5, lambda _, u: jnp.fft.irfft2(jnp.fft.rfft2(u.T) * decay), u)

    u = rng.standard_normal((64, 64)).astype(np.float32)
    decay = rng.uniform(0.5, 1, (64, 33)).astype(np.float32)
    (actual,), explanation = run_function(context, diffuse, u, decay)
    assert explanation.count("native fft") == 2
    assert "call fft" not in explanation
    expected = u.astype(np.float64)
    for _ in range(5):
        expected = np.fft.irfft2(np.fft.rfft2(expected.T) * decay)
    np.testing.assert_allclose(actual, expected, rtol=0, atol=2e-6)
