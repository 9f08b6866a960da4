"""A pad that crops becomes a pad that only adds elements, of those that stay: loop nests read a slice where it stands
and write around it. Gradients of strided slices, of which associative scans are made, have such pads.

A pass of what emitter.py emits.
"""

from __future__ import annotations

from dataclasses import dataclass

from flagos_backend.ir.attributes import DimensionsAttributes, PadAttributes, SliceAttributes
from flagos_backend.ir.hlo import Instruction, Module
from flagos_backend.ir.opcode import Opcode
from flagos_backend.ir.types import ArrayShape
from flagos_backend.passes.rewrite import Emitter, apply_rule, array_shape


def without_cropping_pads(module: Module) -> Module:
    return apply_rule(module, _rule)


@dataclass(frozen=True, slots=True)
class _Kept:
    """The elements ``start`` to ``stop`` of a dimension, and what goes beside them."""

    start: int
    stop: int
    low: int
    high: int


def _rule(pad: Instruction, emitter: Emitter) -> Instruction | None:
    if pad.opcode is not Opcode.PAD:
        return None
    attributes = pad.attributes_as(PadAttributes)
    if min((*attributes.low, *attributes.high), default=0) >= 0:
        return None
    operand, filler = pad.operands
    shape = array_shape(operand)
    kept = tuple(
        _kept(size, low, interior, result)
        for size, low, interior, result in zip(
            shape.dims, attributes.low, attributes.interior, array_shape(pad).dims, strict=True
        )
    )
    dims = tuple(k.stop - k.start for k in kept)
    if 0 in dims:
        return emitter.emit(Opcode.BROADCAST, pad.shape, (filler,), DimensionsAttributes(()), like=pad)
    if dims != shape.dims:
        starts, stops = tuple(k.start for k in kept), tuple(k.stop for k in kept)
        slicing = SliceAttributes(starts, stops, (1,) * len(dims))
        operand = emitter.emit(Opcode.SLICE, ArrayShape(shape.element_type, dims), (operand,), slicing, like=pad)
    grown = PadAttributes(tuple(k.low for k in kept), tuple(k.high for k in kept), attributes.interior)
    return emitter.emit(Opcode.PAD, pad.shape, (operand, filler), grown, like=pad)


def _kept(size: int, low: int, interior: int, result: int) -> _Kept:
    """Element i of ``size`` stands at ``low + i * (interior + 1)`` of ``result``, or beside it."""
    step = interior + 1
    start = min(max(0, -(low // step)), size)
    stop = max(start, min(size, -(-(result - low) // step)))
    first, last = low + start * step, low + (stop - 1) * step
    return _Kept(start, stop, first, result - 1 - last)
