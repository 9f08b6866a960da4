"""Sort with any comparator, and top-k. Comparators that order by keys go to torch's stable sort; any other one runs a
bitonic network whose exchanges evaluate it on whole arrays."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from flagos_backend.ir.attributes import SortAttributes, TopKAttributes
from flagos_backend.ir.hlo import Computation, Instruction, parameter_number
from flagos_backend.ir.opcode import Opcode
from flagos_backend.ir.sort_keys import SortKey, sort_keys
from flagos_backend.ir.types import ArrayShape, ElementType, TupleShape
from flagos_backend.kernels.reference.ordering import total_order
from flagos_backend.kernels.reference.registry import Kernel, Run, Storage, kernel
from flagos_backend.kernels.reference.scalar_functions import ScalarFunction, scalar_function
from flagos_backend.process.torch_loading import Tensor, torch

# Computes a key, as torch orders it, from the operands.
KeyFunction = Callable[[Run, Sequence[Tensor]], Tensor]


def _key_function(key: SortKey, comparator: Computation) -> KeyFunction:
    element_type = key.element_type
    # NaN has no place in IEEE's partial order; torch puts it last, which is as good as any.
    as_is = not key.total and element_type.is_float and element_type.bits > 8
    number = parameter_number(key.expression)
    if number is not None:
        operand = number // 2
        if as_is:
            return lambda run, operands: operands[operand]
        return lambda run, operands: total_order(operands[operand], element_type)
    body = Computation(f"{comparator.name}.key", _ancestors(key.expression, comparator), key.expression)
    function = scalar_function(body)

    def compute(run: Run, operands: Sequence[Tensor]) -> Tensor:
        arguments = [operand for operand in operands for _ in range(2)]
        value = function(run, arguments)[0].expand_as(operands[0])
        return value if as_is else total_order(value, element_type)

    return compute


def _ancestors(root: Instruction, computation: Computation) -> tuple[Instruction, ...]:
    """What ``root`` needs, and every parameter, in the computation's order."""
    needed = {id(root)}
    for instruction in reversed(computation.instructions):
        if id(instruction) in needed:
            needed.update(id(operand) for operand in instruction.operands)
    return tuple(i for i in computation.instructions if id(i) in needed or i.opcode is Opcode.PARAMETER)


def _sort_by_keys(keys: Sequence[SortKey], comparator: Computation, dimension: int) -> Kernel:
    """Stable sorts from the least significant key to the most significant one."""
    functions = [(_key_function(key, comparator), key.descending) for key in reversed(keys)]

    def permutation(run: Run, operands: Sequence[Tensor]) -> Tensor:
        order: Tensor | None = None
        for function, descending in functions:
            key = function(run, operands)
            if order is not None:
                key = key.gather(dimension, order)
            indices = key.sort(dim=dimension, stable=True, descending=descending).indices
            order = indices if order is None else order.gather(dimension, indices)
        assert order is not None
        return order

    def sort_several(run: Run, *operands: Tensor) -> tuple[Tensor, ...]:
        order = permutation(run, operands)
        return tuple(operand.gather(dimension, order) for operand in operands)

    def sort_one(run: Run, operand: Tensor) -> Tensor:
        return operand.gather(dimension, permutation(run, (operand,)))

    return sort_one if len(comparator.parameters) == 2 else sort_several


def _exchange(
    less: ScalarFunction, run: Run, arrays: list[Tensor], numbers: Tensor, count: int, span: int, distance: int
) -> tuple[list[Tensor], Tensor]:
    """One stage of the network on [batch, n]: elements ``distance`` apart change places where they are out of order.

    ``numbers`` are the elements' original positions: they break ties, which makes the sort stable, and those from
    ``count`` on are padding and go last.
    """
    batch, size = numbers.shape
    shape = (batch, size // (2 * distance), 2, distance)
    views = [array.view(shape) for array in arrays]
    first, second = numbers.view(shape).unbind(2)
    left = [view[:, :, 0] for view in views]
    right = [view[:, :, 1] for view in views]
    less_second = less(run, [x for pair in zip(right, left, strict=True) for x in pair])[0].expand_as(first)
    less_first = less(run, [x for pair in zip(left, right, strict=True) for x in pair])[0].expand_as(first)
    by_number = second < first
    swap = torch.where(less_second == less_first, by_number, less_second)
    swap = torch.where((first >= count) | (second >= count), by_number, swap)
    blocks = torch.arange(shape[1], device=numbers.device).mul_(2 * distance)
    descending = (blocks & span).ne(0).reshape(1, -1, 1)
    swap = swap ^ descending
    exchanged = [
        torch.stack((torch.where(swap, b, a), torch.where(swap, a, b)), dim=2).view(batch, size)
        for a, b in zip([*left, first], [*right, second], strict=True)
    ]
    return exchanged[:-1], exchanged[-1]


def bitonic_sort(less: ScalarFunction, run: Run, operands: Sequence[Tensor], dimension: int) -> list[Tensor]:
    """Sorts ``operands`` together along ``dimension``, stably, by any comparator: O(log² n) calls of ``less``."""
    moved = [operand.movedim(dimension, -1) for operand in operands]
    shape = moved[0].shape
    count = shape[-1]
    size = 1 << max(count - 1, 0).bit_length()
    arrays = []
    for array in moved:
        flat = array.reshape(-1, count)
        arrays.append(torch.cat((flat, flat[:, :1].expand(-1, size - count)), dim=1))
    numbers = torch.arange(size, device=arrays[0].device).expand(arrays[0].shape).contiguous()
    span = 2
    while span <= size:
        distance = span // 2
        while distance:
            arrays, numbers = _exchange(less, run, arrays, numbers, count, span, distance)
            distance //= 2
        span *= 2
    return [array[:, :count].reshape(shape).movedim(-1, dimension) for array in arrays]


@kernel(Opcode.SORT, storage=Storage.SHARED)
def prepare_sort(instruction: Instruction) -> Kernel:
    dimension = instruction.attributes_as(SortAttributes).dimension
    comparator = instruction.called[0]
    shape = instruction.operands[0].shape
    assert isinstance(shape, ArrayShape)
    single = len(instruction.operands) == 1
    if shape.num_elements == 0 or shape.dims[dimension] < 2:
        return lambda run, *operands: operands[0] if single else operands
    keys = sort_keys(comparator)
    if keys is not None:
        return _sort_by_keys(keys, comparator, dimension)
    less = scalar_function(comparator)

    def run_sort(run: Run, *operands: Tensor) -> Tensor | tuple[Tensor, ...]:
        results = bitonic_sort(less, run, operands, dimension)
        return results[0] if single else tuple(results)

    return run_sort


def top_k(run: Run, values: Tensor, element_type: ElementType, k: int, largest: bool = True) -> tuple[Tensor, Tensor]:
    """The ``k`` greatest (or least) along the last dimension in total order, ties by lower index; s32 indices."""
    order = total_order(values, element_type)
    if not largest:
        order = ~order if order.dtype is not torch.uint8 else 255 - order
    indices = _top_indices(run, order, k)
    return values.gather(-1, indices), indices.to(torch.int32)


def _top_indices(run: Run, order: Tensor, k: int) -> Tensor:
    """Where the ``k`` greatest integers along the last dimension are, ties by lower index."""
    if k == 0 or not run.asynchronous:  # to know whether there are ties, the host would wait
        best, indices = order.topk(k, dim=-1)
        if k == 0:
            return indices
        tied = (best[..., 1:] == best[..., :-1]).any() or (order >= best[..., -1:]).sum() > best.numel()
        if not tied:
            return indices
    if order.element_size() == 8:
        return order.sort(dim=-1, stable=True, descending=True).indices[..., :k]
    # torch.topk takes any of equals. One integer for value and position leaves it no ties.
    count = order.shape[-1]
    positions = torch.arange(count - 1, -1, -1, device=order.device)
    unique = (order.to(torch.int64) << 32) | positions
    return (count - 1) - (unique.topk(k, dim=-1).values & 0xFFFFFFFF)


@kernel(Opcode.TOP_K, storage=Storage.FRESH)
def prepare_top_k(instruction: Instruction) -> Kernel:
    attributes = instruction.attributes_as(TopKAttributes)
    operand = instruction.operands[0].shape
    result = instruction.shape
    assert isinstance(operand, ArrayShape)
    assert isinstance(result, TupleShape)
    index_shape = result.elements[1]
    assert isinstance(index_shape, ArrayShape)
    element_type, k, largest = operand.element_type, attributes.k, attributes.largest
    return lambda run, values: top_k(run, values, element_type, k, largest)
