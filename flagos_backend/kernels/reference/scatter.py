"""Scatter in full generality. A window of which any part lies out of bounds is dropped whole, as XLA does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod

from flagos_backend.ir.attributes import ScatterAttributes
from flagos_backend.ir.hlo import Instruction
from flagos_backend.ir.opcode import Opcode
from flagos_backend.ir.types import ArrayShape, ElementType
from flagos_backend.kernels.reference.combining import Combiner, prepare_combiner
from flagos_backend.kernels.reference.computations import returned_parameter
from flagos_backend.kernels.reference.index_arithmetic import WindowOffsets, index_values, row_major_strides
from flagos_backend.kernels.reference.registry import InPlaceKernel, Kernel, Run, Storage, in_place, kernel
from flagos_backend.process.torch_loading import Tensor, torch

# Updates row-major targets, which it may write over.
Update = Callable[[Run, list[Tensor], Tensor, list[Tensor]], None]


@dataclass(frozen=True, slots=True)
class ScatterPlan:
    """What a scatter's attributes and shapes come to.

    ``indexed``: operand dimensions that indices or batching choose; ``limits`` the greatest valid start in each.
    ``sizes``: the update window's size in each operand dimension. ``to_rows`` brings an update's dimensions into the
    order batch, then window.
    """

    operand_dims: tuple[int, ...]
    batch_dims: tuple[int, ...]
    sizes: tuple[int, ...]
    indexed: tuple[int, ...]
    limits: tuple[int, ...]
    batch_sources: tuple[int, ...]
    index_vector_dim: int
    to_rows: tuple[int, ...]
    index_type: ElementType

    @property
    def num_windows(self) -> int:
        return prod(self.batch_dims)


def plan_scatter(
    attributes: ScatterAttributes, operand: ArrayShape, indices: ArrayShape, update: ArrayShape
) -> ScatterPlan:
    """Reads the attributes once. Shapes are as the verifier has checked them."""
    indexed = attributes.scatter_dims_to_operand_dims + attributes.input_batching_dims
    inserted = frozenset(attributes.inserted_window_dims) | frozenset(attributes.input_batching_dims)
    window_sizes = iter(update.dims[d] for d in attributes.update_window_dims)
    sizes = tuple(1 if d in inserted else next(window_sizes) for d in range(operand.rank))
    vector_dim = attributes.index_vector_dim
    batch_positions = tuple(d for d in range(update.rank) if d not in attributes.update_window_dims)
    return ScatterPlan(
        operand_dims=operand.dims,
        batch_dims=tuple(size for d, size in enumerate(indices.dims) if d != vector_dim),
        sizes=sizes,
        indexed=indexed,
        limits=tuple(operand.dims[d] - sizes[d] for d in indexed),
        batch_sources=tuple(d - (d > vector_dim) for d in attributes.scatter_indices_batching_dims),
        index_vector_dim=vector_dim,
        to_rows=batch_positions + attributes.update_window_dims,
        index_type=indices.element_type,
    )


def _starts(plan: ScatterPlan, indices: Tensor) -> tuple[list[Tensor], Tensor | None]:
    """Start positions for each dimension of ``plan.indexed``, flat over the windows, and which windows are valid (None
    when no index can be out of bounds)."""
    if not plan.indexed:  # there may be no indices at all
        return [], None
    values = index_values(indices, plan.index_type)
    vectors = [values] if plan.index_vector_dim == indices.dim() else list(values.unbind(plan.index_vector_dim))
    valid: Tensor | None = None
    for vector, limit in zip(vectors, plan.limits, strict=False):
        inside = (vector >= 0) & (vector <= limit)
        valid = inside if valid is None else valid & inside
    for source in plan.batch_sources:
        shape = [1] * len(plan.batch_dims)
        shape[source] = plan.batch_dims[source]
        vectors.append(
            torch.arange(plan.batch_dims[source], device=indices.device).reshape(shape).expand(plan.batch_dims)
        )
    return [vector.reshape(-1) for vector in vectors], None if valid is None else valid.reshape(-1)


def _linear(starts: list[Tensor], strides: tuple[int, ...], count: int, device: torch.device) -> Tensor:
    total = torch.zeros(count, dtype=torch.int64, device=device)
    for start, stride in zip(starts, strides, strict=True):
        total += start * stride
    return total


def _update_rows(plan: ScatterPlan, combiner: Combiner) -> Update:
    """Windows that are whole rows: the indexed dimensions lead and each is met one position at a time."""
    rows = prod(plan.operand_dims[: len(plan.indexed)])
    width = prod(plan.operand_dims[len(plan.indexed) :])
    row_strides = row_major_strides(plan.operand_dims[: len(plan.indexed)])
    strides = tuple(row_strides[d] for d in plan.indexed)

    def update(run: Run, targets: list[Tensor], indices: Tensor, updates: list[Tensor]) -> None:
        starts, valid = _starts(plan, indices)
        positions = _linear(starts, strides, plan.num_windows, targets[0].device)
        values = [u.permute(plan.to_rows).reshape(-1, width) for u in updates]
        combiner.apply(run, [t.view(rows, width) for t in targets], positions, values, valid)

    return update


def _update_elements(plan: ScatterPlan, combiner: Combiner) -> Update:
    """Any windows, element by element."""
    strides = row_major_strides(plan.operand_dims)
    offsets = WindowOffsets(plan.sizes, strides)
    indexed_strides = tuple(strides[d] for d in plan.indexed)

    def update(run: Run, targets: list[Tensor], indices: Tensor, updates: list[Tensor]) -> None:
        starts, valid = _starts(plan, indices)
        first = _linear(starts, indexed_strides, plan.num_windows, targets[0].device)
        values = [u.permute(plan.to_rows).reshape(plan.num_windows, -1) for u in updates]
        if valid is not None and not run.asynchronous and not valid.all():  # before there is one for each element
            first, values, valid = first[valid], [v[valid] for v in values], None
        positions = first.unsqueeze(1) + offsets.on(first.device)
        elements = None if valid is None else valid.unsqueeze(1).expand_as(positions).reshape(-1)
        values = [v.reshape(-1, 1) for v in values]
        combiner.apply(run, [t.view(-1, 1) for t in targets], positions.reshape(-1), values, elements)

    return update


def _update_one(plan: ScatterPlan, combiner: Combiner, assigns: bool) -> Update:
    """A single window: a slice at a run-time position."""
    without_waiting = _update_elements(plan, combiner)

    def update(run: Run, targets: list[Tensor], indices: Tensor, updates: list[Tensor]) -> None:
        if run.asynchronous:
            without_waiting(run, targets, indices, updates)
            return
        starts, valid = _starts(plan, indices)
        if valid is not None and not valid:
            return
        windows = targets
        for d, start in zip(plan.indexed, [int(s) for s in starts], strict=True):
            windows = [w.narrow(d, start, plan.sizes[d]) for w in windows]
        for d, size in enumerate(plan.sizes):  # a window may be smaller than a dimension that no index moves it in
            windows = [w.narrow(d, 0, size) for w in windows]
        values = [u.permute(plan.to_rows).reshape(plan.sizes) for u in updates]
        if not assigns:
            values = combiner.function(run, windows + values)
        for window, value in zip(windows, values, strict=True):
            window.copy_(value)

    return update


def _prepare(instruction: Instruction) -> tuple[int, Update]:
    """The number of arrays, and what updates them."""
    count = (len(instruction.operands) - 1) // 2
    shapes = [operand.shape for operand in instruction.operands]
    arrays = [shape for shape in shapes if isinstance(shape, ArrayShape)]
    assert len(arrays) == len(shapes)
    attributes = instruction.attributes_as(ScatterAttributes)
    plan = plan_scatter(attributes, arrays[0], arrays[count], arrays[count + 1])
    computation = instruction.called[0]
    if arrays[0].num_elements == 0 or arrays[count + 1].num_elements == 0:
        return count, lambda run, targets, indices, updates: None
    unique = attributes.unique_indices
    whole = all(size == (1 if d in plan.indexed else plan.operand_dims[d]) for d, size in enumerate(plan.sizes))
    leading = sorted(plan.indexed) == list(range(len(plan.indexed)))
    combiner = prepare_combiner(computation, tuple(a.element_type for a in arrays[:count]), unique)
    if plan.num_windows == 1:
        return count, _update_one(plan, combiner, count == 1 and returned_parameter(computation) == 1)
    return count, (_update_rows if whole and leading else _update_elements)(plan, combiner)


@kernel(Opcode.SCATTER, storage=Storage.FRESH)
def prepare_scatter(instruction: Instruction) -> Kernel:
    count, update = _prepare(instruction)

    def run(launch: Run, *operands: Tensor) -> Tensor | tuple[Tensor, ...]:
        targets = [array.clone(memory_format=torch.contiguous_format) for array in operands[:count]]
        update(launch, targets, operands[count], list(operands[count + 1 :]))
        return targets[0] if count == 1 else tuple(targets)

    return run


@in_place(Opcode.SCATTER)
def prepare_scatter_in_place(instruction: Instruction) -> InPlaceKernel:
    count, update = _prepare(instruction)

    def run(launch: Run, *operands: Tensor) -> Tensor | tuple[Tensor, ...]:
        arrays = operands[:count]
        targets = [array.contiguous() for array in arrays]
        update(launch, targets, operands[count], list(operands[count + 1 :]))
        for array, target in zip(arrays, targets, strict=True):
            if target is not array:
                array.copy_(target)
        return arrays[0] if count == 1 else arrays

    return InPlaceKernel(run, tuple(range(count)))
