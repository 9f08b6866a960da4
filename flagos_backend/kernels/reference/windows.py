"""Reduce-window with any reducer, and select-and-scatter.

HLO takes a reducer to be associative, so a windowed reduction reduces one dimension after another, each in O(log size)
calls of the reducer, or by torch's cumulative functions where the windows are prefixes or suffixes.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from flagos_backend.ir.attributes import WindowAttributes, WindowDimension
from flagos_backend.ir.hlo import Instruction
from flagos_backend.ir.opcode import Opcode
from flagos_backend.ir.types import ArrayShape
from flagos_backend.kernels.reference.combining import prepare_combiner
from flagos_backend.kernels.reference.cumulative import (
    combine_of,
    identity_of,
    is_prefix,
    is_suffix,
    prepare_running,
    starts_with_identity,
)
from flagos_backend.kernels.reference.index_arithmetic import Kept, row_major_strides
from flagos_backend.kernels.reference.registry import Kernel, Run, Storage, kernel
from flagos_backend.kernels.reference.scalar_functions import ScalarFunction, scalar_function
from flagos_backend.process.torch_loading import Tensor, torch

# Reduces the windows along one dimension: arrays in, one value for each window out.
Reduce = Callable[[Run, list[Tensor]], list[Tensor]]

_TRIVIAL = WindowDimension(1)
_SEQUENTIAL_LIMIT = 8  # windows of up to this many elements are reduced one after another


def window_count(size: int, window: WindowDimension) -> int:
    """How many windows fit along a dimension of ``size`` elements."""
    base = 0 if size == 0 else (size - 1) * window.base_dilation + 1
    padded = base + window.padding_low + window.padding_high
    extent = (window.size - 1) * window.window_dilation + 1
    return 0 if padded < extent else (padded - extent) // window.stride + 1


_GREATEST_PERIOD = 1 << 31


@dataclass(frozen=True, slots=True)
class _Covered:
    """What the windows along a dimension hold: window i the elements ``first[i]``, ``first[i] + step``, ...,
    ``count[i]`` of them. Padding and holes are left out, so there is never more than the dimension has."""

    first: Tensor
    count: Tensor
    step: int

    @property
    def greatest(self) -> int:
        return int(self.count.max()) if len(self.count) else 0

    def positions(self) -> Tensor:
        """[windows, greatest count]: the elements of each window in order, then -1."""
        number = torch.arange(self.greatest)
        return torch.where(number < self.count.unsqueeze(1), self.first.unsqueeze(1) + number * self.step, -1)


def _covered(size: int, window: WindowDimension) -> _Covered:
    """Place k of a window is at start + k * step and holds an element where a multiple of the base's dilation is: at
    one k among ``period`` ones, which a congruence gives. No work is proportional to a dilation, padding or size."""
    step, hole = window.window_dilation, window.base_dilation
    common = math.gcd(step, hole)
    period = hole // common
    inverse = pow(step // common, -1, period)
    if period > _GREATEST_PERIOD:  # products of two residues would overflow
        return _covered_one_by_one(size, window)
    start = torch.arange(window_count(size, window)) * window.stride - window.padding_low
    least = (-(start // step)).clamp(min=0)
    place = least + ((-start // common) % period * inverse - least) % period
    last = (((size - 1) * hole - start) // step).clamp(max=window.size - 1)
    count = ((last - place) // period + 1).clamp(min=0)
    count = torch.where(start % common == 0, count, 0) if size else torch.zeros_like(start)
    first = torch.where(count > 0, (start + place * step) // hole, 0)
    return _Covered(first, count, step // common)


def _covered_one_by_one(size: int, window: WindowDimension) -> _Covered:
    """The same for dilations of more than 32 bits, whose windows are few, in integers of any size."""
    step, hole = window.window_dilation, window.base_dilation
    common = math.gcd(step, hole)
    period = hole // common
    inverse = pow(step // common, -1, period)
    first, counts = [], []
    for number in range(window_count(size, window)):
        start = number * window.stride - window.padding_low
        least = max(-(start // step), 0)
        place = least + (-start // common * inverse - least) % period
        last = min(((size - 1) * hole - start) // step, window.size - 1)
        count = 0 if start % common or not size else max((last - place) // period + 1, 0)
        counts.append(count)
        first.append((start + place * step) // hole if count else 0)
    return _Covered(torch.tensor(first, dtype=torch.int64), torch.tensor(counts, dtype=torch.int64), step // common)


@dataclass(frozen=True, slots=True)
class _Axis:
    """The dimension being reduced, among ``rank``."""

    dimension: int
    rank: int

    def mask(self, flags: Tensor) -> Tensor | None:
        """``flags`` of the places along the axis, shaped to broadcast; None when none is set."""
        if not flags.any():
            return None
        shape = [1] * self.rank
        shape[self.dimension] = -1
        return flags.reshape(shape)

    def selection(self, elements: Tensor) -> Callable[[Tensor], Tensor]:
        """Takes the elements of these numbers; anything where a number is -1."""
        elements = elements.clamp(min=0)
        start, count, dimension = int(elements[0]), len(elements), self.dimension
        step = int(elements[1]) - start if count > 1 else 1
        if step > 0 and bool((elements == start + torch.arange(count) * step).all()):
            window = (slice(None),) * dimension + (slice(start, start + (count - 1) * step + 1, step),)
            return lambda array: array[window]
        kept = Kept(elements)
        return lambda array: array.index_select(dimension, kept.on(array.device))


def _joining(axis: _Axis, reducer: ScalarFunction, has_left: Tensor, has_right: Tensor) -> Callable[..., list[Tensor]]:
    """left ∘ right where both have a value, else the one that has."""
    keep_left = axis.mask(has_left & ~has_right)
    keep_right = axis.mask(has_right & ~has_left)

    def join(run: Run, left: list[Tensor], right: list[Tensor]) -> list[Tensor]:
        values = reducer(run, left + right)
        if keep_left is not None:
            values = [torch.where(keep_left, a, value) for a, value in zip(left, values, strict=True)]
        if keep_right is not None:
            values = [torch.where(keep_right, b, value) for b, value in zip(right, values, strict=True)]
        return [value.expand_as(a) for value, a in zip(values, left, strict=True)]

    return join


def _sequential_reduction(axis: _Axis, reducer: ScalarFunction, positions: Tensor) -> Reduce:
    """Window place by window place, in order."""
    columns = [column for column in positions.unbind(1) if (column >= 0).any()]
    first = axis.selection(columns[0])
    exists = columns[0] >= 0
    steps = []
    for column in columns[1:]:
        steps.append((axis.selection(column), _joining(axis, reducer, exists, column >= 0)))
        exists = exists | (column >= 0)

    def reduction(run: Run, arrays: list[Tensor]) -> list[Tensor]:
        result = [first(array) for array in arrays]
        for select, join in steps:
            result = join(run, result, [select(array) for array in arrays])
        return result

    return reduction


def _doubling_reduction(axis: _Axis, reducer: ScalarFunction, size: int, covered: _Covered) -> Reduce:
    """Reductions of 1, 2, 4, ... elements from every one on, put together by the binary digits of each window's
    count."""
    dimension = axis.dimension
    taken = torch.zeros_like(covered.count)
    parts: list[tuple[Callable[[Tensor], Tensor], Callable[..., list[Tensor]]] | None] = []
    for bit in range(covered.greatest.bit_length()):
        length = 1 << bit
        has_part = covered.count & length != 0
        last = size - 1 - (length - 1) * covered.step
        place = (covered.first + taken * covered.step).clamp(max=last)  # beyond it are windows without the part
        select, join = axis.selection(place), _joining(axis, reducer, taken > 0, has_part)
        parts.append((select, join) if has_part.any() else None)
        taken = taken + torch.where(has_part, length, 0)

    def reduction(run: Run, arrays: list[Tensor]) -> list[Tensor]:
        level = arrays
        result: list[Tensor] = []
        for bit, part in enumerate(parts):
            if bit:
                shift = (covered.step << bit) // 2
                count = level[0].shape[dimension] - shift
                left = [array.narrow(dimension, 0, count) for array in level]
                right = [array.narrow(dimension, shift, count) for array in level]
                level = [v.expand_as(a) for v, a in zip(reducer(run, left + right), left, strict=True)]
            if part is not None:
                select, join = part
                chosen = [select(array) for array in level]
                result = join(run, result, chosen) if result else chosen
        return result

    return reduction


def _prefix_scan(axis: _Axis, reducer: ScalarFunction, size: int, suffix: bool) -> Reduce:
    """Reductions of everything up to (from) each element, in log2(size) calls on the whole arrays."""
    dimension = axis.dimension

    def reduction(run: Run, arrays: list[Tensor]) -> list[Tensor]:
        shift = 1
        while shift < size:
            head = [array.narrow(dimension, 0, size - shift) for array in arrays]
            tail = [array.narrow(dimension, shift, size - shift) for array in arrays]
            joined = [v.expand_as(a) for v, a in zip(reducer(run, head + tail), head, strict=True)]
            kept = [array.narrow(dimension, size - shift if suffix else 0, shift) for array in arrays]
            pairs = zip(joined, kept, strict=True)
            arrays = [torch.cat((v, k) if suffix else (k, v), dim=dimension) for v, k in pairs]
            shift *= 2
        return arrays

    return reduction


def _padded_reduction(
    axis: _Axis, reducer: ScalarFunction, size: int, window: WindowDimension, identity: float
) -> Reduce:
    """Pads one array by the reducer's identity, so that every place of every window holds an element."""
    amounts = [0, 0] * (axis.rank - axis.dimension - 1) + [window.padding_low, window.padding_high]
    inner = _prepare_reduction(
        axis,
        reducer,
        size + window.padding_low + window.padding_high,
        WindowDimension(window.size, window.stride, window_dilation=window.window_dilation),
    )
    return lambda run, arrays: inner(run, [torch.constant_pad_nd(array, amounts, identity) for array in arrays])


def _prepare_reduction(axis: _Axis, reducer: ScalarFunction, size: int, window: WindowDimension) -> Reduce:
    if size > 1 and (is_prefix(size, window) or is_suffix(size, window)):
        return _prefix_scan(axis, reducer, size, suffix=is_suffix(size, window))
    covered = _covered(size, window)
    if covered.greatest <= _SEQUENTIAL_LIMIT:
        return _sequential_reduction(axis, reducer, covered.positions())
    return _doubling_reduction(axis, reducer, size, covered)


@kernel(Opcode.REDUCE_WINDOW, storage=Storage.SHARED)
def prepare_reduce_window(instruction: Instruction) -> Kernel:
    """Operands: n arrays, n initial values; called[0] combines. Places outside an array are skipped, so the initial
    value enters each window once, as on XLA."""
    window = instruction.attributes_as(WindowAttributes).window
    count = len(instruction.operands) // 2
    shape = instruction.operands[0].shape
    assert isinstance(shape, ArrayShape)
    result_dims = tuple(window_count(size, w) for size, w in zip(shape.dims, window, strict=True))

    def initial_only(run: Run, *operands: Tensor) -> Tensor | tuple[Tensor, ...]:
        results = tuple(initial.expand(result_dims) for initial in operands[count:])
        return results[0] if count == 1 else results

    occupied = [_covered(size, w).count > 0 for size, w in zip(shape.dims, window, strict=True)]
    if not all(bool(flags.any()) for flags in occupied):
        return initial_only
    reducer = scalar_function(instruction.called[0])
    reductions: list[Reduce] = []
    running = prepare_running(instruction)
    if running is not None:
        reductions.append(lambda run, arrays: [running(arrays[0])])
    else:
        identity = identity_of(combine_of(instruction.called[0]), shape.element_type) if count == 1 else None
        for d in reversed(range(shape.rank)):
            axis, size, w = _Axis(d, shape.rank), shape.dims[d], window[d]
            padding = abs(w.padding_low) + abs(w.padding_high)
            small = padding <= size + result_dims[d]
            if identity is not None and w.base_dilation == 1 and padding and small:
                reductions.append(_padded_reduction(axis, reducer, size, w, identity))
            elif w != _TRIVIAL:
                reductions.append(_prepare_reduction(axis, reducer, size, w))
    empty_masks = [_Axis(d, shape.rank).mask(~flags) for d, flags in enumerate(occupied)]
    masks = [mask for mask in empty_masks if mask is not None]
    skip_initial = starts_with_identity(instruction)

    def run_windows(run: Run, *operands: Tensor) -> Tensor | tuple[Tensor, ...]:
        arrays, initials = list(operands[:count]), list(operands[count:])
        for reduction in reductions:
            arrays = reduction(run, arrays)
        if not skip_initial:
            arrays = [v.expand(result_dims) for v in reducer(run, initials + arrays)]
        for mask in masks:
            arrays = [torch.where(mask, initial, a) for initial, a in zip(initials, arrays, strict=True)]
        return arrays[0] if count == 1 else tuple(arrays)

    return run_windows


@kernel(Opcode.SELECT_AND_SCATTER, storage=Storage.FRESH)
def prepare_select_and_scatter(instruction: Instruction) -> Kernel:
    """Operands: array, source, initial value. called[0](a, b): whether a stays chosen over b; called[1] combines."""
    window = instruction.attributes_as(WindowAttributes).window
    shape = instruction.operands[0].shape
    assert isinstance(shape, ArrayShape)
    tables = [_covered(size, w).positions() for size, w in zip(shape.dims, window, strict=True)]
    dims = shape.dims
    if any(len(table) == 0 for table in tables):  # no windows
        return lambda run, _, source, initial: initial.expand(dims).clone(memory_format=torch.contiguous_format)
    axes = [_Axis(d, shape.rank) for d in range(shape.rank)]
    places = [
        (
            [axes[d].selection(tables[d][:, k]) for d, k in enumerate(place)],
            _outside(axes, [tables[d][:, k] for d, k in enumerate(place)]),
        )
        for place in itertools.product(*(range(table.shape[1]) for table in tables))
    ]
    elements = Kept(torch.stack(_window_places(tables, shape.dims)) if places else torch.empty(0))
    select = scalar_function(instruction.called[0])
    combiner = prepare_combiner(instruction.called[1], (shape.element_type,), unique=False)

    def choose(launch: Run, operand: Tensor, dims: torch.Size) -> Tensor:
        """The number of the chosen place of each window, -1 where a window has no element."""
        chosen = torch.full(dims, -1, dtype=torch.int64, device=operand.device)
        current = operand.new_zeros(dims)
        for number, (selections, outside) in enumerate(places):
            candidate = operand
            for selection in selections:
                candidate = selection(candidate)
            replace = ~(select(launch, [current, candidate])[0] & (chosen >= 0))
            if outside is not None:
                replace = replace & ~outside.on(operand.device)
            chosen = torch.where(replace, number, chosen)
            current = torch.where(replace, candidate, current)
        return chosen

    def run(launch: Run, operand: Tensor, source: Tensor, initial: Tensor) -> Tensor:
        target = initial.expand(shape.dims).clone(memory_format=torch.contiguous_format)
        if source.numel() == 0 or operand.numel() == 0:
            return target
        chosen = choose(launch, operand, source.shape).reshape(1, -1)
        rows = elements.on(operand.device).gather(0, chosen.clamp(min=0)).squeeze(0)
        combiner.apply(launch, [target.view(-1, 1)], rows, [source.reshape(-1, 1)], chosen.squeeze(0) >= 0)
        return target

    return run


def _outside(axes: Sequence[_Axis], columns: Sequence[Tensor]) -> Kept | None:
    """Where a place of the window holds no element, to broadcast over the windows; None when it always does."""
    masks = [mask for axis, column in zip(axes, columns, strict=True) if (mask := axis.mask(column < 0)) is not None]
    return Kept(functools.reduce(torch.logical_or, masks)) if masks else None


def _window_places(tables: Sequence[Tensor], dims: tuple[int, ...]) -> list[Tensor]:
    """For each place in the window, in row-major order, the linear element under it in every window, or -1."""
    strides = row_major_strides(dims)
    places = []
    for place in itertools.product(*(range(table.shape[1]) for table in tables)):
        linear = torch.zeros((), dtype=torch.int64)
        inside = torch.ones((), dtype=torch.bool)
        for d, (table, k) in enumerate(zip(tables, place, strict=True)):
            column = table[:, k].reshape((-1,) + (1,) * (len(tables) - d - 1))
            linear = linear + column * strides[d]
            inside = inside & (column >= 0)
        places.append(torch.where(inside, linear, -1).reshape(-1))
    return places
