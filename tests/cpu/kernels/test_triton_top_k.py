"""Our Triton top-k in the interpreter against a sort of the bits in NumPy."""

import numpy as np
import pytest
import torch

from flagos_backend.devices.target import Target
from flagos_backend.ir.attributes import TopKAttributes
from flagos_backend.ir.builder import Builder
from flagos_backend.ir.opcode import Opcode
from flagos_backend.ir.types import ArrayShape, ElementType, TupleShape
from flagos_backend.kernels.choice import implementations_of
from flagos_backend.kernels.implementation import Provider
from flagos_backend.kernels.reference.registry import Run
from flagos_backend.kernels.reference.storage import dtype_of
from flagos_backend.kernels.triton import top_k
from support.numbers import NUMPY_DTYPE

E = ElementType
SIMULATED = Target("cpu", "simulated", multiprocessors=4)
(TRITON,) = (i for i in implementations_of(str(Opcode.TOP_K)) if i.provider is Provider.TRITON)


@pytest.fixture(autouse=True)
def short_blocks(monkeypatch):
    """So that rows of an interpreter's size are several."""
    monkeypatch.setattr(top_k, "_BLOCK", 64)


def instruction(element, dims, k, largest=True):
    builder = Builder("entry")
    result = TupleShape((ArrayShape(element, (*dims[:-1], k)), ArrayShape(E.S32, (*dims[:-1], k))))
    operand = builder.parameter(ArrayShape(element, dims))
    return builder.add(Opcode.TOP_K, [operand], TopKAttributes(k, largest), shape=result)


def ordered(array, element):
    """Python integers in total order."""
    bits = array.view(f"i{array.dtype.itemsize}").astype(object)
    if element.is_float:
        return np.where(bits < 0, -bits - (1 << (element.bits - 1)) - 1, bits)
    return array.astype(object)


def check(array, element, k, largest=True):
    call = instruction(element, array.shape, k, largest)
    assert not TRITON.unsupported(call, SIMULATED)
    (variant,) = TRITON.variants(call, SIMULATED)
    stored = torch.from_numpy(array.view(np.uint8)).view(dtype_of(element)).view(array.shape)
    best, columns = variant.kernel(Run(asynchronous=True), stored)
    keys = ordered(array, element).reshape(-1, array.shape[-1])
    wanted = [sorted(range(len(row)), key=lambda i: ((-row[i] if largest else row[i]), i))[:k] for row in keys]
    assert columns.dtype is torch.int32
    assert columns.reshape(-1, k).tolist() == wanted
    expected = np.take_along_axis(array.reshape(-1, array.shape[-1]), np.array(wanted), 1)
    assert best.view(torch.uint8).numpy().tobytes() == expected.tobytes()


@pytest.mark.parametrize("element", [E.F32, E.F16, E.BF16, E.S8, E.S16, E.S32, E.U8, E.U16, E.U32], ids=str)
@pytest.mark.parametrize("largest", [True, False])
def test_every_type(element, largest, rng):
    """Any bits: NaNs of both signs, both zeros, infinities."""
    bits = rng.integers(0, 256, (3, 150 * element.bits // 8), dtype=np.uint8)
    check(bits.view(NUMPY_DTYPE[element]), element, 5, largest)


@pytest.mark.parametrize(
    ("dims", "k"),
    [((1,), 1), ((7,), 7), ((2, 3, 64), 16), ((2, 65), 1), ((2, 250), 64), ((5, 70), 33), ((0, 9), 0)],
)
def test_sizes_with_ties(dims, k, rng):
    array = rng.integers(-3, 4, dims).astype(np.float32)
    array[array == 0] = rng.choice(np.array([0.0, -0.0], np.float32), int((array == 0).sum()))
    if array.size:
        check(array, E.F32, k)
    else:
        assert TRITON.unsupported(instruction(E.F32, dims, k), SIMULATED)


@pytest.mark.parametrize(
    ("element", "dims", "k", "largest"),
    [
        (E.F32, (1, 1000), 5, True),
        (E.S32, (3, 640), 64, False),
        (E.BF16, (2, 1, 1217), 1, True),
        (E.U8, (1, 900), 33, True),
    ],
)
def test_few_long_rows_are_shared_out(element, dims, k, largest, rng, monkeypatch):
    """With ties across segments, whose last one is not full."""
    launched = []
    original = top_k.launch
    monkeypatch.setattr(top_k, "launch", lambda kernel, *a, **b: launched.append(kernel) or original(kernel, *a, **b))
    size = element.bits // 8
    few = rng.integers(0, 256, (20, size), dtype=np.uint8)[rng.integers(0, 20, dims)]
    check(few.reshape(*dims[:-1], -1).view(NUMPY_DTYPE[element]), element, k, largest)
    assert len(launched) == 2


@pytest.mark.parametrize(
    ("element", "dims", "k", "reason"),
    [
        (E.F64, (4, 9), 2, "does not order f64"),
        (E.F32, (4, 99), 65, "keeps up to 64"),
        (E.F16, (4, (1 << 31) - 1023), 4, "rows of 1 to 2147482624 elements"),
    ],
)
def test_what_it_leaves_to_others(element, dims, k, reason):
    assert reason in TRITON.unsupported(instruction(element, dims, k), SIMULATED)
