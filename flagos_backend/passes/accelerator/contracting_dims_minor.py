"""Products in loops read matrices that stay the same with the contracted dimensions last, where the target's matrix
units want them so. hoist_invariants.py, which comes next, lays them out once before the loop.
"""

from __future__ import annotations

from dataclasses import replace

from flagos_backend.devices.target import Target
from flagos_backend.ir.attributes import DimensionsAttributes, DotAttributes, WhileAttributes
from flagos_backend.ir.hlo import Computation, Instruction, Module
from flagos_backend.ir.opcode import Opcode
from flagos_backend.ir.types import ArrayShape
from flagos_backend.passes.rewrite import (
    Emitter,
    Substitution,
    array_shape,
    index_in,
    rewrite_computations,
    with_operands,
)

# In so many iterations a matrix that is laid out anew has paid for it.
_ITERATIONS = 4


def contracting_dimensions_minor(module: Module, target: Target) -> Module:
    def transform(computation: Computation, replaced: dict[int, Computation]) -> Computation:
        substitution = Substitution(replaced)
        instructions = []
        for instruction in computation.instructions:
            better = substitution.apply(instruction)
            if better.opcode is Opcode.WHILE and _pays(better):
                condition, body = better.called
                laid_out = _laid_out(body, target)
                if laid_out is not body:
                    better = with_operands(better, better.operands, (condition, laid_out))
            instructions.append(better)
            substitution.record(instruction, better)
        if not substitution.values:
            return computation
        return Computation(computation.name, tuple(instructions), substitution.value(computation.root))

    return rewrite_computations(module, transform)


def _pays(loop: Instruction) -> bool:
    iterations = loop.attributes_as(WhileAttributes).trip_count
    return iterations is None or iterations >= _ITERATIONS


def _laid_out(body: Computation, target: Target) -> Computation:
    """``body`` with its products of unchanged elements of its state rewritten."""
    (state,) = body.parameters
    unchanged: set[int] = set()
    if body.root.opcode is Opcode.TUPLE:
        unchanged = {index for index, value in enumerate(body.root.operands) if index_in(value, state) == index}
    called = {id(computation): computation for i in body.instructions for computation in i.called}
    emitter, substitution = Emitter(), Substitution(called)
    for instruction in body.instructions:
        better = substitution.apply(instruction)
        if better.opcode is Opcode.DOT and _gains(better, target):
            better = _with_contracting_dimensions_minor(
                better, [index_in(o, state) in unchanged for o in better.operands], emitter
            )
        substitution.record(instruction, emitter.put(better))
    if not substitution.values:
        return body
    return Computation(body.name, tuple(emitter.instructions), substitution.value(body.root))


def _gains(dot: Instruction, target: Target) -> bool:
    is_rounded = dot.attributes_as(DotAttributes).allows_tensor_float
    return is_rounded and target.reads_contracting_dimensions_minor(array_shape(dot.operands[0]).element_type)


def _with_contracting_dimensions_minor(dot: Instruction, movable: list[bool], emitter: Emitter) -> Instruction:
    """The product of its operands as the target wants them, or as it is where one that is not has to be moved."""
    attributes = dot.attributes_as(DotAttributes)
    sides = ((attributes.lhs_batch, attributes.lhs_contracting), (attributes.rhs_batch, attributes.rhs_contracting))
    operands, contracting = [], []
    for operand, (batch, contracted), may_move in zip(dot.operands, sides, movable, strict=True):
        shape = array_shape(operand)
        order = _order(shape, batch, contracted)
        if order == tuple(range(shape.rank)):
            operands.append(operand)
        elif may_move:
            moved = ArrayShape(shape.element_type, tuple(shape.dims[d] for d in order))
            operands.append(emitter.emit(Opcode.TRANSPOSE, moved, (operand,), DimensionsAttributes(order), like=dot))
        else:
            return dot
        contracting.append(tuple(order.index(d) for d in contracted))
    if operands == [*dot.operands]:
        return dot
    lhs, rhs = contracting
    made = replace(
        attributes,
        lhs_contracting=lhs,
        rhs_contracting=rhs,
        lhs_batch=_moved(attributes.lhs_batch, dot.operands[0], operands[0]),
        rhs_batch=_moved(attributes.rhs_batch, dot.operands[1], operands[1]),
    )
    return Instruction(dot.opcode, dot.shape, tuple(operands), made, (), dot.name, dot.metadata)


def _order(shape: ArrayShape, batch: tuple[int, ...], contracted: tuple[int, ...]) -> tuple[int, ...]:
    free = tuple(d for d in range(shape.rank) if d not in batch and d not in contracted)
    return (*batch, *free, *contracted)


def _moved(batch: tuple[int, ...], old: Instruction, new: Instruction) -> tuple[int, ...]:
    return batch if new is old else tuple(range(len(batch)))
