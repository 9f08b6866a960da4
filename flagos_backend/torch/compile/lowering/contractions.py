"""Matrix products that are nothing but that; the ones with an addend stay whole, as one call of the library."""

from __future__ import annotations

import torch

from flagos_backend.ir.attributes import DotAttributes
from flagos_backend.ir.hlo import Instruction
from flagos_backend.ir.opcode import Opcode
from flagos_backend.ir.types import ArrayShape
from flagos_backend.torch.compile.lowering.emitter import Emitter, array, element_type
from flagos_backend.torch.compile.lowering.table import NoLoweringError, lowering

aten = torch.ops.aten


def _dot(
    emitter: Emitter, result: torch.Tensor, x: Instruction, y: Instruction, attributes: DotAttributes
) -> Instruction:
    kind = element_type(result)
    if not kind.is_float or kind.bits < 16 or {array(x).element_type, array(y).element_type} != {kind}:
        raise NoLoweringError("products of other types are ATen's")
    shape = ArrayShape(kind, tuple(result.shape))
    return emitter.builder.add(Opcode.DOT, [x, y], attributes, shape=shape)


@lowering(aten.mm.default)
def _mm(emitter: Emitter, result: torch.Tensor, x: Instruction, y: Instruction) -> Instruction:
    return _dot(emitter, result, x, y, DotAttributes((1,), (0,)))


@lowering(aten.bmm.default)
def _bmm(emitter: Emitter, result: torch.Tensor, x: Instruction, y: Instruction) -> Instruction:
    return _dot(emitter, result, x, y, DotAttributes((2,), (1,), (0,), (0,)))
