"""The negative log-likelihood of classes on the host, where a target that is no class is refused as in eager.
Accelerators have it as a sum over the classes (decompositions.py)."""

from __future__ import annotations

import torch

from flagos_backend.frontends.torch.compile.errors import NoLoweringError
from flagos_backend.frontends.torch.compile.lowering.emitter import Emitter, array, element_type
from flagos_backend.frontends.torch.compile.lowering.index_checks import Refusal, check
from flagos_backend.frontends.torch.compile.lowering.indexing import compare, rows_at
from flagos_backend.frontends.torch.compile.lowering.table import lowering
from flagos_backend.ir.attributes import DimensionsAttributes, GatherAttributes
from flagos_backend.ir.custom_calls.index_check import INDEX
from flagos_backend.ir.hlo import Instruction
from flagos_backend.ir.opcode import Comparison, Opcode
from flagos_backend.ir.types import ElementType

aten = torch.ops.aten
E = ElementType
_NONE, _MEAN, _SUM = range(3)


@lowering(aten.nll_loss_forward.default)
def _nll_loss(
    emitter: Emitter,
    result: tuple[torch.Tensor, torch.Tensor],
    x: Instruction,
    target: Instruction,
    weight: Instruction | None,
    reduction: int,
    ignore_index: int,
) -> tuple[Instruction, Instruction]:
    """Of logarithms [batch, classes] and targets [batch]: the loss, and the weights of what counts, summed up."""
    kind, shape = element_type(result[0]), array(x)
    fits = kind in (E.F32, E.F64) and shape.rank == 2 and array(target).rank == 1
    if not fits or not shape.num_elements or (weight is not None and array(weight).element_type is not kind):
        raise NoLoweringError("single rows, and losses of nothing, are ATen's")
    batch, classes = shape.dims
    ignored = compare(emitter, Comparison.EQ, target, ignore_index)
    target = emitter.add(Opcode.SELECT, ignored, emitter.operand(0, array(target).element_type, (batch,)), target)
    check(emitter, target, 0, classes, Refusal(f"Target {INDEX} is out of bounds."))
    attributes = GatherAttributes(
        offset_dims=(),
        collapsed_slice_dims=(1,),
        start_index_map=(1,),
        index_vector_dim=1,
        slice_sizes=(1, 1),
        operand_batching_dims=(0,),
        start_indices_batching_dims=(0,),
    )
    zero = emitter.operand(0, kind, (batch,))
    loss = emitter.add(Opcode.NEGATE, emitter.builder.add(Opcode.GATHER, [x, target], attributes))
    weights = emitter.operand(1, kind, (batch,))
    if weight is not None:
        weights = rows_at(emitter, (batch,), weight, 0, target)
        loss = emitter.add(Opcode.MULTIPLY, loss, weights)
    loss = emitter.add(Opcode.SELECT, ignored, zero, loss)
    if reduction == _NONE:
        return loss, emitter.operand(0, kind, tuple(result[1].shape))
    total, count = (_total(emitter, part) for part in (loss, emitter.add(Opcode.SELECT, ignored, zero, weights)))
    return (emitter.add(Opcode.DIVIDE, total, count) if reduction == _MEAN else total), count


def _total(emitter: Emitter, x: Instruction) -> Instruction:
    kind = array(x).element_type
    combiner = emitter.combiner(Opcode.ADD, kind)
    return emitter.builder.add(
        Opcode.REDUCE, [x, emitter.scalar(0, kind)], DimensionsAttributes((0,)), called=[combiner]
    )
