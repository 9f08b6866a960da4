"""Products of floats, a BLAS's and those of a few vectors, against NumPy: random arrangements of batch, contracted and
free dimensions, also ones that others stand between; each becomes strided matrices, where it stands or copied, and
comes out right either way."""

from __future__ import annotations

from collections.abc import Callable
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
    explanations = [check(context, arrange(rng), element, rng) for _ in range(_CASES)]
    assert all("with 0 library calls" in text for text in explanations)
    copied = sum(".lhs over" in text or ".rhs over" in text for text in explanations)
    assert 0 < copied < _CASES


# What one operand looks like to BLAS; b is the batch, m and n are free, k is contracted.
SPLIT = {
    "rows_on_both_sides_of_the_batch": ("mbpk", "bkn", "bmpn"),
    "columns_on_both_sides_of_the_batch": ("bmk", "nbkq", "bmnq"),
    "contracted_on_both_sides_of_the_batch": ("kblm", "kbln", "bmn"),
    "batch_inside": ("mkb", "knb", "bmn"),
    "batches_swapped": ("bcmk", "cbkn", "cbmn"),
    "contracted_in_two_orders": ("mkl", "lkn", "mn"),
    "free_interleaved_with_contracted": ("mkpl", "knlq", "mpnq"),
    "trace_of_a_product": ("kl", "lk", ""),
}


@pytest.mark.parametrize("element", _DTYPES)
@pytest.mark.parametrize("name", SPLIT)
def test_split_dimensions(context: Context, element: str, name: str) -> None:
    lhs, rhs, result = SPLIT[name]
    rng = np.random.default_rng(0)
    for _ in range(4):
        sizes = {c: int(rng.choice([1, 2, 3, 4, 7])) for c in lhs + rhs}
        assert "with 0 library calls" in check(context, Arrangement(lhs, rhs, result, sizes), element, rng)


@pytest.mark.parametrize("longer", ["m", "n"])
def test_blocks(context: Context, longer: str) -> None:
    """Large enough that the rows or columns of one product are shared among threads, from either storage of a side."""
    rng = np.random.default_rng(0)
    sizes = {"b": 2, "m": 70, "n": 70, "k": 130, longer: 301}
    for lhs, rhs in (("mk", "kn"), ("km", "nk"), ("mbk", "bkn"), ("kbm", "nbk")):
        case = Arrangement(lhs, rhs, "bmn" if "b" in lhs else "mn", sizes)
        assert "(BLAS)" in check(context, case, "f64", rng)


@pytest.mark.parametrize("element", _DTYPES)
@pytest.mark.parametrize("vectors", [1, 2, 3, 4, 5])
@pytest.mark.parametrize(
    ("count", "depth"),
    [(1, 40), (7, 2), (100, 1500), (300, 700), (301, 1030), (2000, 3), (5000, 40), (64, 0), (400, 0)],
)
def test_a_few_vectors(
    context: Context, element: str, vectors: int, count: int, depth: int, rng: np.random.Generator
) -> None:
    """Either operand has few rows or columns, stored as rows or as columns; alone and in a batch."""
    for lhs, rhs in (("mk", "kn"), ("km", "kn"), ("mk", "nk"), ("km", "nk"), ("bmk", "bkn"), ("bmk", "bnk")):
        for few, many in ("mn", "nm"):
            sizes = {"b": 3, few: vectors, many: count, "k": depth}
            check(context, Arrangement(lhs, rhs, "bmn" if "b" in lhs else "mn", sizes), element, rng)


@pytest.mark.parametrize("stored", ["kn", "nk"])
def test_a_vector_that_is_not_finite_spoils_only_its_own_products(
    context: Context, stored: str, rng: np.random.Generator
) -> None:
    case = Arrangement("mk", stored, "mn", {"m": 3, "n": 700, "k": 600})
    a, b = rng.standard_normal((3, 600)), rng.standard_normal(case.dims(stored))
    a[1, 5], b[...] = np.nan, np.abs(b) + 1
    a[2, 599] = np.inf
    (result,) = run(compile(context, case.hlo("f64")), *(put(context.devices[0].default_memory, x) for x in (a, b)))
    first, second, third = get(result)
    np.testing.assert_allclose(first, a[0] @ (b if stored == "kn" else b.T), rtol=1e-12, atol=1e-10)
    assert np.isnan(second).all() and np.isposinf(third).all()


@dataclass(frozen=True)
class Moved:
    """An operand [6, 5] that the program makes of its parameter ``p`` and moves: in HLO, and in NumPy. ``loops`` run
    beside the product."""

    dims: tuple[int, ...]
    hlo: str
    numpy: Callable[[np.ndarray], np.ndarray]
    loops: int


MOVED = {
    "transposed": Moved(
        (5, 6), "n = f64[5,6] negate(p)\n m = f64[6,5] transpose(n), dimensions={1,0}", lambda p: -p.T, 1
    ),
    "split_and_transposed": Moved(
        (30,),
        "n = f64[30] negate(p)\n s = f64[5,6] reshape(n)\n m = f64[6,5] transpose(s), dimensions={1,0}",
        lambda p: -p.reshape(5, 6).T,
        1,
    ),
    "a_part": Moved(
        (6, 50), "n = f64[6,50] negate(p)\n m = f64[6,5] slice(n), slice={[0:6], [7:12]}", lambda p: -p[:, 7:12], 1
    ),
    "reversed": Moved(
        (6, 5), "n = f64[6,5] negate(p)\n m = f64[6,5] reverse(n), dimensions={0}", lambda p: -p[::-1], 1
    ),
    "repeated": Moved(
        (5,), "n = f64[5] negate(p)\n m = f64[6,5] broadcast(n), dimensions={1}", lambda p: np.tile(-p, (6, 1)), 2
    ),
    "part_of_joined_products": Moved(
        (5, 5),
        "n = f64[5,5] dot(p, p), lhs_contracting_dims={1}, rhs_contracting_dims={0}\n"
        " w = f64[15,5] concatenate(n, n, n), dimensions={0}\n m = f64[6,5] slice(w), slice={[7:13], [0:5]}",
        lambda p: np.tile(p @ p, (3, 1))[7:13],
        3,
    ),
}


@pytest.mark.parametrize("name", MOVED)
def test_operands_that_the_program_made(context: Context, name: str) -> None:
    case = MOVED[name]
    rng = np.random.default_rng(0)
    p, b = rng.standard_normal(case.dims), rng.standard_normal((5, 4))
    sizes = ",".join(map(str, case.dims))
    text = f"""ENTRY e {{ p = f64[{sizes}] parameter(0)
      b = f64[5,4] parameter(1)
      {case.hlo}
      ROOT r = f64[6,4] dot(m, b), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}} }}"""
    executable = compile(context, text)
    (result,) = run(executable, *(put(context.devices[0].default_memory, x) for x in (p, b)))
    np.testing.assert_allclose(get(result), case.numpy(p) @ b, rtol=1e-13, atol=1e-12)
    explanation = executable.artifact(Artifact.EXPLANATION).decode()
    assert explanation.count("native loop") == case.loops and "(BLAS)" in explanation, explanation
