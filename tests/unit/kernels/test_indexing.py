"""Gather, scatter and dynamic slices against stock XLA: random dimension numbers, every element type, any index."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from flagos_backend.ir.types import ElementType
from flagos_backend.kernels.reference.registry import Run, prepare, prepare_in_place
from support.against_xla import check, check_function, hlo_of_text, to_storage
from support.numbers import NUMPY_DTYPE, random_values

E = ElementType
TYPES = (E.PRED, E.S8, E.U8, E.S16, E.U16, E.S32, E.U32, E.S64, E.U64, E.F16, E.BF16, E.F32, E.F64, E.C64, E.C128)
INDEX_TYPES = ("s8", "u8", "s16", "u16", "s32", "u32", "s64", "u64")


def array(element_type: ElementType, dims: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    return random_values(element_type, int(np.prod(dims)), rng).reshape(dims)


@dataclass(frozen=True)
class Case:
    """Dimension numbers of a gather, and of the scatter that mirrors it."""

    operand: tuple[int, ...]
    indices: tuple[int, ...]
    sizes: tuple[int, ...]
    result: tuple[int, ...]
    offset_dims: tuple[int, ...]
    collapsed: tuple[int, ...]
    start_index_map: tuple[int, ...]
    index_vector_dim: int
    operand_batching: tuple[int, ...]
    indices_batching: tuple[int, ...]


def random_case(rng: np.random.Generator) -> Case:
    """A valid set of dimension numbers, drawn at random."""
    rank = int(rng.integers(1, 5))
    operand = tuple(int(d) for d in rng.integers(1, 6, rank))
    roles = rng.choice(["window", "indexed", "collapsed", "batch"], rank, p=[0.3, 0.35, 0.2, 0.15])
    batching = tuple(d for d in range(rank) if roles[d] == "batch")
    indexed = [d for d in range(rank) if roles[d] in ("indexed", "collapsed")]
    rng.shuffle(indexed)
    sizes = tuple(
        1 if roles[d] in ("batch", "collapsed") else int(rng.integers(0 if rng.random() < 0.1 else 1, operand[d] + 1))
        for d in range(rank)
    )
    free_batch = [int(d) for d in rng.integers(1, 5, int(rng.integers(0, 3)))]
    batch_dims: list[tuple[int, int | None]] = [(d, None) for d in free_batch]
    batch_dims += [(operand[d], d) for d in batching]
    order = rng.permutation(len(batch_dims))
    batch_dims = [batch_dims[i] for i in order]
    implicit = len(indexed) == 1 and bool(rng.random() < 0.3)
    vector_dim = len(batch_dims) if implicit else int(rng.integers(0, len(batch_dims) + 1))
    indices = [size for size, _ in batch_dims]
    positions = [i + (not implicit and i >= vector_dim) for i in range(len(batch_dims))]
    if not implicit:
        indices.insert(vector_dim, len(indexed))
    window = [d for d in range(rank) if roles[d] in ("window", "indexed")]
    total = len(window) + len(batch_dims)
    offset_dims = tuple(sorted(int(d) for d in rng.choice(total, len(window), replace=False)))
    sources = iter(size for size, _ in batch_dims)
    windows = iter(sizes[d] for d in window)
    return Case(
        operand=operand,
        indices=tuple(indices),
        sizes=sizes,
        result=tuple(next(windows) if d in offset_dims else next(sources) for d in range(total)),
        offset_dims=offset_dims,
        collapsed=tuple(d for d in range(rank) if roles[d] == "collapsed"),
        start_index_map=tuple(indexed),
        index_vector_dim=vector_dim,
        operand_batching=batching,
        indices_batching=tuple(
            positions[next(i for i, (_, owner) in enumerate(batch_dims) if owner == d)] for d in batching
        ),
    )


def listed(values: tuple[int, ...]) -> str:
    return "{" + ",".join(map(str, values)) + "}"


def shape(name: str, dims: tuple[int, ...]) -> str:
    return f"{name}[{','.join(map(str, dims))}]"


def gather_text(case: Case, element_type: str, index_type: str) -> str:
    batching = ""
    if case.operand_batching:
        batching = (
            f", operand_batching_dims={listed(case.operand_batching)}"
            f", start_indices_batching_dims={listed(case.indices_batching)}"
        )
    return f"""
ENTRY e {{
  x = {shape(element_type, case.operand)} parameter(0)
  i = {shape(index_type, case.indices)} parameter(1)
  ROOT r = {shape(element_type, case.result)} gather(x, i), offset_dims={listed(case.offset_dims)},
    collapsed_slice_dims={listed(case.collapsed)}, start_index_map={listed(case.start_index_map)},
    index_vector_dim={case.index_vector_dim}, slice_sizes={listed(case.sizes)}{batching}
}}"""


COMBINERS = {
    "set": "ROOT r = {t}[] copy(b)",
    "add": "ROOT r = {t}[] add(a, b)",
    "multiply": "ROOT r = {t}[] multiply(b, a)",
    "maximum": "ROOT r = {t}[] maximum(a, b)",
    "minimum": "ROOT r = {t}[] minimum(a, b)",
    # Not commutative: the order of updates of one place shows.
    "subtract": "ROOT r = {t}[] subtract(b, a)",
}


def scatter_text(case: Case, combiner: str, element_type: str, index_type: str, unique: bool = False) -> str:
    batching = ""
    if case.operand_batching:
        batching = (
            f", input_batching_dims={listed(case.operand_batching)}"
            f", scatter_indices_batching_dims={listed(case.indices_batching)}"
        )
    return f"""
combine {{
  a = {element_type}[] parameter(0)
  b = {element_type}[] parameter(1)
  {COMBINERS[combiner].format(t=element_type)}
}}
ENTRY e {{
  x = {shape(element_type, case.operand)} parameter(0)
  i = {shape(index_type, case.indices)} parameter(1)
  u = {shape(element_type, case.result)} parameter(2)
  ROOT r = {shape(element_type, case.operand)} scatter(x, i, u), update_window_dims={listed(case.offset_dims)},
    inserted_window_dims={listed(case.collapsed)}, scatter_dims_to_operand_dims={listed(case.start_index_map)},
    index_vector_dim={case.index_vector_dim}{batching}{", unique_indices=true" if unique else ""}, to_apply=combine
}}"""


def indices_of(case: Case, index_type: str, rng: np.random.Generator) -> np.ndarray:
    """Mostly near the bounds, inside and outside, and now and then the type's bounds."""
    dtype = np.dtype({"s": "int", "u": "uint"}[index_type[0]] + index_type[1:])
    info = np.iinfo(dtype)
    values = rng.integers(max(-2, info.min), max(case.operand) + 2, case.indices).astype(dtype)
    bounds = rng.choice(np.array([info.min, info.max], dtype), case.indices)
    return np.where(rng.random(case.indices) < 0.05, bounds, values)


@pytest.mark.parametrize("number", range(40))
def test_gather_with_random_dimension_numbers(number: int, rng: np.random.Generator) -> None:
    case = random_case(rng)
    index_type = INDEX_TYPES[number % len(INDEX_TYPES)]
    check(gather_text(case, "s32", index_type), array(E.S32, case.operand, rng), indices_of(case, index_type, rng))


@pytest.mark.parametrize("combiner", COMBINERS)
@pytest.mark.parametrize("number", range(8))
def test_scatter_with_random_dimension_numbers(combiner: str, number: int, rng: np.random.Generator) -> None:
    case = random_case(rng)
    while not case.start_index_map:
        case = random_case(rng)  # stock XLA drops updates when index vectors are empty and there are several
    index_type = INDEX_TYPES[number]
    check(
        scatter_text(case, combiner, "s32", index_type),
        array(E.S32, case.operand, rng),
        indices_of(case, index_type, rng),
        array(E.S32, case.result, rng),
    )


ROWS = Case((7, 3), (12, 1), (1, 3), (12, 3), (1,), (0,), (0,), 1, (), ())
COLUMNS = Case((3, 7), (12, 1), (3, 1), (12, 3), (1,), (1,), (1,), 1, (), ())
ONE_WINDOW = Case((5, 6), (2,), (2, 3), (2, 3), (0, 1), (), (1, 0), 0, (), ())
WINDOWS = Case((5, 6), (4, 2), (2, 3), (4, 2, 3), (1, 2), (), (0, 1), 1, (), ())
ALL_SHAPES = {"rows": ROWS, "columns": COLUMNS, "one window": ONE_WINDOW, "windows": WINDOWS}


@pytest.mark.parametrize("element_type", TYPES, ids=lambda t: t.name)
@pytest.mark.parametrize("case", ALL_SHAPES.values(), ids=ALL_SHAPES)
def test_gather_of_every_type(element_type: ElementType, case: Case, rng: np.random.Generator) -> None:
    text = gather_text(case, element_type.name.lower(), "s32")
    check(text, array(element_type, case.operand, rng), indices_of(case, "s32", rng))


def combiners_of(element_type: ElementType) -> list[str]:
    if element_type is E.PRED:
        return ["set", "add", "multiply", "maximum", "minimum"]
    return [c for c in COMBINERS if not (element_type.is_complex and c in ("maximum", "minimum"))]


@pytest.mark.parametrize("element_type", TYPES, ids=lambda t: t.name)
@pytest.mark.parametrize("case", ALL_SHAPES.values(), ids=ALL_SHAPES)
def test_scatter_of_every_type_with_repeated_indices(
    element_type: ElementType, case: Case, rng: np.random.Generator
) -> None:
    tolerance = {E.F16: 2e-2, E.BF16: 1e-1, E.F32: 1e-5, E.C64: 1e-5}.get(element_type, 1e-12)
    for combiner in combiners_of(element_type):
        text = scatter_text(case, combiner, element_type.name.lower(), "s32")
        operand, updates = (array(element_type, dims, rng) for dims in (case.operand, case.result))
        exact = not (element_type.is_float or element_type.is_complex) or combiner in ("set", "maximum", "minimum")
        with np.errstate(all="ignore"):
            check(text, operand, indices_of(case, "s32", rng), updates, tolerance=None if exact else tolerance)


def test_scatter_propagates_nan_in_maximum(rng: np.random.Generator) -> None:
    text = scatter_text(ROWS, "maximum", "f32", "s32")
    updates = array(E.F32, ROWS.result, rng)
    updates[3] = np.nan
    check(text, array(E.F32, ROWS.operand, rng), indices_of(ROWS, "s32", rng), updates)


@pytest.mark.parametrize("combiner", COMBINERS)
def test_scatter_that_promises_unique_indices(combiner: str, rng: np.random.Generator) -> None:
    case = Case((20, 3), (12, 1), (1, 3), (12, 3), (1,), (0,), (0,), 1, (), ())
    indices = rng.permutation(np.arange(-2, 22))[:12].reshape(12, 1).astype(np.int32)
    text = scatter_text(case, combiner, "s32", "s32", unique=True)
    check(text, array(E.S32, case.operand, rng), indices, array(E.S32, case.result, rng))


def test_scatter_of_two_arrays_that_combine_together(rng: np.random.Generator) -> None:
    text = """
combine {
  a = s32[] parameter(0)
  b = s32[] parameter(1)
  c = s32[] parameter(2)
  d = s32[] parameter(3)
  smaller = pred[] compare(c, a), direction=LT
  first = s32[] select(smaller, c, a)
  second = s32[] subtract(d, b)
  ROOT r = (s32[], s32[]) tuple(first, second)
}
ENTRY e {
  x = s32[6,2] parameter(0)
  y = s32[6,2] parameter(1)
  i = s32[9] parameter(2)
  u = s32[9,2] parameter(3)
  v = s32[9,2] parameter(4)
  ROOT r = (s32[6,2], s32[6,2]) scatter(x, y, i, u, v), update_window_dims={1}, inserted_window_dims={0},
    scatter_dims_to_operand_dims={0}, index_vector_dim=1, to_apply=combine
}"""
    x, y = array(E.S32, (6, 2), rng), array(E.S32, (6, 2), rng)
    u, v = array(E.S32, (9, 2), rng), array(E.S32, (9, 2), rng)
    check(text, x, y, rng.integers(-1, 7, 9).astype(np.int32), u, v)


@pytest.mark.parametrize(
    "function",
    [
        lambda x, i: x[i],
        lambda x, i: x[:, i, None],
        lambda x, i: jnp.take(x, i, axis=1, mode="fill"),
        lambda x, i: x.at[i, i].add(i.astype(x.dtype), mode="clip"),
        lambda x, i: x.at[:, i].multiply(2.0),
        lambda x, i: x.at[i].apply(jnp.sin),
        lambda x, i: jax.vmap(lambda row, k: lax.dynamic_slice(row, (k,), (2,)))(x[: len(i)], i),
        lambda x, i: jax.vmap(lambda row, k: lax.dynamic_update_slice(row, row[:2], (k,)))(x[: len(i)], i),
        lambda x, i: jax.grad(lambda t: jnp.sum(jnp.tanh(t[i])))(x),
    ],
)
def test_indexing_as_jax_programs_write_it(function: Callable[..., jax.Array], rng: np.random.Generator) -> None:
    check_function(function, array(E.F32, (6, 5), rng), rng.integers(-7, 8, 4).astype(np.int32), tolerance=1e-5)


@pytest.mark.parametrize("element_type", TYPES, ids=lambda t: t.name)
@pytest.mark.parametrize("index_type", ["s32", "u8", "s64", "u64"])
def test_dynamic_slices_clamp(element_type: ElementType, index_type: str, rng: np.random.Generator) -> None:
    t = element_type.name.lower()
    text = f"""
ENTRY e {{
  x = {t}[5,4] parameter(0)
  u = {t}[2,4] parameter(1)
  i = {index_type}[] parameter(2)
  j = {index_type}[] parameter(3)
  s = {t}[3,2] dynamic-slice(x, i, j), dynamic_slice_sizes={{3,2}}
  w = {t}[5,4] dynamic-update-slice(x, u, j, i)
  ROOT r = ({t}[3,2], {t}[5,4]) tuple(s, w)
}}"""
    x, u = array(element_type, (5, 4), rng), array(element_type, (2, 4), rng)
    dtype = NUMPY_DTYPE[E[index_type.upper()]]
    info = np.iinfo(dtype)
    for i, j in ((1, 1), (info.min, info.max), (int(rng.integers(0, 7)), int(rng.integers(0, 7)))):
        check(text, x, u, np.array(i, dtype), np.array(j, dtype))


@pytest.mark.parametrize("dims", [(0, 3), (3, 0)])
def test_arrays_without_elements(dims: tuple[int, int], rng: np.random.Generator) -> None:
    indices = rng.integers(0, 3, (4,)).astype(np.int32)
    empty = np.zeros(dims, np.float32)
    check_function(lambda x, i: x.at[i].add(1.0, mode="drop"), empty, indices)
    check_function(lambda x, i: x[:, i[:0]], np.ones((3, 2), np.float32), indices)


@pytest.mark.parametrize("opcode", ["scatter", "dynamic-update-slice"])
@pytest.mark.parametrize("contiguous", [True, False])
def test_in_place_variant_gives_the_same_in_the_operand(
    opcode: str, contiguous: bool, rng: np.random.Generator
) -> None:
    from flagos_backend.importer import import_module

    text = scatter_text(ROWS, "subtract", "s32", "s32")
    operands = [array(E.S32, ROWS.operand, rng), indices_of(ROWS, "s32", rng), array(E.S32, ROWS.result, rng)]
    if opcode != "scatter":
        text = """
ENTRY e {
  x = s32[7,3] parameter(0)
  u = s32[2,3] parameter(1)
  i = s32[] parameter(2)
  ROOT r = s32[7,3] dynamic-update-slice(x, u, i, i)
}"""
        operands = [operands[0], array(E.S32, (2, 3), rng), np.array(4, np.int32)]
    root = import_module(hlo_of_text(text)).entry.root
    tensors = [to_storage(o, p.shape) for o, p in zip(operands, root.operands[: len(operands)], strict=True)]
    arguments = tensors if opcode == "scatter" else [tensors[0], tensors[1], tensors[2], tensors[2]]
    expected = prepare(root)(Run(), *arguments)
    if not contiguous:
        arguments[0] = arguments[0].t().contiguous().t()
    variant = prepare_in_place(root)
    assert variant is not None
    result = variant.kernel(Run(), *arguments)
    assert result is arguments[0]
    assert result.equal(expected)
