"""Scatters in native code: against stock XLA where the order is no matter, else against updates one by one."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import lax

from cpu.native.harness import compile, get, put, run, run_function
from plugin_abi.host import Artifact, Context
from programs import run_on_xla
from support.against_xla import hlo_of_text

_SCATTERS = {
    "one element of each row": (
        "[64,100] [64,1,1] [64,1]",
        "update_window_dims={}, inserted_window_dims={1}, scatter_dims_to_operand_dims={1}, index_vector_dim=2, "
        "input_batching_dims={0}, scatter_indices_batching_dims={0}",
    ),
    "rows of a table": (
        "[43,33] [7,9] [7,9,33]",
        "update_window_dims={2}, inserted_window_dims={0}, scatter_dims_to_operand_dims={0}, index_vector_dim=2",
    ),
    "columns, in front of the batch": (
        "[12,40] [90] [12,90]",
        "update_window_dims={0}, inserted_window_dims={1}, scatter_dims_to_operand_dims={1}, index_vector_dim=1",
    ),
    "windows of two starts that overlap, given the other way round": (
        "[20,30,5] [2,70] [3,70,4,5]",
        "update_window_dims={0,2,3}, inserted_window_dims={}, scatter_dims_to_operand_dims={1,0}, index_vector_dim=0",
    ),
    "batches that stand apart": (
        "[6,31,4] [4,5,6] [4,5,6,3]",
        "update_window_dims={3}, inserted_window_dims={}, scatter_dims_to_operand_dims={1}, index_vector_dim=3, "
        "input_batching_dims={0,2}, scatter_indices_batching_dims={2,0}",
    ),
    "two windows": (
        "[9,8] [2,2] [2,4,3]",
        "update_window_dims={1,2}, inserted_window_dims={}, scatter_dims_to_operand_dims={0,1}, index_vector_dim=0",
    ),
    "a window that no index moves": (
        "[9,8] [5,1] [5,7]",
        "update_window_dims={1}, inserted_window_dims={0}, scatter_dims_to_operand_dims={0}, index_vector_dim=1",
    ),
    "overlapping runs of a line": (
        "[200] [800,1] [800,7]",
        "update_window_dims={1}, inserted_window_dims={}, scatter_dims_to_operand_dims={0}, index_vector_dim=1",
    ),
}
# For all threads: windows wide enough, batches enough, rows enough.
_LARGE = {
    "wide rows": (
        "[43,300] [700,1] [700,300]",
        "update_window_dims={1}, inserted_window_dims={0}, scatter_dims_to_operand_dims={0}, index_vector_dim=1",
    ),
    "many batches": (
        "[300,43] [300,700,1] [300,700]",
        "update_window_dims={}, inserted_window_dims={1}, scatter_dims_to_operand_dims={1}, index_vector_dim=2, "
        "input_batching_dims={0}, scatter_indices_batching_dims={0}",
    ),
    "long columns": (
        "[301,43] [700,1] [301,700]",
        "update_window_dims={0}, inserted_window_dims={1}, scatter_dims_to_operand_dims={1}, index_vector_dim=1",
    ),
}
_OPERATIONS = ("assign", "add", "multiply", "maximum", "minimum", "and", "or", "xor")
_DTYPES = {
    "pred": np.bool_,
    "s8": np.int8,
    "u16": np.uint16,
    "s32": np.int32,
    "u32": np.uint32,
    "s64": np.int64,
    "u64": np.uint64,
    "f16": np.float16,
    "bf16": ml_dtypes.bfloat16,
    "f32": np.float32,
    "f64": np.float64,
}
_OPERATIONS_OF_TYPES = [
    (operation, element)
    for operation in _OPERATIONS
    for element in _DTYPES
    if operation not in ("and", "or", "xor") or element[0] in "psu"
]
_MOVED = {"c64": np.complex64, "c128": np.complex128}
_INDICES = {"s8": np.int8, "u8": np.uint8, "u16": np.uint16, "s32": np.int32, "s64": np.int64, "u64": np.uint64}


def _text(scatter: tuple[str, str], operation: str, element: str, index: str, extra: str = "") -> str:
    shapes, attributes = scatter
    array, indices, updates = shapes.split()
    combined = "" if operation == "assign" else f"ROOT c = {element}[] {operation}(a, b)"
    root = "ROOT " if operation == "assign" else ""
    return f"""combine {{
  a = {element}[] parameter(0)
  {root}b = {element}[] parameter(1)
  {combined}
}}
ENTRY main {{
  x = {element}{array} parameter(0)
  i = {index}{indices} parameter(1)
  u = {element}{updates} parameter(2)
  ROOT y = {element}{array} scatter(x, i, u), {attributes}{extra}, to_apply=combine
}}"""


def _dims(scatter: tuple[str, str]) -> list[tuple[int, ...]]:
    return [tuple(map(int, dims.strip("[]").split(","))) for dims in scatter[0].split()]


def _indices(rng: np.random.Generator, dtype: type, dims: Sequence[int]) -> np.ndarray:
    """Mostly in range; some beyond either end, as far as the type goes."""
    info = np.iinfo(dtype)
    indices = rng.integers(max(info.min, -3), min(info.max, 45), dims).astype(dtype)
    indices.reshape(-1)[:2] = info.min, info.max
    return indices


def _array(rng: np.random.Generator, dtype: type, dims: Sequence[int]) -> np.ndarray:
    x = rng.uniform(0.75, 1.35, dims) * rng.choice([-1, 1], dims)  # many of them have a product
    if dtype is np.bool_:
        return x > 0
    if np.issubdtype(dtype, np.integer):
        return rng.integers(np.iinfo(dtype).min, np.iinfo(dtype).max, dims, dtype=dtype, endpoint=True)
    return x.astype(dtype)


def _ours(context: Context, text: str, *operands: np.ndarray, native: bool = True) -> np.ndarray:
    memory = context.devices[0].default_memory
    with compile(context, text) as executable:
        assert ("native scatter" in executable.artifact(Artifact.EXPLANATION).decode()) is native
        return get(run(executable, *(put(memory, x) for x in operands))[0])


def _numbers(attributes: str, name: str) -> list[int]:
    found = attributes.partition(f"{name}={{")[2].partition("}")[0]
    return [int(n) for n in found.split(",") if n]


def _one_by_one(
    scatter: tuple[str, str], combine: Callable[..., np.generic] | None, x: np.ndarray, i: np.ndarray, u: np.ndarray
) -> np.ndarray:
    """XLA's definition: the windows in the order of the batch, those that do not fit left out whole."""
    attributes = scatter[1]
    vector_dim = int(attributes.partition("index_vector_dim=")[2].partition(",")[0])
    window_dims = _numbers(attributes, "update_window_dims")
    batching = _numbers(attributes, "input_batching_dims")
    pairs = list(zip(_numbers(attributes, "scatter_indices_batching_dims"), batching, strict=True))
    dropped = {*_numbers(attributes, "inserted_window_dims"), *batching}
    kept = [d for d in range(x.ndim) if d not in dropped]
    indices = i[..., None] if vector_dim == i.ndim else np.moveaxis(i, vector_dim, -1)
    updates = np.moveaxis(u, window_dims, range(u.ndim - len(window_dims), u.ndim))
    result = x.copy()
    for position in itertools.product(*map(range, indices.shape[:-1])):
        start = [0] * x.ndim
        for d, number in zip(_numbers(attributes, "scatter_dims_to_operand_dims"), indices[position], strict=True):
            start[d] = int(number)
        for along, d in pairs:
            start[d] = position[along - (along > vector_dim)]
        window = updates[position]
        sizes = dict(zip(kept, window.shape, strict=True))
        if any(not 0 <= s <= x.shape[d] - sizes.get(d, 1) for d, s in enumerate(start)):
            continue
        place = tuple(slice(s, s + sizes.get(d, 1)) for d, s in enumerate(start))
        block = window.reshape([sizes.get(d, 1) for d in range(x.ndim)])
        result[place] = block if combine is None else combine(result[place], block)
    return result


def _same(ours: np.ndarray, expected: np.ndarray) -> None:
    assert ours.dtype == expected.dtype
    assert ours.tobytes() == expected.tobytes()


@pytest.mark.parametrize("kind", _SCATTERS)
def test_sums_of_integers(kind: str, context: Context, rng: np.random.Generator) -> None:
    scatter = _SCATTERS[kind]
    text = _text(scatter, "add", "s32", "s32")
    array, indices, updates = _dims(scatter)
    operands = _array(rng, np.int32, array), _indices(rng, np.int32, indices), _array(rng, np.int32, updates)
    ours = _ours(context, text, *operands)
    _same(ours, _one_by_one(scatter, np.add, *operands))
    _same(ours, np.asarray(run_on_xla(hlo_of_text(text), operands)[0]))


@pytest.mark.parametrize("kind", [*_SCATTERS, *_LARGE])
@pytest.mark.parametrize(("operation", "combine"), [("add", np.add), ("assign", None)])
def test_order_of_updates(
    operation: str, combine: Callable[..., np.generic] | None, kind: str, context: Context, rng: np.random.Generator
) -> None:
    scatter = {**_SCATTERS, **_LARGE}[kind]
    text = _text(scatter, operation, "f32", "s32")
    array, indices, updates = _dims(scatter)
    operands = _array(rng, np.float32, array), _indices(rng, np.int32, indices), _array(rng, np.float32, updates)
    _same(_ours(context, text, *operands), _one_by_one(scatter, combine, *operands))


@pytest.mark.parametrize(("operation", "element"), _OPERATIONS_OF_TYPES)
def test_types(operation: str, element: str, context: Context, rng: np.random.Generator) -> None:
    dtype = _DTYPES[element]
    scatter = _SCATTERS["overlapping runs of a line"]
    operands = _array(rng, dtype, (200,)), _indices(rng, np.int32, (800, 1)), _array(rng, dtype, (800, 7))
    text = _text(scatter, operation, element, "s32")
    sums_half_floats = element in ("f16", "bf16") and operation in ("add", "multiply")
    with jax.enable_x64(True):
        ours = _ours(context, text, *operands)
    functions = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}
    function = functions.get(operation) or getattr(np, operation, None)
    if sums_half_floats:  # rounded once, at the end
        array, indices, updates = operands
        wide = _one_by_one(scatter, function, array.astype(np.float32), indices, updates.astype(np.float32))
        _same(ours, wide.astype(dtype))
        return
    _same(ours, _one_by_one(scatter, function, *operands))


@pytest.mark.parametrize("element", _MOVED)
def test_types_that_are_only_moved(element: str, context: Context, rng: np.random.Generator) -> None:
    scatter = _SCATTERS["rows of a table"]
    array, indices, updates = _dims(scatter)
    dtype = _MOVED[element]
    operands = _array(rng, dtype, array), _indices(rng, np.int32, indices), _array(rng, dtype, updates)
    text = _text(scatter, "assign", element, "s32")
    _same(_ours(context, text, *operands), _one_by_one(scatter, None, *operands))


@pytest.mark.parametrize("index", _INDICES)
@pytest.mark.parametrize("kind", ["rows of a table", "windows of two starts that overlap, given the other way round"])
def test_types_of_indices(kind: str, index: str, context: Context, rng: np.random.Generator) -> None:
    scatter = _SCATTERS[kind]
    array, indices, updates = _dims(scatter)
    operands = _array(rng, np.int32, array), _indices(rng, _INDICES[index], indices), _array(rng, np.int32, updates)
    _same(_ours(context, _text(scatter, "add", "s32", index), *operands), _one_by_one(scatter, np.add, *operands))


@pytest.mark.parametrize("element", ["f16", "bf16"])
def test_half_floats_that_are_rounded_once(element: str, context: Context, rng: np.random.Generator) -> None:
    scatter = _SCATTERS["rows of a table"]
    array, indices, updates = _dims(scatter)
    dtype = _DTYPES[element]
    i = rng.permutation(np.arange(-10, 53))[: 7 * 9].reshape(indices).astype(np.int32)
    operands = _array(rng, dtype, array), i, _array(rng, dtype, updates)
    text = _text(scatter, "add", element, "s32", ", unique_indices=true")
    _same(_ours(context, text, *operands), _one_by_one(scatter, np.add, *operands))


@pytest.mark.parametrize("operation", ["maximum", "minimum"])
def test_nan_stays(operation: str, context: Context) -> None:
    scatter = (
        "[4] [6,1] [6]",
        "update_window_dims={}, inserted_window_dims={0}, scatter_dims_to_operand_dims={0}, index_vector_dim=1",
    )
    x = np.array([np.nan, 1, np.inf, -np.inf], np.float32)
    indices = np.array([0, 1, 1, 2, 3, 3], np.int32).reshape(6, 1)
    updates = np.array([5, np.nan, 7, np.nan, -1, 2], np.float32)
    ours = _ours(context, _text(scatter, operation, "f32", "s32"), x, indices, updates)
    assert np.isnan(ours[:3]).all()
    assert ours[3] == (2 if operation == "maximum" else -np.inf)


def test_operands_the_other_way_round_and_constant_combiners(context: Context, rng: np.random.Generator) -> None:
    """Addition has no sides; keeping what is there, or writing a constant, is a library's."""
    scatter = _SCATTERS["rows of a table"]
    array, indices, updates = _dims(scatter)
    operands = _array(rng, np.int32, array), _indices(rng, np.int32, indices), _array(rng, np.int32, updates)
    text = _text(scatter, "add", "s32", "s32")
    _same(_ours(context, text.replace("add(a, b)", "add(b, a)"), *operands), _one_by_one(scatter, np.add, *operands))
    twice = _ours(context, text.replace("add(a, b)", "add(a, a)"), *operands, native=False)
    _same(twice, _one_by_one(scatter, lambda a, b: a + a, *operands))
    kept = _text(scatter, "assign", "s32", "s32").replace("ROOT b", "b").replace("  a =", "  ROOT a =")
    _same(_ours(context, kept, *operands, native=False), operands[0])


@pytest.mark.parametrize(("array", "batch"), [((4, 0), 5), ((4, 3), 0)])
def test_scatters_of_nothing(array: tuple[int, int], batch: int, context: Context, rng: np.random.Generator) -> None:
    scatter = (
        f"[{array[0]},{array[1]}] [{batch},1] [{batch},{array[1]}]",
        "update_window_dims={1}, inserted_window_dims={0}, scatter_dims_to_operand_dims={0}, index_vector_dim=1",
    )
    x, i, u = (_array(rng, np.float32, array), np.zeros((batch, 1), np.int32), np.ones((batch, array[1]), np.float32))
    _same(_ours(context, _text(scatter, "add", "f32", "s32"), x, i, u, native=False), x)


_ADD = """add {
  a = s32[] parameter(0)
  b = s32[] parameter(1)
  ROOT c = s32[] add(a, b)
}
"""
_LINE = "update_window_dims={}, inserted_window_dims={0}, scatter_dims_to_operand_dims={0}, index_vector_dim=1"
_PLACES = {
    "one after the other, over a constant": """
  t = s32[40] broadcast(seven), dimensions={}
  y = s32[40] scatter(t, i, u), LINE, to_apply=add
  ROOT z = s32[40] scatter(y, i, v), LINE, to_apply=add""",
    "what is between is a result": """
  t = s32[40] reverse(x), dimensions={0}
  y = s32[40] scatter(t, i, u), LINE, to_apply=add
  z = s32[40] scatter(y, i, v), LINE, to_apply=add
  ROOT r = (s32[40], s32[40]) tuple(z, y)""",
    "what is between is read later": """
  t = s32[40] reverse(x), dimensions={0}
  y = s32[40] scatter(t, i, u), LINE, to_apply=add
  z = s32[40] scatter(y, i, v), LINE, to_apply=add
  w = s32[40] scatter(y, j, v), LINE, to_apply=add
  difference = s32[40] subtract(z, w)
  ROOT r = s32[40] multiply(difference, y)""",
    "what is written over an argument reads it the other way round": """
  t = s32[40] reverse(x), dimensions={0}
  ROOT y = s32[40] scatter(t, i, u), LINE, to_apply=add""",
    "an argument is changed, and read later": """
  y = s32[40] scatter(x, i, u), LINE, to_apply=add
  t = s32[40] reverse(x), dimensions={0}
  s = s32[40] add(t, y)
  ROOT z = s32[40] scatter(s, j, v), LINE, to_apply=add""",
    "an argument is changed": """
  ROOT y = s32[40] scatter(x, i, u), LINE, to_apply=add""",
    "an array that the updates come from": """
  t = s32[40] reverse(x), dimensions={0}
  y = s32[40] scatter(t, i, u), LINE, to_apply=add
  s = s32[30] slice(y), slice={[3:33]}
  ROOT z = s32[40] scatter(y, j, s), LINE, to_apply=add""",
    "a slice is updated, then its array": """
  t = s32[40] reverse(x), dimensions={0}
  zero = s32[] constant(0)
  y = s32[40] dynamic-update-slice(t, u, zero)
  ROOT z = s32[40] scatter(y, j, v), LINE, to_apply=add""",
}


@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize("kind", _PLACES)
def test_where_results_stand(kind: str, donate: bool, context: Context, rng: np.random.Generator) -> None:
    body = _PLACES[kind].replace("LINE", _LINE)
    output = "{0}" if "tuple" in body else "{}"
    alias = f", input_output_alias={{ {output}: (0, {{}}, may-alias) }}" if donate else ""
    text = f"""{_ADD}
ENTRY main {{
  x = s32[40] parameter(0)
  i = s32[30,1] parameter(1)
  j = s32[30,1] parameter(2)
  u = s32[30] parameter(3)
  v = s32[30] parameter(4)
  seven = s32[] constant(7)
{body}
}}"""
    operands = [
        _array(rng, np.int32, (40,)),
        *(_indices(rng, np.int32, (30, 1)) for _ in range(2)),
        *(_array(rng, np.int32, (30,)) for _ in range(2)),
    ]
    memory = context.devices[0].default_memory
    with compile(context, f"HloModule places{alias}\n{text}") as executable:
        ours = [get(y) for y in run(executable, *(put(memory, x) for x in operands))]
    theirs = run_on_xla(hlo_of_text(text), operands)
    for mine, expected in zip(ours, theirs, strict=True):
        _same(mine, np.asarray(expected))


def test_a_loop_updates_its_array_where_it_stands(context: Context, rng: np.random.Generator) -> None:
    text = f"""{_ADD}
body {{
  state = (s32[], s32[40], s32[30,1], s32[30]) parameter(0)
  n = s32[] get-tuple-element(state), index=0
  x = s32[40] get-tuple-element(state), index=1
  i = s32[30,1] get-tuple-element(state), index=2
  u = s32[30] get-tuple-element(state), index=3
  one = s32[] constant(1)
  next = s32[] add(n, one)
  shift = s32[30] broadcast(n), dimensions={{}}
  changed = s32[30] add(u, shift)
  y = s32[40] scatter(x, i, changed), {_LINE}, to_apply=add
  ROOT result = (s32[], s32[40], s32[30,1], s32[30]) tuple(next, y, i, u)
}}
condition {{
  state = (s32[], s32[40], s32[30,1], s32[30]) parameter(0)
  n = s32[] get-tuple-element(state), index=0
  five = s32[] constant(5)
  ROOT more = pred[] compare(n, five), direction=LT
}}
ENTRY main {{
  x = s32[40] parameter(0)
  i = s32[30,1] parameter(1)
  u = s32[30] parameter(2)
  zero = s32[] constant(0)
  initial = (s32[], s32[40], s32[30,1], s32[30]) tuple(zero, x, i, u)
  final = (s32[], s32[40], s32[30,1], s32[30]) while(initial), condition=condition, body=body
  ROOT y = s32[40] get-tuple-element(final), index=1
}}"""
    operands = _array(rng, np.int32, (40,)), _indices(rng, np.int32, (30, 1)), _array(rng, np.int32, (30,))
    _same(_ours(context, text, *operands), np.asarray(run_on_xla(hlo_of_text(text), operands)[0]))


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("combine", [lax.scatter_add, lax.scatter_mul], ids=["add", "multiply"])
def test_windows_without_indices(
    combine: Callable[..., jax.Array], dtype: type, context: Context, rng: np.random.Generator
) -> None:
    """All begin at 0; what has no elements has no memory, where a program makes it."""
    numbers = lax.ScatterDimensionNumbers((1,), (), ())

    def function(x: jax.Array, shift: jax.Array) -> jax.Array:
        indices = jnp.broadcast_to(jnp.zeros((0,), jnp.int32), (2, 0))
        made = (jnp.arange(46).reshape(2, 23) + shift) % 7
        return combine(x, indices, made.astype(dtype), numbers, mode="clip")

    x = rng.integers(-9, 9, 40).astype(dtype)
    (ours,), _ = run_function(context, function, x, np.array(1, np.int32))
    combined = ((np.arange(46).reshape(2, 23) + 1) % 7).astype(dtype)
    x[:23] = x[:23] * combined.prod(0) if combine is lax.scatter_mul else x[:23] + combined.sum(0)
    np.testing.assert_array_equal(ours, x)
