"""Products through BLAS against NumPy: random arrangements of batch, contracted and free dimensions, also ones that
others stand between; each becomes strided matrices or runs as another kernel, and comes out right either way."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from cpu.native.harness import compile, get, put, run
from plugin_abi.host import Artifact, Context

_DTYPES = {"f32": (np.float32, 1e-5), "f64": (np.float64, 1e-13)}
_CASES = 40
_LETTERS = "abcdefghijklmnop"


@dataclass(frozen=True)
class Arrangement:
    """A dot as einsum writes it: letters of the operands and the result, and each letter's size."""

    lhs: str
    rhs: str
    result: str
    sizes: dict[str, int]

    @property
    def batch(self) -> list[str]:
        return [c for c in self.result if c in self.lhs and c in self.rhs]

    @property
    def contracted(self) -> list[str]:
        return [c for c in self.lhs if c in self.rhs and c not in self.result]

    def dims(self, letters: str) -> tuple[int, ...]:
        return tuple(self.sizes[c] for c in letters)

    def hlo(self, element: str) -> str:
        shape = {
            side: f"{element}[{','.join(map(str, self.dims(side)))}]" for side in (self.lhs, self.rhs, self.result)
        }
        attributes = []
        for side, letters in (("lhs", self.lhs), ("rhs", self.rhs)):
            for kind, group in (("batch", self.batch), ("contracting", self.contracted)):
                if group:
                    attributes.append(f"{side}_{kind}_dims={{{','.join(str(letters.index(c)) for c in group)}}}")
        return f"""ENTRY e {{
          a = {shape[self.lhs]} parameter(0)
          b = {shape[self.rhs]} parameter(1)
          ROOT r = {shape[self.result]} dot(a, b){"".join(", " + a for a in attributes)} }}"""


def arrange(rng: np.random.Generator) -> Arrangement:
    """Up to two dimensions of each role; half of the time each role stays together in its operand."""
    letters = iter(_LETTERS)
    batch, contracted, rows, columns = ([next(letters) for _ in range(rng.integers(0, 3))] for _ in range(4))
    sizes = {c: int(rng.choice([1, 2, 3, 5])) for c in (*batch, *contracted, *rows, *columns)}

    def shuffled(*groups: list[str]) -> str:
        if rng.random() < 0.5:
            return "".join("".join(groups[i]) for i in rng.permutation(len(groups)))
        return "".join(rng.permutation([c for group in groups for c in group]))

    lhs, rhs = shuffled(batch, rows, contracted), shuffled(batch, contracted, columns)
    free = [c for c in lhs if c in rows] + [c for c in rhs if c in columns]
    return Arrangement(lhs, rhs, "".join([*rng.permutation(batch), *free]), sizes)


def check(context: Context, case: Arrangement, element: str, rng: np.random.Generator) -> str:
    """Compares, and returns how the program runs."""
    dtype, tolerance = _DTYPES[element]
    a, b = (rng.standard_normal(case.dims(side)).astype(dtype) for side in (case.lhs, case.rhs))
    expected = np.einsum(f"{case.lhs},{case.rhs}->{case.result}", a.astype(np.float64), b.astype(np.float64))
    executable = compile(context, case.hlo(element))
    (result,) = run(executable, *(put(context.devices[0].default_memory, np.asarray(x, order="C")) for x in (a, b)))
    np.testing.assert_allclose(get(result), expected, rtol=tolerance, atol=tolerance * 10, err_msg=str(case))
    return executable.artifact(Artifact.EXPLANATION).decode()


@pytest.mark.parametrize("element", _DTYPES)
@pytest.mark.parametrize("seed", range(4))
def test_random_arrangements(context: Context, element: str, seed: int) -> None:
    rng = np.random.default_rng([seed, len(element)])
    through_blas = sum("(BLAS)" in check(context, arrange(rng), element, rng) for _ in range(_CASES))
    assert 0 < through_blas < _CASES


# What one operand looks like to BLAS; b is the batch, m and n are free, k is contracted.
SPLIT = {
    "rows_on_both_sides_of_the_batch": ("mbpk", "bkn", "bmpn"),
    "columns_on_both_sides_of_the_batch": ("bmk", "nbkq", "bmnq"),
    "contracted_on_both_sides_of_the_batch": ("kblm", "kbln", "bmn"),
    "batch_inside": ("mkb", "knb", "bmn"),
    "batches_swapped": ("bcmk", "cbkn", "cbmn"),
    "contracted_in_two_orders": ("mkl", "lkn", "mn"),
    "free_interleaved_with_contracted": ("mkpl", "knlq", "mpnq"),
}


@pytest.mark.parametrize("element", _DTYPES)
@pytest.mark.parametrize("name", SPLIT)
def test_split_dimensions(context: Context, element: str, name: str) -> None:
    lhs, rhs, result = SPLIT[name]
    rng = np.random.default_rng(0)
    for _ in range(4):
        sizes = {c: int(rng.choice([1, 2, 3, 4, 7])) for c in lhs + rhs}
        check(context, Arrangement(lhs, rhs, result, sizes), element, rng)


@pytest.mark.parametrize("longer", ["m", "n"])
def test_blocks(context: Context, longer: str) -> None:
    """Large enough that the rows or columns of one product are shared among threads, from either storage of a side."""
    rng = np.random.default_rng(0)
    sizes = {"b": 2, "m": 70, "n": 70, "k": 130, longer: 301}
    for lhs, rhs in (("mk", "kn"), ("km", "nk"), ("mbk", "bkn"), ("kbm", "nbk")):
        case = Arrangement(lhs, rhs, "bmn" if "b" in lhs else "mn", sizes)
        assert "(BLAS)" in check(context, case, "f64", rng)
