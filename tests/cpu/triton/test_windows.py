"""dynamic-slice and dynamic-update-slice as generated kernels, whose starts are read on the device; and the plans that
write an update over its array. The oracles are NumPy and stock XLA."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch
from jax import lax

from flagos_backend.codegen.triton import prepare, schedule
from flagos_backend.compile import accelerator_plan as plan
from flagos_backend.importer import import_module
from flagos_backend.ir.attributes import DynamicSliceAttributes
from flagos_backend.ir.builder import Builder
from flagos_backend.ir.hlo import Computation, Instruction
from flagos_backend.ir.opcode import Opcode
from flagos_backend.ir.types import ArrayShape, ElementType
from flagos_backend.kernels.reference.registry import Run
from flagos_backend.loop_ir.flat import flatten
from flagos_backend.loop_ir.region import Region
from flagos_backend.runtime.plan import Plan, Step
from programs import hlo_bytes, run_on_xla
from support import kernels
from support.against_xla import assert_same, from_storage, hlo_of_text, to_storage
from support.numbers import NUMPY_DTYPE, special_values
from support.passes import for_accelerator

E = ElementType
INTEGERS = [E.S8, E.S16, E.S32, E.S64, E.U8, E.U16, E.U32, E.U64]


def build(computation: Computation, donated: Sequence[int] = ()) -> Plan:
    return plan.build(computation, donated, torch.device(kernels.target().device_type), kernels.target())


def run(built: Plan, computation: Computation, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Twice, on arrays of its own each time."""
    shapes = [parameter.shape for parameter in computation.parameters]
    device = kernels.target().device_type
    launch = Run(device=torch.device(device), asynchronous=True)
    for _ in range(2):
        tensors = [to_storage(a, s).clone().to(device) for a, s in zip(arrays, shapes, strict=True)]
        with torch.inference_mode():
            results = [t.cpu() for t in built.run(launch, tensors)]
    return [from_storage(t, s) for t, s in zip(results, built.result_shapes, strict=True)]


def steps(built: Plan) -> list[Step]:
    """Those that enqueue something, of nested plans too."""
    found = []
    for step in built.steps:
        found += [inner for nested in step.nested for inner in steps(nested)]
        found += [] if step.nested or not step.enqueues else [step]
    return found


def check(function: Callable[..., Any], *arguments: Any, donated: Sequence[int] = ()) -> Plan:
    """Compares with stock XLA; returns the plan, in which no window is a reference kernel."""
    arrays = [np.asarray(a) for a in arguments]
    hlo = hlo_bytes(function, *arrays)
    return check_hlo(hlo, arrays, donated)


def check_hlo(hlo: bytes, arrays: Sequence[np.ndarray], donated: Sequence[int] = ()) -> Plan:
    computation = for_accelerator(import_module(hlo)).entry
    built = build(computation, donated)
    for ours, theirs in zip(run(built, computation, arrays), run_on_xla(hlo, arrays), strict=True):
        assert_same(ours, np.asarray(theirs), 1e-5)
    assert not [s.text for s in steps(built) if "dynamic-" in s.text and "reference" in s.text]
    return built


def over(built: Plan) -> int:
    """How many arrays are updated where they stand; none of the others may be hidden in a copy."""
    text = built.explain()
    return sum(step.text.count(" over #") for step in steps(built) if "dynamic_update_slice" in step.text) * (
        "after a copy" not in text and "copies" not in text
    )


def f32(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


# ---- Values


def window(dims: Sequence[int], sizes: Sequence[int], starts: Sequence[Any]) -> tuple[slice, ...]:
    """What HLO makes of ``starts``."""
    first = [min(max(int(s), 0), dim - size) for s, dim, size in zip(starts, dims, sizes, strict=True)]
    return tuple(slice(f, f + size) for f, size in zip(first, sizes, strict=True))


def slice_of(array: np.ndarray, sizes: tuple[int, ...], starts: Sequence[np.generic], e: E, index: E) -> np.ndarray:
    builder = Builder("entry")
    shapes = [ArrayShape(e, array.shape), *(ArrayShape(index) for _ in starts)]
    operands = [builder.parameter(shape) for shape in shapes]
    root = builder.add(Opcode.DYNAMIC_SLICE, operands, DynamicSliceAttributes(sizes))
    return _only(builder.build(root), [array, *starts])


def update_of(array: np.ndarray, update: np.ndarray, starts: Sequence[np.generic], e: E, index: E) -> np.ndarray:
    builder = Builder("entry")
    shapes = [ArrayShape(e, array.shape), ArrayShape(e, update.shape), *(ArrayShape(index) for _ in starts)]
    operands: list[Instruction] = [builder.parameter(shape) for shape in shapes]
    return _only(builder.build(builder.add(Opcode.DYNAMIC_UPDATE_SLICE, operands)), [array, update, *starts])


def _only(computation: Computation, arrays: Sequence[np.ndarray]) -> np.ndarray:
    (result,) = run(build(computation), computation, [np.asarray(a) for a in arrays])
    return result


@pytest.mark.parametrize("index", INTEGERS, ids=str)
def test_starts_of_every_type_are_clamped(index: E, rng: np.random.Generator) -> None:
    array, update = f32(rng, 300, 7), f32(rng, 4, 3)
    ends = special_values(index)
    ordinary = rng.integers(0, 127, 4).astype(NUMPY_DTYPE[index])
    for first in [*ends, *ordinary]:
        starts = (first, rng.choice(ends))
        where = window(array.shape, update.shape, starts)
        np.testing.assert_array_equal(slice_of(array, update.shape, starts, E.F32, index), array[where])
        expected = array.copy()
        expected[where] = update
        np.testing.assert_array_equal(update_of(array, update, starts, E.F32, index), expected)


@pytest.mark.parametrize(
    "e", [E.PRED, E.S8, E.U16, E.S64, E.U64, E.F16, E.BF16, E.F64, E.C64, E.C128, E.F8E4M3FN, E.U4], ids=str
)
def test_elements_of_every_type_arrive_as_they_were(e: E, rng: np.random.Generator) -> None:
    values = special_values(e)
    array, update = rng.choice(values, (9, 8)), rng.choice(values, (2, 8))
    starts = [np.int32(rng.integers(-3, 12)), np.int32(5)]
    where = window(array.shape, update.shape, starts)
    expected = array.copy()
    expected[where] = update
    for ours, theirs in (
        (slice_of(array, update.shape, starts, e, E.S32), array[where]),
        (update_of(array, update, starts, e, E.S32), expected),
    ):
        assert ours.tobytes() == np.ascontiguousarray(theirs).tobytes()


@pytest.mark.parametrize(
    ("dims", "sizes"),
    [
        *(((5,), (5,)), ((5,), (1,)), ((5,), (0,)), ((0, 4), (0, 2))),
        *(((3, 1, 6), (1, 1, 6)), ((2, 3, 4, 5), (1, 2, 3, 4)), ((), ())),
    ],
)
def test_sizes(dims: tuple[int, ...], sizes: tuple[int, ...], rng: np.random.Generator) -> None:
    array, update = f32(rng, *dims), f32(rng, *sizes)
    starts = [np.int32(s) for s in rng.integers(-2, 7, len(dims))]
    where = window(dims, sizes, starts)
    np.testing.assert_array_equal(slice_of(array, sizes, starts, E.F32, E.S32), array[where])
    expected = array.copy()
    expected[where] = update
    np.testing.assert_array_equal(update_of(array, update, starts, E.F32, E.S32), expected)


# ---- What is fused


def test_a_slice_is_read_where_it_is_used(rng: np.random.Generator) -> None:
    def function(x: jax.Array, row: jax.Array, i: jax.Array) -> jax.Array:
        return jnp.tanh(lax.dynamic_slice(x, (i, 2), (3, 4)).T * 2) + row

    for i in (-9, 1, 20):  # jnp counts negative starts from the end
        assert len(steps(check(function, f32(rng, 10, 9), f32(rng, 3), np.int32(i)))) == 1


def test_a_slice_is_read_by_a_reduction(rng: np.random.Generator) -> None:
    def function(x: jax.Array, i: jax.Array) -> jax.Array:
        return jax.nn.softmax(lax.dynamic_index_in_dim(x, i, 1, keepdims=False), -1)

    for i in (-1, 3, 99):
        assert len(steps(check(function, f32(rng, 5, 6, 40), np.int8(i)))) == 1


def test_a_slice_of_a_slice_of_what_is_computed(rng: np.random.Generator) -> None:
    def function(x: jax.Array, i: jax.Array, j: jax.Array) -> jax.Array:
        outer = lax.dynamic_slice(jnp.exp(x)[:, ::-1], (i, j), (5, 6))
        return lax.dynamic_slice(outer.reshape(30), (j * 3,), (7,)) + 1

    check(function, f32(rng, 9, 8), np.int32(rng.integers(-2, 9)), np.int32(rng.integers(0, 9)))


def test_positions_are_sliced_too(rng: np.random.Generator) -> None:
    check(lambda i: lax.dynamic_slice(jnp.arange(50) * 3, (i,), (8,)) + 1, np.int32(rng.integers(-60, 60)))


def test_starts_come_from_an_array_and_from_a_reduction(rng: np.random.Generator) -> None:
    def function(x: jax.Array, places: jax.Array) -> tuple[jax.Array, jax.Array]:
        read = lax.dynamic_slice(x, (places[2],), (4,))
        return read * 2, lax.dynamic_slice(x, (jnp.argmax(x),), (3,)) + lax.dynamic_slice(x, (places.sum(),), (3,))

    check(function, f32(rng, 30), rng.integers(-5, 12, 4).astype(np.int32))


def test_an_update_is_stored_by_what_computes_it(rng: np.random.Generator) -> None:
    def function(x: jax.Array, y: jax.Array, i: jax.Array) -> jax.Array:
        return lax.dynamic_update_slice(x, jnp.exp(y).T, (i, 1))

    built = check(function, f32(rng, 12, 6), f32(rng, 5, 3), np.int32(rng.integers(-3, 15)), donated=(0,))
    assert (len(steps(built)), over(built)) == (1, 1)


@pytest.mark.parametrize(
    "reduction",
    [
        lambda y: y.sum(0)[None],
        lambda y: jnp.stack((y.max(0), (y * y).sum(0))),
        lambda y: y.sum()[None, None],
        lambda y: y.T.reshape(40, -1).sum(1)[None],
    ],
    ids=["columns", "columns in two rows", "everything", "rows"],
)
def test_a_slice_is_reduced_in_parts_into_an_update(reduction: Callable[..., Any], rng: np.random.Generator) -> None:
    def function(x: jax.Array, y: jax.Array, i: jax.Array) -> jax.Array:
        return lax.dynamic_update_slice(x, reduction(lax.dynamic_slice(y, (i * 3, 0), (4000, 40))) * 2, (i, 1))

    y = rng.integers(-8, 9, (4020, 40)).astype(np.float32)  # whose sums are exact in any order
    built = check(function, f32(rng, 9, 48), y, np.int32(rng.integers(-1, 10)), donated=(0,))
    assert over(built) == 1


# ---- Where an update is made


def update(x: jax.Array, y: jax.Array, i: jax.Array) -> jax.Array:
    return lax.dynamic_update_slice(x, y, (i, 0))


def test_an_array_that_is_used_later_is_copied(rng: np.random.Generator) -> None:
    def function(x: jax.Array, y: jax.Array, i: jax.Array) -> tuple[jax.Array, jax.Array]:
        changed = update(x, y, i)
        return changed, changed - x

    arguments = f32(rng, 6, 5), f32(rng, 2, 5), np.int32(rng.integers(-1, 8))
    assert over(check(function, *arguments, donated=(0,))) == 0
    assert over(check(update, *arguments)) == 0, "the caller keeps it"
    assert over(check(update, *arguments, donated=(0,))) == 1


def test_what_is_computed_is_updated_in_place(rng: np.random.Generator) -> None:
    def function(x: jax.Array, y: jax.Array, w: jax.Array, i: jax.Array) -> jax.Array:
        return update(update(x @ w, y, i), y * 2, i + 1)

    built = check(function, f32(rng, 6, 5), f32(rng, 2, 5), f32(rng, 5, 5), np.int32(2))
    assert (len(steps(built)), over(built)) == (3, 2)


def test_what_a_library_made_is_updated_in_another_shape(rng: np.random.Generator) -> None:
    def function(x: jax.Array, w: jax.Array, y: jax.Array, i: jax.Array) -> tuple[jax.Array, ...]:
        product = jnp.einsum("bij,bjk->kbi", x, w).reshape(6, 8)
        return update(product, y, i), product.reshape(48) * 2

    check(function, f32(rng, 2, 4, 3), f32(rng, 2, 3, 6), f32(rng, 2, 8), np.int32(rng.integers(-1, 8)))


def test_constants_are_not_written_over(rng: np.random.Generator) -> None:
    x = f32(rng, 6, 5)
    check(lambda y, i: update(jnp.asarray(x), y, i), f32(rng, 2, 5), np.int32(3))
    check(lambda y, i: update(jnp.zeros((6, 5)), y, i), f32(rng, 2, 5), np.int32(3))


@pytest.mark.parametrize(
    "change",
    [
        lambda x, i, j: lax.dynamic_slice(x, (j, 0), (3, 5)),
        lambda x, i, j: lax.dynamic_slice(x, (i, 0), (3, 5)) * 2 + 1,
        lambda x, i, j: x[::-1][2:5] * 2,
        lambda x, i, j: x[0:3] + x[3:6],
        lambda x, i, j: x.sum(0)[None] + lax.dynamic_slice(x, (j, 0), (3, 5)),
        lambda x, i, j: lax.dynamic_slice(jnp.exp(x).reshape(45)[::-1].reshape(9, 5), (j, 0), (3, 5)),
    ],
    ids=["moved", "where it stands", "backwards", "of two places", "of a reduction", "computed"],
)
def test_an_update_is_made_from_its_own_array(change: Callable[..., Any], rng: np.random.Generator) -> None:
    def function(x: jax.Array, i: jax.Array, j: jax.Array) -> jax.Array:
        return update(x, change(x, i, j), i)

    for i, j in ((0, 1), (1, 0), (4, 4), (-2, 9)):
        built = check(function, f32(rng, 9, 5), np.int32(i), np.int32(j), donated=(0,))
        assert over(built) == 1


def test_two_rows_change_places(rng: np.random.Generator) -> None:
    def function(x: jax.Array, i: jax.Array, j: jax.Array) -> jax.Array:
        a, b = (lax.dynamic_slice(x, (at, 0), (1, 5)) for at in (i, j))
        return update(update(x, b, i), a, j)

    assert over(check(function, f32(rng, 9, 5), np.int32(2), np.int32(7), donated=(0,))) == 2


def test_arrays_that_lie_in_one_storage(rng: np.random.Generator) -> None:
    def function(x: jax.Array, y: jax.Array, i: jax.Array) -> tuple[jax.Array, jax.Array]:
        flat = x.reshape(30)
        return update(x, y, i), lax.dynamic_update_slice(flat, y.reshape(10) * 3, (i,))

    check(function, f32(rng, 6, 5), f32(rng, 2, 5), np.int32(rng.integers(-1, 8)), donated=(0,))


def test_an_array_of_more_elements_than_32_bits_count() -> None:
    text = """ENTRY main {
      x = s8[70000,70000] parameter(0)  u = s8[1,9] parameter(1)  i = s32[] parameter(2)  j = u16[] parameter(3)
      s = s8[1,9] dynamic-slice(x, i, j), dynamic_slice_sizes={1,9}
      ROOT r = s8[1,9] add(s, u) }"""
    flat = flatten(for_accelerator(import_module(hlo_of_text(text))).entry)
    (region,) = schedule(flat, kernels.target()).items
    assert isinstance(region, Region)
    assert "* 70000" in prepare(region, kernels.target()).source
    assert "int64" in prepare(region, kernels.target()).source


# ---- Loops


def lstm(x: jax.Array, weights: jax.Array) -> tuple[Any, Any]:
    def step(carry: Any, x: jax.Array) -> tuple[Any, Any]:
        h, c = carry
        i, f, g, o = jnp.split(jnp.concatenate((x, h), -1) @ weights, 4, axis=-1)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = jax.nn.sigmoid(o) * jnp.tanh(c)
        return (h, c), (h, c.astype(jnp.bfloat16))

    zeros = jnp.zeros(x.shape[1:])
    return lax.scan(step, (zeros, zeros), x)


def test_a_scan_reads_and_writes_where_its_arrays_stand(rng: np.random.Generator) -> None:
    built = check(lstm, f32(rng, 6, 3, 4), f32(rng, 8, 16))
    (loop,) = [step for step in built.steps if step.nested]
    (body,) = loop.nested
    text = loop.text + body.explain()
    assert " [reference." not in text
    assert "each iteration" not in text
    assert "after a copy" not in text
    (gates,) = [step.text for step in body.steps if "logistic" in step.text or "exponential" in step.text]
    assert gates.count("dynamic_update_slice") == 2, "both results are stored by what computes them"


def test_a_scan_backwards_and_its_gradient(rng: np.random.Generator) -> None:
    def function(x: jax.Array) -> jax.Array:
        def step(carry: jax.Array, row: jax.Array) -> tuple[jax.Array, jax.Array]:
            carry = jnp.sin(carry * row)
            return carry, carry * 2

        return lax.scan(step, jnp.ones(x.shape[1]), x, reverse=True)[1].sum()

    built = check(jax.value_and_grad(function), f32(rng, 7, 5))
    assert "each iteration" not in built.explain()


def test_loops_in_loops(rng: np.random.Generator) -> None:
    def function(x: jax.Array) -> jax.Array:
        def row(i: jax.Array, x: jax.Array) -> jax.Array:
            def element(j: jax.Array, x: jax.Array) -> jax.Array:
                return x.at[i, j].set(x[j % x.shape[0], i] * 0.5 + x[i, j])

            return lax.fori_loop(0, x.shape[1], element, x)

        return lax.fori_loop(0, x.shape[0], row, x)

    built = check(function, f32(rng, 4, 4))
    assert "each iteration" not in built.explain()
    assert "after a copy" not in built.explain()


def test_a_loop_that_depends_on_data(rng: np.random.Generator) -> None:
    def function(x: jax.Array, n: jax.Array) -> tuple[jax.Array, jax.Array]:
        def iteration(state: Any) -> Any:
            x, i = state
            return x.at[i].set(x[i - 1] + x[i]), i + 1

        return lax.while_loop(lambda state: state[1] < n, iteration, (x, 1))

    built = check(function, f32(rng, 12), np.int32(rng.integers(2, 14)))
    assert "each iteration" not in built.explain()


def test_a_cache_that_is_given_away_is_updated_in_place(rng: np.random.Generator) -> None:
    def decode(x: jax.Array, w: jax.Array, keys: jax.Array, values: jax.Array, at: jax.Array) -> tuple[jax.Array, ...]:
        key, value = (x @ w).reshape(2, 1, 2, 4), jnp.concatenate((x, -x), -1)[:, None, :8].reshape(2, 1, 2, 4)
        keys, values = (lax.dynamic_update_slice(a, b, (0, at, 0, 0)) for a, b in ((keys, key), (values, value)))
        scores = jnp.einsum("bh,bsnh->bns", x[:, :4], keys)
        scores = jnp.where(jnp.arange(keys.shape[1]) <= at, scores, -1e30)
        return jnp.einsum("bns,bsnh->bnh", jax.nn.softmax(scores), values), keys, values

    arguments = f32(rng, 2, 6), f32(rng, 6, 8), f32(rng, 2, 16, 2, 4), f32(rng, 2, 16, 2, 4), np.int32(5)
    built = check(decode, *arguments, donated=(2, 3))
    assert over(built) == 2
    assert "reference.aten" not in "".join(s.text for s in steps(built) if "dynamic" in s.text)
    tensors = [torch.from_numpy(a.copy()) for a in arguments[:4]] + [torch.tensor(5, dtype=torch.int32)]
    tensors = [t.to(kernels.target().device_type) for t in tensors]
    places = [tensor.data_ptr() for tensor in tensors[2:4]]
    with torch.inference_mode():
        results = built.run(Run(device=torch.device(kernels.target().device_type), asynchronous=True), tensors)
    assert [result.data_ptr() for result in results[1:]] == places


def test_bfloat16_is_rounded_where_it_is_stored(rng: np.random.Generator) -> None:
    x, y = (rng.standard_normal(shape).astype(ml_dtypes.bfloat16) for shape in ((8, 4), (2, 4)))
    check(lambda x, y, i: update(x, y * 2 + 1, i), x, y, np.int32(3), donated=(0,))
