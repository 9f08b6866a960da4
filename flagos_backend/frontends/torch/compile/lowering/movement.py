"""Views and data movement. Values have no strides here: a view is a reshape, transpose, slice or broadcast."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from flagos_backend.frontends.torch.compile.errors import NoLoweringError
from flagos_backend.frontends.torch.compile.lowering.emitter import Emitter, array, element_type
from flagos_backend.frontends.torch.compile.lowering.table import lowering
from flagos_backend.ir.attributes import DimensionAttributes, DimensionsAttributes, PadAttributes, SliceAttributes
from flagos_backend.ir.hlo import Instruction
from flagos_backend.ir.opcode import Opcode
from flagos_backend.ir.types import ElementType

aten = torch.ops.aten


@lowering(aten.alias.default, aten.clone.default, aten.detach.default, aten.lift_fresh_copy.default)
def _identity(emitter: Emitter, result: torch.Tensor, x: Instruction, **_: Any) -> Instruction:
    return x


@lowering(
    aten.view.default,
    aten._unsafe_view.default,
    aten.reshape.default,
    aten._reshape_alias.default,
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.unsqueeze.default,
)
def _reshape(emitter: Emitter, result: torch.Tensor, x: Instruction, *_: Any, **__: Any) -> Instruction:
    return emitter.reshape(x, tuple(result.shape))


@lowering(aten.expand.default)
def _expand(emitter: Emitter, result: torch.Tensor, x: Instruction, *_: Any, **__: Any) -> Instruction:
    return emitter.expand(x, tuple(result.shape))


@lowering(aten.copy.default)
def _copy(emitter: Emitter, result: torch.Tensor, _: Instruction, source: Instruction, *__: Any) -> Instruction:
    return emitter.expand(emitter.cast(source, result), tuple(result.shape))


@lowering(aten.permute.default)
def _permute(emitter: Emitter, result: torch.Tensor, x: Instruction, dims: Sequence[int]) -> Instruction:
    rank = array(x).rank
    return emitter.transpose(x, [d % rank for d in dims])


@lowering(aten.transpose.int)
def _transpose(emitter: Emitter, result: torch.Tensor, x: Instruction, first: int, second: int) -> Instruction:
    order = list(range(array(x).rank))
    if order:
        order[first], order[second] = order[second], order[first]
    return emitter.transpose(x, order)


@lowering(aten.t.default)
def _t(emitter: Emitter, result: torch.Tensor, x: Instruction) -> Instruction:
    return emitter.transpose(x, list(range(array(x).rank))[::-1])


def cut(emitter: Emitter, x: Instruction, dim: int, start: int, stop: int, step: int = 1) -> Instruction:
    dims = array(x).dims
    if (start, stop, step) == (0, dims[dim], 1):
        return x
    starts, limits, strides = [0] * len(dims), list(dims), [1] * len(dims)
    starts[dim], limits[dim], strides[dim] = start, stop, step
    return emitter.builder.add(Opcode.SLICE, [x], SliceAttributes(tuple(starts), tuple(limits), tuple(strides)))


@lowering(aten.slice.Tensor)
def _slice(
    emitter: Emitter,
    result: torch.Tensor,
    x: Instruction,
    dim: int = 0,
    start: int | None = None,
    end: int | None = None,
    step: int = 1,
) -> Instruction:
    dim %= array(x).rank
    first, last, _ = slice(start, end).indices(array(x).dims[dim])
    return cut(emitter, x, dim, first, max(first, last), step)


@lowering(aten.select.int)
def _select(emitter: Emitter, result: torch.Tensor, x: Instruction, dim: int, index: int) -> Instruction:
    dim %= array(x).rank
    index %= array(x).dims[dim]
    return emitter.reshape(cut(emitter, x, dim, index, index + 1), tuple(result.shape))


def _parts(emitter: Emitter, x: Instruction, dim: int, sizes: Sequence[int]) -> list[Instruction]:
    dim %= array(x).rank
    parts, start = [], 0
    for size in sizes:
        parts.append(cut(emitter, x, dim, start, start + size))
        start += size
    return parts


@lowering(aten.split.Tensor)
def _split(emitter: Emitter, result: Sequence[torch.Tensor], x: Instruction, size: int, dim: int = 0) -> list[Any]:
    return _parts(emitter, x, dim, [part.shape[dim] for part in result])


@lowering(aten.split_with_sizes.default)
def _split_with_sizes(
    emitter: Emitter, result: Sequence[torch.Tensor], x: Instruction, sizes: Sequence[int], dim: int = 0
) -> list[Any]:
    return _parts(emitter, x, dim, sizes)


@lowering(aten.unbind.int)
def _unbind(emitter: Emitter, result: Sequence[torch.Tensor], x: Instruction, dim: int = 0) -> list[Any]:
    parts = _parts(emitter, x, dim, [1] * len(result))
    return [emitter.reshape(part, tuple(tensor.shape)) for part, tensor in zip(parts, result, strict=True)]


@lowering(aten.cat.default)
def _cat(emitter: Emitter, result: torch.Tensor, tensors: Sequence[Instruction], dim: int = 0) -> Instruction:
    kind = element_type(result)
    # An empty vector joins arrays of any rank, for history's sake.
    parts = [emitter.convert(x, kind) for x in tensors if array(x).dims != (0,) or result.dim() == 1]
    if not parts:
        raise NoLoweringError("there is nothing to join")
    if len(parts) == 1:
        return parts[0]
    return emitter.builder.add(Opcode.CONCATENATE, parts, DimensionAttributes(dim % result.dim()))


@lowering(aten.stack.default)
def _stack(emitter: Emitter, result: torch.Tensor, tensors: Sequence[Instruction], dim: int = 0) -> Instruction:
    dims = list(result.shape)
    dims[dim % result.dim()] = 1
    parts = [emitter.reshape(emitter.convert(x, element_type(result)), dims) for x in tensors]
    if len(parts) == 1:
        return parts[0]
    return emitter.builder.add(Opcode.CONCATENATE, parts, DimensionAttributes(dim % result.dim()))


@lowering(aten.flip.default)
def _flip(emitter: Emitter, result: torch.Tensor, x: Instruction, dims: Sequence[int]) -> Instruction:
    rank = array(x).rank
    reversed_dims = tuple(sorted({d % rank for d in dims})) if rank else ()
    return emitter.builder.add(Opcode.REVERSE, [x], DimensionsAttributes(reversed_dims)) if reversed_dims else x


@lowering(aten.roll.default)
def _roll(
    emitter: Emitter, result: torch.Tensor, x: Instruction, shifts: Sequence[int], dims: Sequence[int] = ()
) -> Instruction:
    if not dims:  # of the elements in order
        x = _roll(emitter, result, emitter.reshape(x, (array(x).num_elements,)), shifts, (0,))
        return emitter.reshape(x, tuple(result.shape))
    for shift, dim in zip(shifts, dims, strict=True):
        size = array(x).dims[dim]
        if size and shift % size:
            parts = _parts(emitter, x, dim, [size - shift % size, shift % size])[::-1]
            x = emitter.builder.add(Opcode.CONCATENATE, parts, DimensionAttributes(dim % array(x).rank))
    return x


@lowering(aten.repeat.default)
def _repeat(emitter: Emitter, result: torch.Tensor, x: Instruction, repeats: Sequence[int]) -> Instruction:
    own = (1,) * (len(repeats) - array(x).rank) + array(x).dims
    each = [size for pair in zip(repeats, own, strict=True) for size in pair]
    x = emitter.reshape(x, [size for own_size in own for size in (1, own_size)])
    return emitter.reshape(emitter.expand(x, each), tuple(result.shape))


@lowering(aten.slice_scatter.default)
def _slice_scatter(
    emitter: Emitter,
    result: torch.Tensor,
    x: Instruction,
    source: Instruction,
    dim: int = 0,
    start: int | None = None,
    end: int | None = None,
    step: int = 1,
) -> Instruction:
    if step != 1:
        raise NoLoweringError("only what lies side by side is one update")
    first, _, _ = slice(start, end).indices(array(x).dims[dim])
    return _update(emitter, x, source, dim, first)


@lowering(aten.select_scatter.default)
def _select_scatter(
    emitter: Emitter, result: torch.Tensor, x: Instruction, source: Instruction, dim: int, index: int
) -> Instruction:
    line = list(array(x).dims)
    line[dim] = 1
    return _update(emitter, x, emitter.reshape(source, line), dim, index % array(x).dims[dim])


def _update(emitter: Emitter, x: Instruction, source: Instruction, dim: int, first: int) -> Instruction:
    """``x`` with ``source`` in it, from ``first`` on along ``dim``."""
    source = emitter.convert(source, array(x).element_type)
    if array(source).dims == array(x).dims:
        return source
    if not array(source).num_elements:
        return x
    dim %= array(x).rank
    starts = [emitter.scalar(first if number == dim else 0, ElementType.S32) for number in range(array(x).rank)]
    return emitter.add(Opcode.DYNAMIC_UPDATE_SLICE, x, source, *starts)


@lowering(aten.constant_pad_nd.default)
def _constant_pad(
    emitter: Emitter, result: torch.Tensor, x: Instruction, padding: Sequence[int], value: float = 0
) -> Instruction:
    emitter.refuse_overflow(value, element_type(result))
    rank = array(x).rank
    low, high = [0] * rank, [0] * rank
    for i in range(len(padding) // 2):
        low[rank - 1 - i], high[rank - 1 - i] = padding[2 * i], padding[2 * i + 1]
    attributes = PadAttributes(tuple(low), tuple(high), (0,) * rank)
    return emitter.builder.add(Opcode.PAD, [x, emitter.scalar(value, element_type(result))], attributes)


@lowering(aten.slice_backward.default)
def _slice_backward(
    emitter: Emitter,
    result: torch.Tensor,
    gradient: Instruction,
    sizes: Sequence[int],
    dim: int,
    start: int,
    end: int,
    step: int,
) -> Instruction:
    dim %= result.dim()
    first, _, _ = slice(start, end).indices(sizes[dim])
    return _spread(emitter, result, gradient, dim, first, step)


@lowering(aten.select_backward.default)
def _select_backward(
    emitter: Emitter, result: torch.Tensor, gradient: Instruction, sizes: Sequence[int], dim: int, index: int
) -> Instruction:
    dim %= result.dim()
    line = [1 if number == dim else size for number, size in enumerate(result.shape)]
    return _spread(emitter, result, emitter.reshape(gradient, line), dim, index % sizes[dim], 1)


def _spread(emitter: Emitter, result: torch.Tensor, part: Instruction, dim: int, first: int, step: int) -> Instruction:
    """Zeros of the shape of ``result`` with ``part`` at every ``step``-th place of ``dim`` from ``first`` on."""
    count, zeros = array(part).dims[dim], (0,) * result.dim()
    between = step - 1 if count > 1 else 0
    low, high, interior = list(zeros), list(zeros), list(zeros)
    low[dim], interior[dim] = first, between
    high[dim] = result.shape[dim] - first - count - between * max(count - 1, 0)
    attributes = PadAttributes(tuple(low), tuple(high), tuple(interior))
    return emitter.builder.add(Opcode.PAD, [part, emitter.scalar(0, element_type(result))], attributes)
