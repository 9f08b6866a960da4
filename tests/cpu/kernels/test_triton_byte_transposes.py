"""Our Triton kernel of bytes by columns in the interpreter, and products that use it."""

import pytest
import torch

from flagos_backend.devices.target import Target
from flagos_backend.ir.attributes import DotAttributes
from flagos_backend.ir.builder import Builder
from flagos_backend.ir.opcode import Opcode
from flagos_backend.ir.types import ArrayShape, ElementType
from flagos_backend.kernels.reference.registry import Run
from flagos_backend.kernels.triton import byte_transposes
from flagos_backend.kernels.vendor import dot

SIMULATED = Target("cpu", "simulated", multiprocessors=4, warp_size=4)


def draw(*dims):
    return torch.randint(-128, 128, dims, dtype=torch.int8)


@pytest.mark.parametrize(("dims", "filled"), [((1, 1), (16, 16)), ((70, 130), (80, 144)), ((64, 8), (64, 8))])
def test_matrix(dims, filled):
    """Dense, rows of a wider one, by columns already, and with neither dimension dense."""
    m, n = dims
    for matrix in (draw(m, n), draw(m, n + 3)[:, :n], draw(n, m).mT, draw(2 * m, 2 * n)[::2, ::2]):
        found = byte_transposes.by_columns(matrix, *filled)
        expected = torch.zeros(filled, dtype=torch.int8)
        expected[:m, :n] = matrix
        assert torch.equal(found, expected) and found.mT.is_contiguous()


def test_what_lies_by_columns_is_not_copied():
    matrix = draw(24, 16).mT
    assert byte_transposes.by_columns(matrix, 16, 24) is matrix


@pytest.mark.parametrize("dims", [(32, 64, 48), (3, 70, 9)])
@pytest.mark.parametrize("batch", [(), (3,)], ids=["one", "three"])
def test_products(dims, batch):
    rows, contracted, columns = dims
    builder, n = Builder("dot"), len(batch)
    shapes = ((*batch, rows, contracted), (*batch, contracted, columns))
    operands = [builder.parameter(ArrayShape(ElementType.S8, shape)) for shape in shapes]
    attributes = DotAttributes((n + 1,), (n,), tuple(range(n)), tuple(range(n)))
    shape = ArrayShape(ElementType.S32, (*batch, rows, columns))
    call = builder.add(Opcode.DOT, operands, attributes, shape=shape)
    a, b = (draw(*shape) for shape in shapes)
    for variant in dot.variants(call, SIMULATED):
        assert torch.equal(variant.kernel(Run(), a, b), a.int() @ b.int()), variant.name


def test_what_is_compiled_is_what_is_launched(monkeypatch):
    launches = []
    monkeypatch.setattr(
        byte_transposes, "launch", lambda _, grid, *rest, **flags: launches.append((grid, rest[2:], flags))
    )
    builder = Builder("dot")
    operands = [builder.parameter(ArrayShape(ElementType.S8, shape)) for shape in ((20, 70), (70, 90))]
    call = builder.add(Opcode.DOT, operands, DotAttributes((1,), (0,)), shape=ArrayShape(ElementType.S32, (20, 90)))
    last = dot.variants(call, SIMULATED)[0]
    last.warm_up()
    last.kernel(Run(), draw(20, 70), draw(70, 90))
    assert launches[0] == launches[1]
