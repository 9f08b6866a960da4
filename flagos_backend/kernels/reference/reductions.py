"""reduce: with any reducer over any dimensions. Plain reducers become one torch call; any other reduces the reduced
elements pairwise, a whole array at each call of the reducer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

from flagos_backend.ir.attributes import DimensionsAttributes
from flagos_backend.ir.hlo import Instruction
from flagos_backend.ir.opcode import Opcode
from flagos_backend.ir.types import ElementType
from flagos_backend.kernels.reference import integers, small_floats
from flagos_backend.kernels.reference.computations import plain_combiner
from flagos_backend.kernels.reference.elementwise import binary_function, element_type_of, splat_constant
from flagos_backend.kernels.reference.integers import Unary
from flagos_backend.kernels.reference.movement import array_shape
from flagos_backend.kernels.reference.registry import Kernel, Run, Storage, identity, kernel
from flagos_backend.kernels.reference.scalar_functions import ScalarFunction, scalar_function
from flagos_backend.kernels.reference.storage import wrap
from flagos_backend.process.torch_loading import torch

E = ElementType
O = Opcode  # noqa: E741

# Reduces the given dimensions of a storage tensor.
Reduction = Callable[[torch.Tensor], torch.Tensor]


@kernel(O.REDUCE, storage=Storage.FRESH)
def _prepare_reduce(instruction: Instruction) -> Kernel:
    """Operands: n arrays, then n scalars to begin with; HLO lets the elements combine in any order."""
    dimensions = instruction.attributes_as(DimensionsAttributes).dimensions
    arrays = instruction.operands[: len(instruction.operands) // 2]
    dims = array_shape(arrays[0]).dims
    if not dimensions:
        # Nothing is combined: stock XLA leaves the initial values out as well.
        count = len(arrays)
        return identity if count == 1 else lambda run, *operands: tuple(x.clone() for x in operands[:count])
    if len(arrays) == 1:
        special = _plain(instruction, dims, dimensions)
        if special is not None:
            return special
    return _general(scalar_function(instruction.called[0]), dims, dimensions, len(arrays))


# ---- Plain reducers


def _plain(instruction: Instruction, dims: tuple[int, ...], dimensions: tuple[int, ...]) -> Kernel | None:
    """The kernel when the reducer is one commutative operation that torch can combine with; None otherwise."""
    opcode = plain_combiner(instruction.called[0])
    if opcode is None:
        return None
    element_type = element_type_of(instruction.operands[0])
    reduction = _reduction(opcode, element_type, dims, dimensions)
    if reduction is None:
        return None
    initial = splat_constant(instruction.operands[1])
    if initial is not None and initial == _identity(opcode, element_type) and type(initial) is not complex:
        return lambda run, x, _: reduction(x)
    combine = binary_function(opcode, element_type)
    return lambda run, x, initial: combine(reduction(x), initial)


def _identity(opcode: Opcode, element_type: ElementType) -> int | float | bool | None:
    """The storage value that changes nothing, for which the initial value need not be combined."""
    if element_type is E.PRED:
        return opcode in (O.AND, O.MINIMUM, O.MULTIPLY)
    if small_floats.is_small(element_type) or element_type.is_complex:
        return None
    match opcode:
        case O.ADD | O.OR | O.XOR:
            return 0
        case O.MULTIPLY:
            return 1
        case O.MAXIMUM:
            return float("-inf") if element_type.is_float else integers.least(element_type)
        case O.MINIMUM:
            return float("inf") if element_type.is_float else integers.greatest(element_type)
        case _:
            return -1 if element_type.is_signed else None


def _reduction(
    opcode: Opcode, element_type: ElementType, dims: tuple[int, ...], dimensions: tuple[int, ...]
) -> Reduction | None:
    if element_type is E.PRED:
        return _pred_reduction(opcode, dimensions)
    if small_floats.is_small(element_type):
        wide = _reduction(opcode, E.F32, dims, dimensions)
        return wide and (lambda x: small_floats.encode(wide(small_floats.decode(x, element_type)), element_type))
    if opcode is O.ADD:
        return _sum(element_type, dimensions)
    if 0 in dims or opcode not in (O.MULTIPLY, O.MAXIMUM, O.MINIMUM):
        return None
    if opcode is O.MULTIPLY:
        return _product(element_type, dims, dimensions)
    if element_type.is_complex:
        return None
    min_max = torch.amax if opcode is O.MAXIMUM else torch.amin
    if element_type in (E.U16, E.U32, E.U64):
        return lambda x: integers.ordered(min_max(integers.ordered(x, element_type), dimensions), element_type)
    return lambda x: min_max(x, dimensions)


def _pred_reduction(opcode: Opcode, dimensions: tuple[int, ...]) -> Reduction:
    if opcode in (O.AND, O.MINIMUM, O.MULTIPLY):
        return lambda x: torch.all(x, dimensions)
    if opcode is O.XOR:
        return lambda x: torch.sum(x, dimensions) & 1 != 0
    return lambda x: torch.any(x, dimensions)


def _sum(element_type: ElementType, dimensions: tuple[int, ...]) -> Reduction:
    """torch sums float32 pairwise, and narrower floats in float32 with one rounding at the end."""
    if element_type.is_integer:
        dtype = torch.int8 if element_type.bits < 8 and element_type.is_signed else None
        return lambda x: wrap(torch.sum(x, dimensions, dtype=dtype or x.dtype), element_type)
    return lambda x: torch.sum(x, dimensions)


def _product(element_type: ElementType, dims: tuple[int, ...], dimensions: tuple[int, ...]) -> Reduction:
    """torch multiplies along one dimension at a time: the reduced ones are merged into a last one."""
    merge = _merged(dims, dimensions)
    if element_type in (E.F16, E.BF16):
        return lambda x: torch.prod(merge(x), -1, dtype=torch.float32).to(x.dtype)
    return lambda x: wrap(torch.prod(merge(x), -1, dtype=x.dtype), element_type)


def _merged(dims: tuple[int, ...], dimensions: tuple[int, ...]) -> Unary:
    """Brings ``dimensions`` to the end and merges them, in row-major order."""
    kept = [d for d in range(len(dims)) if d not in dimensions]
    order = [*kept, *sorted(dimensions)]
    sizes = [*(dims[d] for d in kept), prod(dims[d] for d in dimensions)]
    return lambda x: x.permute(order).reshape(sizes)


# ---- Any reducer


def _general(function: ScalarFunction, dims: tuple[int, ...], dimensions: tuple[int, ...], count: int) -> Kernel:
    """Halves the reduced elements until one is left, then combines it with the initial value: the order of elements is
    kept, so that the reducer need only be associative. O(log n) calls of the reducer."""
    merge = _merged(dims, dimensions)
    kept = tuple(size for d, size in enumerate(dims) if d not in dimensions)
    size = prod(dims[d] for d in dimensions)

    def call(run: Run, left: Sequence[torch.Tensor], right: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        results = function(run, [*left, *right])
        return [r.expand(a.shape) for r, a in zip(results, left, strict=True)]

    def reduce(run: Run, *operands: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, ...]:
        initial = [value.expand(kept) for value in operands[count:]]
        if size == 0:
            results = initial
        else:
            arrays = [merge(x) for x in operands[:count]]
            remaining = size
            while remaining > 1:
                pairs = remaining // 2
                left = [x[..., 0 : 2 * pairs : 2] for x in arrays]
                right = [x[..., 1 : 2 * pairs : 2] for x in arrays]
                reduced = call(run, left, right)
                if remaining % 2:
                    reduced = [torch.cat((f, x[..., -1:]), -1) for f, x in zip(reduced, arrays, strict=True)]
                arrays, remaining = reduced, remaining - pairs
            results = call(run, initial, [x.squeeze(-1) for x in arrays])
        owned = tuple(r.clone(memory_format=torch.contiguous_format) for r in results)
        return owned if count > 1 else owned[0]

    return reduce
