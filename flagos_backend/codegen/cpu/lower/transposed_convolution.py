"""A convolution of an input with zeros between its elements, which the gradient of one with strides is: for each phase
of the result a plain convolution, with the part of the kernel that meets elements there.

Between emitter.py and im2col.py, which makes each of them a matrix product.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

from flagos_backend.codegen.cpu.lower.dot import MatrixProduct
from flagos_backend.codegen.cpu.lower.im2col import as_patch_product, padded_input
from flagos_backend.ir.attributes import ConvolutionAttributes, WindowDimension
from flagos_backend.ir.hlo import Instruction
from flagos_backend.ir.opcode import Opcode
from flagos_backend.ir.types import ArrayShape, ElementType
from flagos_backend.loop_ir.indexing import dims_of
from flagos_backend.loop_ir.region import Expression, Literal, Load, Region, Store, axis, linear


@dataclass(frozen=True, slots=True)
class _Phase:
    """In one spatial dimension: ``count`` positions of the result, every ``step``-th from ``first`` on. Each is a sum
    over ``taps`` of the kernel, every ``step``-th from ``tap`` on, which ``window`` moves over the input."""

    step: int
    first: int
    count: int
    tap: int
    taps: int
    window: WindowDimension


def as_patch_products(
    convolution: Instruction, input_buffer: Instruction, kernel_buffer: Instruction
) -> tuple[Region | MatrixProduct, ...] | None:
    """``convolution`` as products and the copies between them, in order; None where as_patch_product takes it not."""
    attributes = convolution.attributes_as(ConvolutionAttributes)
    dims, kernel_dims, result_dims = map(dims_of, (*convolution.operands, convolution))
    dilated = [w for w in attributes.window if w.base_dilation > 1]
    if (
        not dilated
        or any(w.stride > 1 or w.window_dilation > 1 for w in dilated)
        or 0 in (*dims, *kernel_dims, *result_dims)
    ):
        patches = as_patch_product(convolution, input_buffer, kernel_buffer)
        return None if patches is None else (*patches.copies, patches.product)
    spatial = zip(attributes.window, attributes.input_spatial, attributes.output_spatial, strict=True)
    phases = [list(_phases(window, dims[source], result_dims[target])) for window, source, target in spatial]
    margins = [_margin(along) for along in phases]
    copies: list[Region] = []
    padded = padded_input(input_buffer, dims, replace(attributes, window=tuple(margins)), copies)
    items: list[Region | MatrixProduct] = [*copies]
    for chosen in product(*phases):
        part = _part(convolution, padded, kernel_buffer, chosen, margins)
        if part is None:
            return None
        items += part
    return tuple(items)


def _phases(window: WindowDimension, size: int, result: int) -> Iterator[_Phase]:
    step = window.base_dilation
    if step == 1:
        yield _Phase(1, 0, result, 0, window.size, window)
        return
    for first in range(min(step, result)):
        count = len(range(first, result, step))
        tap = (window.padding_low - first) % step
        taps = len(range(tap, window.size, step))
        # Position q of the phase meets tap t of its part of the kernel at element q + t - low of the input.
        low = (window.padding_low - first - tap) // step
        high = (count - 1) + (taps - 1) - low - (size - 1)
        part = WindowDimension(taps, padding_low=low, padding_high=high, window_reversal=window.window_reversal)
        yield _Phase(step, first, count, tap, taps, part)


def _margin(along: Sequence[_Phase]) -> WindowDimension:
    """What the phases of a dimension need around the input; the only one of a dimension sees to that itself."""
    if along[0].step == 1:
        return WindowDimension(1)
    low = max(0, *(phase.window.padding_low for phase in along))
    return WindowDimension(1, padding_low=low, padding_high=max(0, *(phase.window.padding_high for phase in along)))


def _part(
    convolution: Instruction,
    padded: tuple[Instruction, tuple[int, ...]],
    kernel_buffer: Instruction,
    phases: Sequence[_Phase],
    margins: Sequence[WindowDimension],
) -> list[Region | MatrixProduct] | None:
    """One phase of each dimension, stored where it belongs in the result."""
    if any(phase.taps == 0 for phase in phases):
        return [_spread(convolution, phases, None)]
    attributes, element_type = convolution.attributes_as(ConvolutionAttributes), _type_of(convolution)
    windows = tuple(
        phase.window
        if phase.step == 1
        else replace(
            phase.window,
            padding_low=phase.window.padding_low - margin.padding_low,
            padding_high=phase.window.padding_high - margin.padding_high,
        )
        for phase, margin in zip(phases, margins, strict=True)
    )
    name = f"{convolution.name}.phase{'x'.join(str(phase.first) for phase in phases)}"
    buffer, dims = padded
    data = Instruction(Opcode.COPY, ArrayShape(element_type, dims), (buffer,), name=buffer.name)
    kernel = _kernel_part(convolution, kernel_buffer, phases, name)
    taps = kernel.stores[0].target
    shape = ArrayShape(element_type, _result_part(convolution, phases))
    part = Instruction(Opcode.CONVOLUTION, shape, (data, taps), replace(attributes, window=windows), name=name)
    patches = as_patch_product(part, buffer, taps)
    return None if patches is None else [kernel, *patches.copies, patches.product, _spread(convolution, phases, part)]


def _result_part(convolution: Instruction, phases: Sequence[_Phase]) -> tuple[int, ...]:
    attributes = convolution.attributes_as(ConvolutionAttributes)
    counts = dict(zip(attributes.output_spatial, (phase.count for phase in phases), strict=True))
    return tuple(counts.get(d, size) for d, size in enumerate(dims_of(convolution)))


def _kernel_part(convolution: Instruction, kernel_buffer: Instruction, phases: Sequence[_Phase], name: str) -> Region:
    """The taps of the phases, in the order of the kernel, whose last tap comes first where it is reversed."""
    attributes = convolution.attributes_as(ConvolutionAttributes)
    dims = dims_of(convolution.operands[1])
    along = dict(zip(attributes.kernel_spatial, phases, strict=True))
    part = tuple(along[d].taps if d in along else size for d, size in enumerate(dims))
    rank = len(dims)
    source, there = [], [axis(d, rank) for d in range(rank)]
    for d, place in enumerate(there):
        phase = along.get(d, _Phase(1, 0, 0, 0, 0, WindowDimension(1)))
        first = phase.tap
        if phase.step > 1 and phase.window.window_reversal:
            first = dims[d] - 1 - phase.tap - (phase.taps - 1) * phase.step
        source.append(place.scaled(phase.step, first))
    target = Instruction(Opcode.COPY, ArrayShape(_type_of(convolution), part), (kernel_buffer,), name=f"{name}.kernel")
    value = Load(_type_of(convolution), kernel_buffer, linear(tuple(source), dims, rank))
    return Region(part, (Store(target, value, linear(tuple(there), part, rank)),))


def _spread(convolution: Instruction, phases: Sequence[_Phase], part: Instruction | None) -> Region:
    """``part``, or zeros, into the result."""
    attributes, element_type = convolution.attributes_as(ConvolutionAttributes), _type_of(convolution)
    dims = _result_part(convolution, phases)
    rank = len(dims)
    here = tuple(axis(d, rank) for d in range(rank))
    along = dict(zip(attributes.output_spatial, phases, strict=True))
    there = tuple(p.scaled(along[d].step, along[d].first) if d in along else p for d, p in enumerate(here))
    value: Expression = Literal(element_type, bytes(element_type.bytes))
    if part is not None:
        value = Load(element_type, part, linear(here, dims, rank))
    return Region(dims, (Store(convolution, value, linear(there, dims_of(convolution), rank)),))


def _type_of(convolution: Instruction) -> ElementType:
    assert isinstance(convolution.shape, ArrayShape)
    return convolution.shape.element_type
