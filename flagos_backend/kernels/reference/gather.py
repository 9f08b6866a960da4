"""Gather in full generality. Start indices are clamped so that every window lies inside the operand, as XLA does."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from flagos_backend.ir.attributes import GatherAttributes
from flagos_backend.ir.hlo import Instruction
from flagos_backend.ir.opcode import Opcode
from flagos_backend.ir.types import ArrayShape, ElementType
from flagos_backend.kernels.reference.index_arithmetic import WindowOffsets, index_values, row_major_strides
from flagos_backend.kernels.reference.registry import Kernel, Run, Storage, kernel
from flagos_backend.process.torch_loading import Tensor, torch


@dataclass(frozen=True, slots=True)
class GatherPlan:
    """What a gather's attributes and shapes come to.

    ``indexed``: operand dimensions that start indices or batching choose; ``limits`` the greatest start in each.
    ``batch_sources``: for each trailing entry of ``indexed`` the batch dimension of the indices that it runs along.
    """

    operand_dims: tuple[int, ...]
    batch_dims: tuple[int, ...]
    sizes: tuple[int, ...]
    indexed: tuple[int, ...]
    limits: tuple[int, ...]
    batch_sources: tuple[int, ...]
    index_vector_dim: int
    window_dims: tuple[int, ...]
    to_result: tuple[int, ...]
    result_dims: tuple[int, ...]
    index_type: ElementType


def plan_gather(
    attributes: GatherAttributes, operand: ArrayShape, indices: ArrayShape, result: ArrayShape
) -> GatherPlan:
    """Reads the attributes once. Shapes are as the verifier has checked them."""
    indexed = attributes.start_index_map + attributes.operand_batching_dims
    dropped = frozenset(attributes.collapsed_slice_dims) | frozenset(attributes.operand_batching_dims)
    window_dims = tuple(d for d in range(operand.rank) if d not in dropped)
    batch_positions = tuple(d for d in range(result.rank) if d not in attributes.offset_dims)
    produced = batch_positions + attributes.offset_dims
    vector_dim = attributes.index_vector_dim
    return GatherPlan(
        operand_dims=operand.dims,
        batch_dims=tuple(size for d, size in enumerate(indices.dims) if d != vector_dim),
        sizes=attributes.slice_sizes,
        indexed=indexed,
        limits=tuple(operand.dims[d] - attributes.slice_sizes[d] for d in indexed),
        batch_sources=tuple(d - (d > vector_dim) for d in attributes.start_indices_batching_dims),
        index_vector_dim=vector_dim,
        window_dims=window_dims,
        to_result=tuple(produced.index(d) for d in range(result.rank)),
        result_dims=result.dims,
        index_type=indices.element_type,
    )


def clamped_starts(plan: GatherPlan, indices: Tensor) -> list[Tensor]:
    """For each dimension of ``plan.indexed`` the start positions, int64, broadcastable to the batch dimensions."""
    values = index_values(indices, plan.index_type)
    vectors = [values] if plan.index_vector_dim == indices.dim() else list(values.unbind(plan.index_vector_dim))
    starts = [v.clamp(0, limit) for v, limit in zip(vectors, plan.limits, strict=False)]
    for source in plan.batch_sources:
        shape = [1] * len(plan.batch_dims)
        shape[source] = plan.batch_dims[source]
        starts.append(torch.arange(plan.batch_dims[source], device=indices.device).reshape(shape))
    return starts


def _linear(plan: GatherPlan, indices: Tensor, strides: list[int]) -> Tensor:
    """Flat batch of linear positions."""
    total: Tensor | int = 0
    for start, stride in zip(clamped_starts(plan, indices), strides, strict=True):
        total = start * stride + total
    if isinstance(total, int):
        return torch.full((prod(plan.batch_dims),), total, device=indices.device)
    return total.expand(plan.batch_dims).reshape(-1)


def _gather_rows(plan: GatherPlan) -> Kernel:
    """Whole rows: the indexed dimensions lead, each taken one position at a time, every other one in full."""
    rows = prod(plan.operand_dims[d] for d in plan.indexed)
    row_strides = row_major_strides(plan.operand_dims[: len(plan.indexed)])
    strides = [row_strides[d] for d in plan.indexed]
    shape = plan.batch_dims + tuple(plan.sizes[d] for d in plan.window_dims)

    def run(_: Run, operand: Tensor, indices: Tensor) -> Tensor:
        positions = _linear(plan, indices, strides)
        return operand.reshape(rows, -1).index_select(0, positions).reshape(shape).permute(plan.to_result)

    return run


def _gather_along_one(plan: GatherPlan) -> Kernel:
    """One indexed dimension, anywhere, taken one position at a time, every other one in full."""
    dimension = plan.indexed[0]
    shape = plan.batch_dims + tuple(plan.sizes[d] for d in plan.window_dims)

    def run(_: Run, operand: Tensor, indices: Tensor) -> Tensor:
        positions = _linear(plan, indices, [1])
        taken = operand.index_select(dimension, positions)
        return taken.movedim(dimension, 0).reshape(shape).permute(plan.to_result)

    return run


def _gather_one(plan: GatherPlan) -> Kernel:
    """A single window: a slice at a run-time position."""
    without_waiting = _gather_elements(plan)

    def run(run: Run, operand: Tensor, indices: Tensor) -> Tensor:
        if run.asynchronous:
            found: Tensor = without_waiting(run, operand, indices)
            return found
        window = operand
        for d, start in zip(plan.indexed, clamped_starts(plan, indices), strict=True):
            window = window.narrow(d, int(start), plan.sizes[d])
        for d, size in enumerate(plan.sizes):  # a window may be smaller than a dimension that no index moves it in
            window = window.narrow(d, 0, size)
        window = window.reshape(plan.batch_dims + tuple(plan.sizes[d] for d in plan.window_dims))
        return window.permute(plan.to_result).clone(memory_format=torch.contiguous_format)

    return run


def _gather_elements(plan: GatherPlan) -> Kernel:
    """Any windows, element by element."""
    strides = row_major_strides(plan.operand_dims)
    indexed_strides = [strides[d] for d in plan.indexed]
    window_sizes = tuple(plan.sizes[d] for d in plan.window_dims)
    offsets = WindowOffsets(window_sizes, tuple(strides[d] for d in plan.window_dims))

    def run(_: Run, operand: Tensor, indices: Tensor) -> Tensor:
        starts = _linear(plan, indices, indexed_strides)
        positions = starts.unsqueeze(1) + offsets.on(starts.device)
        taken = operand.reshape(-1).index_select(0, positions.reshape(-1))
        return taken.reshape(plan.batch_dims + window_sizes).permute(plan.to_result)

    return run


@kernel(Opcode.GATHER, storage=Storage.FRESH)
def prepare_gather(instruction: Instruction) -> Kernel:
    operand, indices = (o.shape for o in instruction.operands)
    result = instruction.shape
    assert isinstance(operand, ArrayShape)
    assert isinstance(indices, ArrayShape)
    assert isinstance(result, ArrayShape)
    plan = plan_gather(instruction.attributes_as(GatherAttributes), operand, indices, result)
    if result.num_elements == 0:
        return lambda run, array, positions: array.new_empty(result.dims)
    if prod(plan.batch_dims) == 1:
        return _gather_one(plan)
    whole = all(size == (1 if d in plan.indexed else plan.operand_dims[d]) for d, size in enumerate(plan.sizes))
    if whole and sorted(plan.indexed) == list(range(len(plan.indexed))):
        return _gather_rows(plan)
    return _gather_along_one(plan) if whole and len(plan.indexed) == 1 else _gather_elements(plan)
