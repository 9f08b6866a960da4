"""Our Triton kernel of small products, in the interpreter, against float64. Compiled, and of bf16, whose
bits that computes with: tests/gpu/kernels/test_dot.py."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from flagos_backend.devices.target import Target
from flagos_backend.ir.attributes import DotAttributes
from flagos_backend.ir.builder import Builder
from flagos_backend.ir.hlo import Instruction
from flagos_backend.ir.opcode import Opcode, Precision
from flagos_backend.ir.types import ArrayShape, ElementType
from flagos_backend.kernels.reference.registry import Run
from flagos_backend.kernels.reference.storage import dtype_of
from flagos_backend.kernels.triton import dot, table
from support.memory import far_apart

E = ElementType
TARGET = Target("cpu", vendor="simulated", architecture="host", multiprocessors=4, warp_size=1)
# Of roundings of the result, relative to the largest sum of magnitudes.
PRECISION = {E.F32: 1e-6, E.F16: 1e-3}


def product(
    element: ElementType,
    lhs: tuple[int, ...],
    rhs: tuple[int, ...],
    result: tuple[int, ...],
    attributes: DotAttributes,
    wider: ElementType | None = None,
) -> Instruction:
    builder = Builder("dot")
    operands = [builder.parameter(ArrayShape(element, dims)) for dims in (lhs, rhs)]
    return builder.add(Opcode.DOT, operands, attributes, shape=ArrayShape(wider or element, result))


def compare(instruction: Instruction, subscripts: str, rng: np.random.Generator) -> None:
    """``subscripts``: of einsum."""
    (_, implementation) = next(entry for entry in table.IMPLEMENTATIONS if entry[0] == str(Opcode.DOT))
    assert not implementation.unsupported(instruction, TARGET)
    shapes = [operand.shape for operand in instruction.operands]
    arrays = [
        torch.from_numpy(rng.standard_normal(s.dims)).to(dtype_of(s.element_type), copy=True)
        for s in shapes
        if isinstance(s, ArrayShape)
    ]
    (variant,) = implementation.variants(instruction, TARGET)
    found = variant.kernel(Run(), *arrays)
    exact = torch.einsum(subscripts, *(a.double() for a in arrays))
    magnitude = torch.einsum(subscripts, *(a.double().abs() for a in arrays)).max()
    assert isinstance(found, torch.Tensor)
    assert isinstance(instruction.shape, ArrayShape)
    assert found.dtype is dtype_of(instruction.shape.element_type)
    element = instruction.operands[0].shape
    assert isinstance(element, ArrayShape)
    assert (found.double() - exact).abs().max() <= PRECISION[element.element_type] * magnitude


@pytest.mark.parametrize("element", list(PRECISION), ids=lambda e: e.name)
@pytest.mark.parametrize(
    ("m", "n", "k"), [(1, 1, 1), (16, 192, 64), (3, 200, 33), (65, 17, 130), (1, 300, 1000), (300, 1, 7)]
)
@pytest.mark.parametrize("precision", [Precision.DEFAULT, Precision.HIGHEST], ids=lambda p: p.name)
def test_sizes(element: ElementType, m: int, n: int, k: int, precision: Precision, rng: np.random.Generator) -> None:
    attributes = DotAttributes((1,), (0,), precision=precision)
    compare(product(element, (m, k), (k, n), (m, n), attributes), "mk,kn->mn", rng)


def test_wider_results(rng: np.random.Generator) -> None:
    compare(product(E.F16, (20, 40), (40, 30), (20, 30), DotAttributes((1,), (0,)), E.F32), "mk,kn->mn", rng)


def test_transposed_operands(rng: np.random.Generator) -> None:
    compare(product(E.F32, (40, 20), (30, 40), (20, 30), DotAttributes((0,), (1,))), "km,nk->mn", rng)


def test_batches(rng: np.random.Generator) -> None:
    """In front, and between the other dimensions."""
    front = DotAttributes((2,), (1,), (0,), (0,))
    compare(product(E.F32, (5, 9, 18), (5, 18, 33), (5, 9, 33), front), "bmk,bkn->bmn", rng)
    between = DotAttributes((2,), (0,), (1,), (2,))
    compare(product(E.F32, (9, 5, 18), (18, 33, 5), (5, 9, 33), between), "mbk,knb->bmn", rng)


def test_several_free_and_contracted_dimensions(rng: np.random.Generator) -> None:
    attributes = DotAttributes((1, 2), (2, 1))
    compare(product(E.F32, (6, 4, 5), (7, 5, 4), (6, 7), attributes), "mkl,nlk->mn", rng)


@pytest.mark.parametrize("operand", [0, 1])
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_parts_of_large_arrays(operand: int, axis: int, rng: np.random.Generator) -> None:
    """Whose elements lie more than 2**31 elements apart."""
    instruction = product(E.F16, (3, 40, 20), (3, 20, 30), (3, 40, 30), DotAttributes((2,), (1,), (0,), (0,)))
    operands = [torch.from_numpy(rng.standard_normal(d)).to(torch.float16) for d in ((3, 40, 20), (3, 20, 30))]
    (variant,) = dot.variants(instruction, TARGET)
    near = variant.kernel(Run(), *operands)
    operands[operand] = far_apart(operands[operand], axis)
    found = variant.kernel(Run(), *operands)
    assert isinstance(found, torch.Tensor) and isinstance(near, torch.Tensor)
    assert torch.equal(found, near)


def test_nan_and_infinities(rng: np.random.Generator) -> None:
    """Those of an operand reach their rows or columns and nothing else, also where tiles are padded, whatever NaN's
    bits are."""
    instruction = product(E.F32, (17, 40), (40, 33), (17, 33), DotAttributes((1,), (0,)))
    lhs, rhs = (torch.from_numpy(rng.standard_normal(d).astype(np.float32)) for d in ((17, 40), (40, 33)))
    lhs[2, 3], lhs[16, 0] = torch.inf, torch.tensor([0x7FFFFFFF], dtype=torch.int32).view(torch.float32)[0]
    rhs[39, 32] = -torch.inf
    (variant,) = dot.variants(instruction, TARGET)
    found = variant.kernel(Run(), lhs, rhs)
    assert isinstance(found, torch.Tensor)
    torch.testing.assert_close(found, lhs @ rhs, rtol=1e-2, atol=5e-2, equal_nan=True)


@pytest.mark.parametrize(
    ("instruction", "reason"),
    [
        (product(E.F64, (4, 4), (4, 4), (4, 4), DotAttributes((1,), (0,))), "f32, f16 and bf16"),
        (product(E.F32, (0, 4), (4, 4), (0, 4), DotAttributes((1,), (0,))), "no elements"),
        (product(E.F32, (512, 512), (512, 512), (512, 512), DotAttributes((1,), (0,))), "no small product"),
    ],
)
def test_what_it_lacks(instruction: Instruction, reason: str) -> None:
    assert reason in dot.unsupported(instruction)
