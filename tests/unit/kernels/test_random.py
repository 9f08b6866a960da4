"""Random bits, bit for bit those of stock XLA; the stateful rng by its distribution."""

from __future__ import annotations

import numpy as np
import pytest

from flagos_backend.ir.types import ElementType
from support.against_xla import check, hlo_of_text, run_on_backend
from support.numbers import NUMPY_DTYPE

E = ElementType
SHAPES = ((), (1,), (2,), (7,), (5, 3), (4, 3), (3, 4, 5), (1, 1, 9), (129, 3))
STATE_WORDS = [("rng_three_fry", 2), ("rng_philox", 2), ("rng_philox", 3), ("rng_default", 2), ("rng_default", 3)]


def bits_text(algorithm: str, words: int, element_type: ElementType, shapes: tuple[tuple[int, ...], ...]) -> str:
    """Draws every shape from the same state."""
    results = [f"(u64[{words}], {element_type.name.lower()}[{','.join(map(str, dims))}])" for dims in shapes]
    lines = [f"  r{i} = {result} rng-bit-generator(s), algorithm={algorithm}" for i, result in enumerate(results)]
    names = ", ".join(f"r{i}" for i in range(len(results)))
    return "\n".join(
        [
            "ENTRY e {",
            f"  s = u64[{words}] parameter(0)",
            *lines,
            f"  ROOT r = ({', '.join(results)}) tuple({names})",
            "}",
        ]
    )


@pytest.mark.parametrize(("algorithm", "words"), STATE_WORDS)
@pytest.mark.parametrize("element_type", [E.U8, E.U16, E.U32, E.U64], ids=lambda t: t.name)
def test_bits_and_new_state(algorithm: str, words: int, element_type: ElementType, rng: np.random.Generator) -> None:
    shapes = SHAPES if algorithm == "rng_three_fry" else (*SHAPES, (0, 3))  # XLA's ThreeFry cannot do an empty shape
    check(bits_text(algorithm, words, element_type, shapes), rng.integers(0, 2**64, words, dtype=np.uint64))


@pytest.mark.parametrize("signed", [E.S8, E.S16, E.S32, E.S64], ids=lambda t: t.name)
def test_signed_integers_have_the_same_bits(signed: ElementType, rng: np.random.Generator) -> None:
    """Stock XLA hands out unsigned buffers where a program asks for signed ones."""
    state = rng.integers(0, 2**64, 2, dtype=np.uint64)
    unsigned = E[f"U{signed.bits}"]
    ours, expected = (
        run_on_backend(hlo_of_text(bits_text("rng_three_fry", 2, t, ((5, 3),))), [state])[1] for t in (signed, unsigned)
    )
    np.testing.assert_array_equal(ours, expected.view(ours.dtype))


def test_threefry_of_an_empty_shape_leaves_the_counter() -> None:
    state = np.array([3, 4], np.uint64)
    after, bits = run_on_backend(hlo_of_text(bits_text("rng_three_fry", 2, E.U32, ((0, 3),))), [state])
    np.testing.assert_array_equal(after, state)
    assert bits.shape == (0, 3)


@pytest.mark.parametrize("algorithm", ["rng_three_fry", "rng_philox"])
def test_counters_carry(algorithm: str) -> None:
    words = 2 if algorithm == "rng_three_fry" else 3
    text = f"""
ENTRY e {{
  s = u64[{words}] parameter(0)
  ROOT r = (u64[{words}], u32[3,40]) rng-bit-generator(s), algorithm={algorithm}
}}"""
    for low in (2**64 - 1, 2**64 - 7, 2**63 - 3, 2**32 - 2):
        check(text, np.array([12345, low, 2**64 - 1][:words], np.uint64))


def drawn(distribution: str, element_type: ElementType, low: float, high: float, count: int = 20000) -> np.ndarray:
    t = element_type.name.lower()
    text = f"""
ENTRY e {{
  a = {t}[] parameter(0)
  b = {t}[] parameter(1)
  ROOT r = {t}[{count}] rng(a, b), distribution=rng_{distribution}
}}"""
    dtype = NUMPY_DTYPE[element_type]
    return run_on_backend(hlo_of_text(text), [np.array(low, dtype), np.array(high, dtype)])[0].astype(np.float64)


@pytest.mark.parametrize("element_type", [E.F16, E.BF16, E.F32, E.F64], ids=lambda t: t.name)
def test_stateful_floats(element_type: ElementType) -> None:
    values = drawn("uniform", element_type, -2, 6)
    assert values.min() >= -2
    assert values.max() <= 6
    assert abs(values.mean() - 2) < 0.1
    values = drawn("normal", element_type, 3, 2)
    assert abs(values.mean() - 3) < 0.1
    assert abs(values.std() - 2) < 0.1


@pytest.mark.parametrize("element_type", [E.S32, E.U32, E.S64, E.U64, E.U8], ids=lambda t: t.name)
def test_stateful_integers_fill_their_range(element_type: ElementType) -> None:
    info = np.iinfo(NUMPY_DTYPE[element_type])
    low, high = info.max // 8 * 3, info.max // 4 * 3
    values = drawn("uniform", element_type, low, high)
    assert values.min() >= low
    assert values.max() < high
    assert abs(values.mean() - (low + high) / 2) < (high - low) * 0.05
    assert set(drawn("uniform", element_type, 5, 8)) == {5, 6, 7}


def test_stateful_numbers_differ_from_call_to_call() -> None:
    assert not np.array_equal(drawn("uniform", E.F32, 0, 1), drawn("uniform", E.F32, 0, 1))


def test_a_range_wider_than_63_bits() -> None:
    values = drawn("uniform", E.U64, 0, 2**64 - 1)
    assert abs(values.mean() / 2**63 - 1) < 0.05
    assert values.max() > 1.9 * 2**63
