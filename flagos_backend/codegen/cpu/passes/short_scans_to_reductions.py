"""Running sums of short rows as reductions: each result reads the whole row, and takes what is before it. That is more
arithmetic than one pass through the row, and less time than a library call, for which Python runs; it fuses besides.

A pass of what emitter.py emits.
"""

from __future__ import annotations

from flagos_backend.ir.attributes import (
    CompareAttributes,
    DimensionAttributes,
    DimensionsAttributes,
    WindowAttributes,
    WindowDimension,
)
from flagos_backend.ir.elementwise import reduction_opcode
from flagos_backend.ir.hlo import Instruction, Module
from flagos_backend.ir.opcode import Comparison, Opcode
from flagos_backend.ir.types import ArrayShape, ElementType
from flagos_backend.passes.rewrite import Emitter, apply_rule, array_shape

# Terms that may be looked at in all; a library call takes as long as some hundred thousand.
_MAX_TERMS = 1 << 15
_ALONE = WindowDimension(1)


def with_reduced_scans(module: Module) -> Module:
    """``module`` without the short scans of one operand that a reduce-window says."""
    return apply_rule(module, _rule)


def _rule(scan: Instruction, emitter: Emitter) -> Instruction | None:
    if scan.opcode is not Opcode.REDUCE_WINDOW or len(scan.operands) != 2:
        return None
    source, start = scan.operands
    shape = array_shape(source)
    found = _scanned(scan.attributes_as(WindowAttributes).window, shape.dims)
    if found is None:
        return None
    dimension, is_reverse = found
    size = shape.dims[dimension]
    if shape.num_elements * size > _MAX_TERMS:
        return None
    # The row is read along the dimension behind the scanned one.
    dims = (*shape.dims[: dimension + 1], size, *shape.dims[dimension + 1 :])
    wide = ArrayShape(shape.element_type, dims)
    attributes = DimensionsAttributes((dimension + 1,))
    reduction = Instruction(
        Opcode.REDUCE, scan.shape, (Instruction(Opcode.COPY, wide, (source,)), start), attributes, scan.called
    )
    if reduction_opcode(reduction, half_sums=True) is None:
        return None
    kept = tuple(d if d < dimension else d + 1 for d in range(len(shape.dims)))
    terms = emitter.emit(Opcode.BROADCAST, wide, (source,), DimensionsAttributes(kept), like=scan)
    nothing = emitter.emit(Opcode.BROADCAST, wide, (start,), DimensionsAttributes(()), like=scan)
    numbers = ArrayShape(ElementType.S32, dims)
    at, read = (
        emitter.emit(Opcode.IOTA, numbers, (), DimensionAttributes(d), like=scan) for d in (dimension, dimension + 1)
    )
    direction = Comparison.GE if is_reverse else Comparison.LE
    counts = emitter.emit(
        Opcode.COMPARE, ArrayShape(ElementType.PRED, dims), (read, at), CompareAttributes(direction), like=scan
    )
    chosen = emitter.emit(Opcode.SELECT, wide, (counts, terms, nothing), like=scan)
    return emitter.emit(Opcode.REDUCE, scan.shape, (chosen, start), attributes, scan.called, like=scan)


def _scanned(window: tuple[WindowDimension, ...], dims: tuple[int, ...]) -> tuple[int, bool] | None:
    """The dimension along which each result combines all up to it, or in reverse all from it on."""
    wide = [d for d, w in enumerate(window) if w != _ALONE]
    if len(wide) != 1:
        return None
    (dimension,) = wide
    size = dims[dimension]
    for low, high in ((size - 1, 0), (0, size - 1)):
        if window[dimension] == WindowDimension(size, padding_low=low, padding_high=high):
            return dimension, low == 0
    return None
