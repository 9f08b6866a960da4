"""ragged-dot by ATen's grouped product, on this host's memory, against sums in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from flagos_backend.devices.target import Target
from flagos_backend.ir.attributes import DotAttributes, RaggedDotAttributes
from flagos_backend.ir.builder import Builder
from flagos_backend.ir.hlo import Instruction
from flagos_backend.ir.opcode import Opcode
from flagos_backend.ir.types import ArrayShape, ElementType
from flagos_backend.kernels.reference.registry import Run
from flagos_backend.kernels.vendor import ragged

E = ElementType
H200 = Target("cuda", "nvidia", "sm_90", multiprocessors=132)
ROWS, WIDTH, COLUMNS = 40, 16, 24
SIZES = [(10, 0, 30), (5, 7, 1), (0, 0, 0), (40, 0, 0), (39, 30, 5), (0, 0, 40)]
# Dimensions of the operands by letter, and the attributes: m rows, k contracted, n columns, g groups.
FORMS = {
    "rows": ("mk", "gkn", RaggedDotAttributes(DotAttributes((1,), (1,)), (0,), (0,))),
    "rows, matrices transposed": ("mk", "gnk", RaggedDotAttributes(DotAttributes((1,), (2,)), (0,), (0,))),
    "rows minor": ("km", "gkn", RaggedDotAttributes(DotAttributes((0,), (1,)), (1,), (0,))),
    "groups second": ("mk", "kgn", RaggedDotAttributes(DotAttributes((1,), (0,)), (0,), (1,))),
    "contracted": ("mk", "mn", RaggedDotAttributes(DotAttributes((0,), (0,)), (0,), ())),
}


def ragged_dot(
    lhs: str, rhs: str, attributes: RaggedDotAttributes, kind: ElementType = E.BF16, **sizes: int
) -> Instruction:
    extents = {"m": ROWS, "k": WIDTH, "n": COLUMNS, "g": 3} | sizes
    builder = Builder("entry")
    shapes = [ArrayShape(kind, tuple(extents[d] for d in dims)) for dims in (lhs, rhs)]
    operands = [builder.parameter(shape) for shape in (*shapes, ArrayShape(E.S32, (extents["g"],)))]
    result = "gkn" if attributes.rhs_group == () else "mn"
    shape = ArrayShape(kind, tuple(extents[d] for d in result))
    return builder.add(Opcode.RAGGED_DOT, operands, attributes, shape=shape)


def bits(numbers: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(numbers).to(torch.bfloat16)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("offset", [0, 1], ids=["aligned", "not aligned"])
def test_products(form: str, sizes: tuple[int, ...], offset: int, rng: np.random.Generator) -> None:
    lhs, rhs, attributes = FORMS[form]
    instruction = ragged_dot(lhs, rhs, attributes)
    assert ragged.unsupported(instruction, H200) == ""
    extents = {"m": ROWS, "k": WIDTH, "n": COLUMNS, "g": 3}
    arrays = []
    for dims in (lhs, rhs):
        shape = tuple(extents[d] for d in dims)
        memory = bits(rng.standard_normal(offset + int(np.prod(shape))))
        arrays.append(memory[offset:].view(shape))
    (variant,) = ragged.variants(instruction, H200)
    found = variant.kernel(Run(), *arrays, torch.tensor(sizes, dtype=torch.int32))
    assert isinstance(found, torch.Tensor)
    a, b = (array.double() for array in arrays)
    group = np.searchsorted(np.cumsum(sizes), np.arange(ROWS), side="right")  # 3 behind the last one
    member = torch.from_numpy(np.equal.outer(np.arange(3), group)).double()
    result = "gkn" if form == "contracted" else "mn"
    exact = torch.einsum(f"{lhs},{rhs},gm->{result}", a, b, member)
    magnitude = torch.einsum(f"{lhs},{rhs},gm->{result}", a.abs(), b.abs(), member)
    # A sum in float32, and one rounding to eight bits.
    assert bool(((found.double() - exact).abs() <= 2**-8 * exact.abs() + 2**-20 * magnitude).all())


def test_what_is_not_a_number_stays_in_its_group(rng: np.random.Generator) -> None:
    lhs, rhs, attributes = FORMS["rows"]
    (variant,) = ragged.variants(ragged_dot(lhs, rhs, attributes), H200)
    a, b = bits(rng.standard_normal((ROWS, WIDTH))), bits(rng.standard_normal((3, WIDTH, COLUMNS)))
    a[12], b[2] = np.nan, np.inf
    found = variant.kernel(Run(), a, b, torch.tensor([10, 5, 4], dtype=torch.int32))
    assert isinstance(found, torch.Tensor)
    is_finite = found.isfinite().all(1)
    assert is_finite.tolist() == [row != 12 and not 15 <= row < 19 for row in range(ROWS)]
    assert not found[19:].any()


@pytest.mark.parametrize(
    ("form", "kind", "sizes", "target", "reason"),
    [
        ("rows", E.F32, {}, H200, "not all bf16"),
        ("rows", E.BF16, {"k": 12}, H200, "multiples of 8"),
        ("rows", E.BF16, {"n": 25}, H200, "multiples of 8"),
        ("rows minor", E.BF16, {"m": 41}, H200, "multiples of 8"),
        ("rows", E.BF16, {"m": 0}, H200, "nothing"),
        ("rows", E.BF16, {}, Target("cuda", "nvidia", "sm_80"), "this chip"),
        ("rows", E.BF16, {}, Target("cpu"), "this chip"),
    ],
)
def test_where_it_is_not_used(form: str, kind: ElementType, sizes: dict[str, int], target: Target, reason: str) -> None:
    assert reason in ragged.unsupported(ragged_dot(*FORMS[form], kind, **sizes), target)


def test_groups_along_the_minor_dimension_are_left_to_the_reference() -> None:
    attributes = RaggedDotAttributes(DotAttributes((1,), (0,)), (0,), (2,))
    assert ragged.unsupported(ragged_dot("mk", "kng", attributes), H200) == "it is no grouped product of matrices"
