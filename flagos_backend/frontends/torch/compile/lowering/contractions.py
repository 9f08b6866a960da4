"""Matrix products."""

from __future__ import annotations

import torch

from flagos_backend.devices import tensor_float
from flagos_backend.frontends.torch.compile.errors import NoLoweringError
from flagos_backend.frontends.torch.compile.lowering.emitter import Emitter, array, element_type
from flagos_backend.frontends.torch.compile.lowering.table import lowering
from flagos_backend.ir.attributes import DimensionsAttributes, DotAttributes
from flagos_backend.ir.hlo import Instruction
from flagos_backend.ir.opcode import Opcode, Precision
from flagos_backend.ir.types import ArrayShape, ElementType

aten = torch.ops.aten


def _dot(
    emitter: Emitter, result: torch.Tensor, x: Instruction, y: Instruction, attributes: DotAttributes
) -> Instruction:
    kind = element_type(result)
    if not kind.is_float or kind.bits < 16 or {array(x).element_type, array(y).element_type} != {kind}:
        raise NoLoweringError("products of other types are ATen's")
    shape = ArrayShape(kind, tuple(result.shape))
    return emitter.builder.add(Opcode.DOT, [x, y], attributes, shape=shape)


def _precision() -> Precision:
    """What torch's setting says of products of f32. HLO's default would let them be rounded to TF32; Dynamo traces
    again when the setting changes."""
    return Precision.DEFAULT if tensor_float.is_set() else Precision.HIGHEST


def _untransposed(x: Instruction) -> tuple[Instruction, bool]:
    """What a matrix, the last two dimensions, is the transpose of, and whether it is: a product reads it as it lies."""
    if x.opcode is not Opcode.TRANSPOSE:
        return x, False
    rank = array(x).rank
    swapped = (*range(rank - 2), rank - 1, rank - 2)
    if x.attributes_as(DimensionsAttributes).dimensions != swapped:
        return x, False
    return x.operands[0], True


@lowering(aten.mm.default, aten.bmm.default)
def _product(emitter: Emitter, result: torch.Tensor, x: Instruction, y: Instruction) -> Instruction:
    batch = tuple(range(array(x).rank - 2))
    x, x_transposed = _untransposed(x)
    y, y_transposed = _untransposed(y)
    rows, columns = len(batch), len(batch) + 1
    contracted = (rows if x_transposed else columns,), (columns if y_transposed else rows,)
    return _dot(emitter, result, x, y, DotAttributes(*contracted, batch, batch, _precision()))


@lowering(aten.mv.default, aten.dot.default, on_host=False)
def _inner_products(emitter: Emitter, result: torch.Tensor, x: Instruction, y: Instruction) -> Instruction:
    """Of a vector with a vector, or with the rows of a matrix."""
    x, transposed = _untransposed(x) if array(x).rank == 2 else (x, False)
    contracted = 0 if transposed else array(x).rank - 1
    return _dot(emitter, result, x, y, DotAttributes((contracted,), (0,), (), (), _precision()))


@lowering(aten.addmv.default, on_host=False)
def _sum_and_inner_products(
    emitter: Emitter,
    result: torch.Tensor,
    addend: Instruction,
    x: Instruction,
    y: Instruction,
    *,
    beta: float = 1,
    alpha: float = 1,
) -> Instruction:
    kind, dims = element_type(result), tuple(result.shape)
    if kind not in (ElementType.F32, ElementType.F64):
        raise NoLoweringError("ATen rounds 16-bit floats once")

    def scaled(value: Instruction, factor: float) -> Instruction:
        return value if factor == 1 else emitter.add(Opcode.MULTIPLY, value, emitter.operand(factor, kind, dims))

    product = scaled(_inner_products(emitter, result, x, y), alpha)
    if beta == 0:  # then the addend may be anything
        return product
    return emitter.add(Opcode.ADD, scaled(emitter.expand(addend, dims), beta), product)
