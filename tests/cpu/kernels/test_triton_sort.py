"""Our Triton sort in the interpreter against Python's stable sort of each row, and against stock XLA."""

import jax
import numpy as np
import pytest
import torch
from jax import lax

from flagos_backend.devices.target import Target
from flagos_backend.importer import import_module
from flagos_backend.ir.opcode import Opcode
from flagos_backend.ir.types import ElementType
from flagos_backend.kernels.choice import implementations_of
from flagos_backend.kernels.implementation import Provider
from flagos_backend.kernels.reference.registry import Run
from flagos_backend.kernels.reference.storage import dtype_of
from flagos_backend.kernels.triton import sort
from programs import hlo_bytes, run_on_xla
from support.against_xla import hlo_of_text
from support.numbers import NUMPY_DTYPE

E = ElementType
# Four lanes, so that short rows have exchanges in threads, within warps and between them.
SIMULATED = Target("cpu", "simulated", multiprocessors=4, warp_size=4)
KEYS = [E.F32, E.F16, E.BF16, E.S8, E.S16, E.S32, E.U8, E.U16, E.U32, E.PRED]
(TRITON,) = (i for i in implementations_of(str(Opcode.SORT)) if i.provider is Provider.TRITON)


@pytest.fixture(autouse=True)
def small_programs(monkeypatch):
    """So that an interpreter's few elements are many programs."""
    monkeypatch.setattr(sort, "_THREAD_BYTES", 16)
    monkeypatch.setattr(sort, "_BLOCK", 64)
    monkeypatch.setattr(sort, "_FEW", 2)


def instruction_of(hlo):
    (found,) = (i for c in import_module(hlo).computations() for i in c.instructions if i.opcode is Opcode.SORT)
    return found


def by_comparator(comparator, element, dims, values=()):
    """A sort of a key and ``values`` along the last dimension, by the text of a comparator of a and b."""
    types = [e.name.lower() for e in (element, *values)]
    scalars = [f"{n} = {types[i // 2]}[] parameter({i})" for i, n in enumerate("abcd"[: 2 * len(types)])]
    shapes = [f"{t}[{','.join(map(str, dims))}]" for t in types]
    parameters = [f"{n} = {shape} parameter({i})" for i, (n, shape) in enumerate(zip("xy", shapes, strict=False))]
    result, operands = (f"({', '.join(shapes)})", "x, y") if values else (shapes[0], "x")
    sort_text = f"ROOT r = {result} sort({operands}), dimensions={{{len(dims) - 1}}}, is_stable=true, to_apply=less"
    lines = ["less {", *scalars, comparator, "}", "ENTRY e {", *parameters, sort_text, "}"]
    return instruction_of(hlo_of_text("\n".join(lines)))


def run(instruction, *arrays, target=SIMULATED, outputs=None):
    assert not TRITON.unsupported(instruction, target)
    (variant,) = TRITON.variants(instruction, target)
    stored = []
    for operand, array in zip(instruction.operands, arrays, strict=True):
        bits = torch.from_numpy(np.ascontiguousarray(array).view(np.uint8))
        stored.append(bits.view(dtype_of(operand.shape.element_type)).view(array.shape))
    if outputs is None:
        results = variant.kernel(Run(asynchronous=True), *stored)
    else:
        results = variant.into(Run(asynchronous=True), outputs, *stored)
    return results if isinstance(results, tuple) else (results,)


def as_bytes(tensor):
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


def jax_order(array):
    """Python keys in the order of JAX's comparator: zeros are equal, NaNs are equal and last."""
    if array.dtype.kind in "fV":
        with np.errstate(invalid="ignore"):  # a signalling NaN
            return [(True, 0.0) if np.isnan(x) else (False, float(x)) for x in array]
    return array.tolist()


def total_order(array):
    bits = [int(b) for b in array.view(f"i{array.dtype.itemsize}")]
    return [-b - (1 << (8 * array.dtype.itemsize - 1)) - 1 if b < 0 else b for b in bits]


def permuted(arrays, order, descending=False):
    """``arrays`` [rows, n], each row in the stable order of the first one's."""
    places = []
    for row in arrays[0]:
        keys = order(row)
        ranked = sorted(set(keys), reverse=descending)
        rank = {key: i for i, key in enumerate(ranked)}
        places.append(sorted(range(len(row)), key=lambda i, keys=keys, rank=rank: rank[keys[i]]))
    return [np.take_along_axis(array, np.array(places), 1) for array in arrays]


def random_bits(element, dims, rng):
    """Any bits: NaNs of both signs and many payloads, both zeros, infinities; and ties."""
    if element is E.PRED:
        return rng.integers(0, 2, dims).astype(bool)
    dtype = NUMPY_DTYPE[element]
    array = rng.integers(0, 256, (*dims, dtype.itemsize), dtype=np.uint8).view(dtype)[..., 0]
    array[rng.random(dims) < 0.3] = array.flat[0]
    if element.is_float:
        special = np.array([0.0, -0.0, np.nan, -np.nan, np.inf, -np.inf], np.float32).astype(dtype)
        mask = rng.random(dims) < 0.4
        array[mask] = rng.choice(special, int(mask.sum()))
        payloads = rng.random(dims) < 0.1
        nan = np.array(np.nan, dtype).view(f"u{dtype.itemsize}")
        array[payloads] = (nan + rng.integers(0, 60, int(payloads.sum())).astype(nan.dtype)).view(dtype)
    return array


@pytest.mark.parametrize("element", KEYS, ids=str)
def test_jax_sort_of_every_type(element, rng):
    array = random_bits(element, (5, 100), rng)
    (ours,) = run(instruction_of(hlo_bytes(lax.sort, array)), array)
    (wanted,) = permuted([array], jax_order)
    assert as_bytes(ours) == wanted.tobytes()


@pytest.mark.parametrize("element", KEYS, ids=str)
def test_jax_sort_carries_operands_of_any_type(element, rng):
    arrays = [random_bits(e, (5, 75), rng) for e in (element, E.S8, E.F16, E.F32, E.PRED)]
    wide = [rng.integers(-(1 << 62), 1 << 62, (5, 75)), rng.normal(size=(5, 75, 2)).astype(np.float32)]
    arrays += [wide[0], wide[1].view(np.complex64)[..., 0]]
    with jax.enable_x64(True):
        hlo = hlo_bytes(lambda *operands: lax.sort(operands, num_keys=1), *arrays)
    ours = run(instruction_of(hlo), *arrays)
    for tensor, wanted in zip(ours, permuted(arrays, jax_order), strict=True):
        assert as_bytes(tensor) == wanted.tobytes()


@pytest.mark.parametrize("element", [E.F32, E.F16, E.BF16], ids=str)
@pytest.mark.parametrize("direction", ["LT", "GT"])
@pytest.mark.parametrize("order", ["", ", type=TOTALORDER"])
@pytest.mark.parametrize("values", [(), (E.S32,)], ids=["alone", "with positions"])
def test_orders_of_floats(element, direction, order, values, rng):
    """The partial order leaves NaN's place open; it gets the one of JAX's."""
    arrays = [random_bits(element, (3, 40), rng)]
    arrays += [np.tile(np.arange(40, dtype=np.int32), (3, 1)) for _ in values]
    less = f"ROOT r = pred[] compare(a, b), direction={direction}{order}"
    ours = run(by_comparator(less, element, (3, 40), values), *arrays)
    wanted = permuted(arrays, total_order if order else jax_order, direction == "GT")
    for tensor, array in zip(ours, wanted, strict=True):
        assert as_bytes(tensor) == array.tobytes()


@pytest.mark.parametrize("element", [E.S32, E.U32, E.U8, E.S16], ids=str)
def test_descending_integers_keep_ties_in_order(element, rng):
    array = random_bits(element, (4, 50), rng)
    positions = np.tile(np.arange(50, dtype=np.int32), (4, 1))
    less = "ROOT r = pred[] compare(b, a), direction=LT"
    ours = run(by_comparator(less, element, (4, 50), (E.S32,)), array, positions)
    for tensor, wanted in zip(ours, permuted([array, positions], jax_order, descending=True), strict=True):
        assert as_bytes(tensor) == wanted.tobytes()


@pytest.mark.parametrize("n", [2, 3, 4, 5, 8, 9, 16, 31, 33, 64, 65, 127, 128, 257])
@pytest.mark.parametrize("rows", [1, 11])
def test_sizes(n, rows, rng):
    """Few rows have programs of their own, and threads of few elements; of many, the last program is not full."""
    keys = rng.integers(-5, 5, (rows, n)).astype(np.int32)
    bfloats = random_bits(E.BF16, (rows, n), rng)
    positions = np.tile(np.arange(n, dtype=np.int32), (rows, 1))
    (ours,) = run(instruction_of(hlo_bytes(lax.sort, keys)), keys)
    np.testing.assert_array_equal(ours, np.sort(keys, 1))
    for array in (keys, bfloats):
        hlo = hlo_bytes(lambda k, p: lax.sort((k, p), num_keys=1), array, positions)
        ours = run(instruction_of(hlo), array, positions)
        for tensor, wanted in zip(ours, permuted([array, positions], jax_order), strict=True):
            assert as_bytes(tensor) == wanted.tobytes()


@pytest.mark.parametrize("lanes", [1, 32, 64])
@pytest.mark.parametrize("n", [6, 500])
def test_any_number_of_lanes(lanes, n, rng):
    array = rng.normal(size=(9, n)).astype(np.float32)
    target = Target("cpu", "simulated", multiprocessors=4, warp_size=lanes)
    (ours,) = run(instruction_of(hlo_bytes(lax.sort, array)), array, target=target)
    np.testing.assert_array_equal(ours, np.sort(array, 1))


@pytest.mark.parametrize("dimension", [0, 1, 2])
def test_any_dimension(dimension, rng):
    keys = rng.integers(-9, 9, (6, 5, 7)).astype(np.float32)
    values = rng.permutation(210).astype(np.int16).reshape(keys.shape)
    hlo = hlo_bytes(lambda k, v: lax.sort((k, v), dimension=dimension, num_keys=1), keys, values)
    ours = run(instruction_of(hlo), keys, values)
    for tensor, wanted in zip(ours, run_on_xla(hlo, [keys, values]), strict=True):
        np.testing.assert_array_equal(tensor, wanted)


def test_the_key_is_any_operand(rng):
    values, keys = rng.normal(size=(3, 20)).astype(np.float16), random_bits(E.U32, (3, 20), rng)
    less = "ROOT r = pred[] compare(c, d), direction=LT"
    ours = run(by_comparator(less, E.F16, (3, 20), (E.U32,)), values, keys)
    for tensor, wanted in zip(reversed(ours), permuted([keys, values], jax_order), strict=True):
        assert as_bytes(tensor) == wanted.tobytes()


@pytest.mark.parametrize("dimension", [0, 1])
def test_results_go_where_they_are_wanted(dimension, rng):
    keys = rng.choice(np.array([1, 0.0, -0.0, np.nan, -np.inf, -3], np.float32), (30, 20))
    values = rng.permutation(600).astype(np.int32).reshape(keys.shape)
    hlo = hlo_bytes(lambda k, v: lax.sort((k, v), dimension=dimension, num_keys=1), keys, values)
    place = torch.zeros(keys.shape, dtype=torch.int32)
    ours = run(instruction_of(hlo), keys, values, outputs=[None, place])
    assert ours[1] is place
    for tensor, wanted in zip(ours, run_on_xla(hlo, [keys, values]), strict=True):
        assert as_bytes(tensor) == wanted.tobytes()


@pytest.mark.parametrize(
    ("sorted_by", "dims", "reason"),
    [
        ("ROOT r = pred[] compare(a, b), direction=LT", (0, 9), "nothing to sort"),
        ("ROOT r = pred[] compare(a, b), direction=LT", (9, 1), "nothing to sort"),
        ("p = s32[] abs(a)\n q = s32[] abs(b)\n ROOT r = pred[] compare(p, q), direction=LT", (2, 9), "is computed"),
        ("p = s32[] subtract(a, b)\n ROOT r = pred[] compare(p, b), direction=LT", (2, 9), "by one key"),
        ("ROOT r = pred[] compare(a, b), direction=LT", (2, 4097), "rows of up to 4096"),
        ("ROOT r = pred[] compare(a, b), direction=LT", (1 << 31, 2), "up to 2147483647 rows"),
    ],
)
def test_what_it_leaves_to_others(sorted_by, dims, reason):
    assert reason in TRITON.unsupported(by_comparator(sorted_by, E.S32, dims), SIMULATED)


@pytest.mark.parametrize(
    ("values", "element", "shared_bytes", "reason"),
    [
        ((), E.S64, 0, "does not order s64"),
        ((E.C128,), E.F32, 0, "up to 8 bytes"),
        ((E.S8,), E.F32, 2048, "rows of up to 256"),
        ((), E.F32, 2048, ""),
    ],
)
def test_types_and_rooms(values, element, shared_bytes, reason):
    less = "ROOT r = pred[] compare(a, b), direction=LT"
    target = Target("cpu", "simulated", multiprocessors=4, warp_size=4, shared_memory_bytes=shared_bytes)
    found = TRITON.unsupported(by_comparator(less, element, (2, 300), values), target)
    assert (reason in found) if reason else not found


def test_several_keys_are_left_to_others(rng):
    hlo = hlo_bytes(lambda a, b: lax.sort((a, b), num_keys=2), *rng.normal(size=(2, 3, 9)).astype(np.float32))
    assert "by one key" in TRITON.unsupported(instruction_of(hlo), SIMULATED)
