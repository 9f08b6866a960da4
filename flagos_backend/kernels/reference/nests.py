"""The reference interpreter of loop nests: the values that loop_ir/SPEC.md gives a nest, without any choice of how a
device computes it. Operations are those of the reference kernels, so that each is described once.

A value is a tensor of the nest's rank, of size 1 along the dimensions that it does not vary along.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from math import prod

from flagos_backend.ir.attributes import NONE, Attributes, CompareAttributes
from flagos_backend.ir.hlo import Instruction
from flagos_backend.ir.opcode import Comparison, ComparisonOrder, Opcode
from flagos_backend.ir.types import ArrayShape, ElementType
from flagos_backend.kernels.reference import registry
from flagos_backend.kernels.reference.storage import dtype_of, from_bytes, wrap
from flagos_backend.loop_ir.intrinsics import SUBTRACTED, Intrinsic
from flagos_backend.loop_ir.region import Affine, Apply, Expression, Index, Literal, Load, Reduce, Region, Store
from flagos_backend.process.torch_loading import torch

E = ElementType
O = Opcode  # noqa: E741
_WIDE = {E.F16: E.F64, E.BF16: E.F64, E.F32: E.F64, E.C64: E.C128}
_ROUNDS = frozenset({O.ADD, O.MULTIPLY})

Function = Callable[..., torch.Tensor]


class NestUndefined(ValueError):
    """SPEC.md gives the nest no value for these arrays: a start, an element or an operand is outside of its range, or
    two points store different values to one element."""


def evaluate(
    nests: Iterable[Region], arrays: Mapping[Instruction, torch.Tensor], wide: bool = False
) -> dict[Instruction, torch.Tensor]:
    """What all arrays hold, row major in one dimension, after ``nests`` ran one after another.

    ``arrays``: what they hold before, in their storage types (storage.py). What is stored to and not among them begins
    with ``nothing``. ``wide``: floats of less than 64 bits are float64 throughout, results too, and nothing is rounded
    to its type: the exact value, nearly, of which other orders and forms may differ by rounding alone.
    """
    found = {a: _held_as(x.reshape(-1), _element_type(a), wide) for a, x in arrays.items()}
    owned: set[Instruction] = set()
    for nest in nests:
        for target in dict.fromkeys(store.target for store in nest.stores):
            if target not in owned:
                before = found.get(target)
                if before is None:
                    kind = _held(_element_type(target), wide)
                    before = nothing(kind).expand(_shape(target).num_elements)
                found[target] = before.clone()
                owned.add(target)
        if any(size == 0 for d, size in enumerate(nest.dims) if d not in nest.reduced):
            continue
        values = _Values(nest, found, wide)
        # All is loaded before anything is stored: no store is read by a load of the same nest at another point.
        stored = [(store, values.places(store.index), values[store.value]) for store in nest.stores]
        for store, places, value in stored:
            _write(store, places, value, found[store.target])
    return found


def nothing(element_type: ElementType) -> torch.Tensor:
    """What stands in the stead of a value that nobody may depend on: all bits, which is NaN, -1, the greatest unsigned
    number or true."""
    dtype = dtype_of(element_type)
    if dtype is torch.bool:
        return torch.tensor(True)
    return wrap(torch.full((dtype.itemsize,), 0xFF, dtype=torch.uint8).view(dtype)[0], element_type)


class _Values:
    """The values of one nest's expressions."""

    def __init__(self, nest: Region, arrays: Mapping[Instruction, torch.Tensor], wide: bool) -> None:
        self._nest = nest
        self._arrays = arrays
        self._wide = wide
        self._found: dict[Expression, torch.Tensor] = {}
        for expression in nest.expressions():
            self._found[expression] = self._value(expression)

    def __getitem__(self, expression: Expression) -> torch.Tensor:
        return self._found[expression]

    def places(self, index: Affine, guard: torch.Tensor | None = None) -> torch.Tensor:
        """The numbers of the elements. Raises NestUndefined where a start is out of range and the guard holds."""
        rank = self._nest.rank
        total = torch.full((1,) * rank, index.offset)
        for d, (coefficient, size) in enumerate(zip(index.coefficients, self._nest.dims, strict=True)):
            if coefficient:
                steps = torch.arange(size).reshape([size if n == d else 1 for n in range(rank)])
                total = total + coefficient * steps
        for shift in index.shifts:
            start = self[shift.start].to(torch.int64)
            _require((start >= 0) & (start <= shift.limit), guard, f"a start is not between 0 and {shift.limit}")
            total = total + shift.factor * start
        return total

    def _value(self, expression: Expression) -> torch.Tensor:
        kind = _held(expression.element_type, self._wide)
        if isinstance(expression, Literal):
            scalar = from_bytes(expression.data, ArrayShape(expression.element_type, (1,) * self._nest.rank))
            return _held_as(scalar, expression.element_type, self._wide)
        if isinstance(expression, Index):
            return _function(O.CONVERT, "", (E.S64,), kind)(self.places(expression.value))
        if isinstance(expression, Load):
            return self._loaded(expression, kind)
        if isinstance(expression, Reduce):
            return self._reduced(expression, kind)
        operands = [self[operand] for operand in expression.operands]
        kinds = tuple(operand.element_type for operand in expression.operands)
        if expression.opcode is O.BITCAST_CONVERT:  # bits are those of the program's types
            narrow = operands[0].to(dtype_of(kinds[0]))
            return _held_as(
                _of(expression, kinds, expression.element_type)(narrow), expression.element_type, self._wide
            )
        return _of(expression, tuple(_held(k, self._wide) for k in kinds), kind)(*operands)

    def _loaded(self, load: Load, kind: ElementType) -> torch.Tensor:
        array = self._arrays.get(load.source)
        if array is None:
            raise NestUndefined(f"%{load.source.name} is loaded and holds nothing")
        guard = None if load.guard is None else self[load.guard]
        places = self.places(load.index, guard)
        inside = (places >= 0) & (places < len(array))
        _require(inside, guard, f"an element outside of %{load.source.name} is loaded")
        if guard is None:
            return array[places]
        loaded = inside & guard
        places = places.expand(loaded.shape)
        result = nothing(kind).expand(loaded.shape).clone()
        result[loaded] = array[places[loaded]]
        return result

    def _reduced(self, reduction: Reduce, kind: ElementType) -> torch.Tensor:
        """Halves what is left until it is one. Sums and products of floats are rounded once, at the end."""
        value = self[reduction.value].expand(self._nest.dims)
        exact = _WIDE.get(kind, kind) if reduction.combine in _ROUNDS else kind
        combine = _function(reduction.combine, "", (exact, exact), exact)
        kept = [1 if d in reduction.dims else size for d, size in enumerate(self._nest.dims)]
        count = prod(self._nest.dims[d] for d in reduction.dims)
        rest = value.permute([d for d in range(self._nest.rank) if d not in reduction.dims] + list(reduction.dims))
        rest = _function(O.CONVERT, "", (kind,), exact)(rest.reshape([*kept, count]))
        while rest.shape[-1] > 1:
            half = rest.shape[-1] // 2
            joined = combine(rest[..., :half], rest[..., half : 2 * half])
            rest = torch.cat((joined, rest[..., 2 * half :]), -1)
        result = _function(O.CONVERT, "", (kind,), exact)(self[reduction.initial])
        if count:
            result = combine(rest.squeeze(-1), result)
        return _function(O.CONVERT, "", (exact,), kind)(result)


def _write(store: Store, places: torch.Tensor, value: torch.Tensor, array: torch.Tensor) -> None:
    shape: tuple[int, ...] = torch.broadcast_shapes(places.shape, value.shape)  # type: ignore[no-untyped-call]
    places, value = places.expand(shape), value.expand(shape)
    if not bool(((places >= 0) & (places < len(array))).all()):
        raise NestUndefined(f"an element outside of %{store.target.name} is stored to")
    places, value = places.reshape(-1), value.reshape(-1)
    array[places] = value
    if not torch.equal(array[places].view(torch.uint8), value.contiguous().view(torch.uint8)):
        raise NestUndefined(f"two points store different values to one element of %{store.target.name}")


def _require(condition: torch.Tensor, guard: torch.Tensor | None, otherwise: str) -> None:
    if not bool((condition if guard is None else condition | ~guard).all()):
        raise NestUndefined(otherwise)


def _shape(array: Instruction) -> ArrayShape:
    if not isinstance(array.shape, ArrayShape):
        raise TypeError(f"{array.name} is a tuple, not an array")
    return array.shape


def _element_type(array: Instruction) -> ElementType:
    return _shape(array).element_type


def _held(element_type: ElementType, wide: bool) -> ElementType:
    """The type that stands for ``element_type``."""
    return _WIDE.get(element_type, element_type) if wide else element_type


def _held_as(x: torch.Tensor, element_type: ElementType, wide: bool) -> torch.Tensor:
    return x.to(dtype_of(_held(element_type, wide)))


# ---- Operations


def _of(expression: Apply, kinds: tuple[ElementType, ...], result: ElementType) -> Function:
    return _function(expression.opcode, expression.detail, kinds, result, expression.order)


@functools.lru_cache(maxsize=1024)
def _function(
    opcode: Opcode,
    detail: str,
    kinds: tuple[ElementType, ...],
    result: ElementType,
    order: ComparisonOrder = ComparisonOrder.PARTIAL,
) -> Function:
    """An operation of operands of the types ``kinds``, on tensors that broadcast."""
    if opcode is O.COMPARE:
        return _kernel(opcode, kinds, result, CompareAttributes(Comparison(detail), order))
    if not detail:
        return _kernel(opcode, kinds, result)
    if len(kinds) == 3 and detail not in (Intrinsic.CORRECTED, Intrinsic.BY_SUM):
        return _joined(opcode, detail, result)
    match detail:
        case Intrinsic.ALONE | Intrinsic.TERM:
            return _kernel(opcode, kinds, result)
        case Intrinsic.BASE_TWO:
            return _rounded_once(torch.log2, result)
        case Intrinsic.NEAR:
            return _rounded_once(torch.sqrt if opcode is O.SQRT else lambda x: torch.log2(1 - x * x), result)
        case Intrinsic.BELOW:
            return _below(_kernel(opcode, kinds, result))
        case Intrinsic.FLOOR:
            return _floor(opcode, result)
        case Intrinsic.ROTATE:
            return _rotate(result)
        case Intrinsic.SCALE:
            return _scale
        case Intrinsic.STRAIGHT:
            return _rounded_once(torch.div, result)
        case Intrinsic.CORRECTED | Intrinsic.BY_SUM:
            return _corrected(result, detail == Intrinsic.BY_SUM)
        case _:
            raise ValueError(f"{opcode} has no form {detail!r}")


def _kernel(
    opcode: Opcode, kinds: tuple[ElementType, ...], result: ElementType, attributes: Attributes = NONE
) -> Function:
    operands = tuple(Instruction(O.PARAMETER, ArrayShape(kind), name="operand") for kind in kinds)
    kernel = registry.prepare(Instruction(opcode, ArrayShape(result), operands, attributes, name=str(opcode)))
    return functools.partial(kernel, registry.Run())


def _rounded_once(function: Function, result: ElementType) -> Function:
    """In float64. Quotients and roots of floats of up to 32 bits, and what is off by more than a rounding anyway."""
    dtype = dtype_of(result)
    return lambda *operands: function(*(x.double() for x in operands)).to(dtype)


def _below(exponential: Function) -> Function:
    def call(x: torch.Tensor) -> torch.Tensor:
        _require((x <= 0) | x.isnan(), None, "the operand of an exponential below its maximum is positive")
        return exponential(x)

    return call


def _floor(opcode: Opcode, kind: ElementType) -> Function:
    quotient, remainder, add, subtract = (
        _kernel(o, (kind, kind), kind) for o in (O.DIVIDE, O.REMAINDER, O.ADD, O.SUBTRACT)
    )

    def call(x: torch.Tensor, divisor: torch.Tensor) -> torch.Tensor:
        _require(divisor != 0, None, "a quotient rounded down is divided by 0")
        rest = remainder(x, divisor)
        lower = (rest != 0) & ((rest < 0) != (divisor < 0))
        if opcode is O.REMAINDER:
            return torch.where(lower, add(rest, divisor), rest)
        truncated = quotient(x, divisor)
        return torch.where(lower, subtract(truncated, torch.ones_like(truncated)), truncated)

    return call


def _rotate(kind: ElementType) -> Function:
    left, right, either = (_kernel(o, (kind, kind), kind) for o in (O.SHIFT_LEFT, O.SHIFT_RIGHT_LOGICAL, O.OR))

    def call(x: torch.Tensor, amount: torch.Tensor) -> torch.Tensor:
        _require((amount > 0) & (amount < kind.bits), None, f"a rotation is not by 1 to {kind.bits - 1}")
        return either(left(x, amount), right(x, kind.bits - amount))

    return call


def _scale(divisor: torch.Tensor) -> torch.Tensor:
    """A power of two with the divisor's sign, by which its reciprocal stays finite."""
    return torch.copysign(torch.where(divisor.abs() < 2.0**-100, 2.0**64, 1.0).to(divisor.dtype), divisor)


def _corrected(result: ElementType, by_sum: bool) -> Function:
    divide = _rounded_once(torch.div, result)

    def call(x: torch.Tensor, divisor: torch.Tensor, reciprocal: torch.Tensor) -> torch.Tensor:
        exact = 1 / divisor.double()
        near = (reciprocal - exact).abs() <= exact.abs() * torch.finfo(reciprocal.dtype).eps
        _require(near | (reciprocal == exact) | divisor.isnan(), None, "what corrects a quotient is no reciprocal")
        if by_sum:
            is_sum = ((divisor >= 1) & (x >= 0) & (x <= 1)) | divisor.isnan() | x.isnan()
            _require(is_sum, None, "a quotient is not of 0 to 1 by 1 or more")
        else:
            _require((divisor >= 0) | divisor.isnan(), None, "the divisor of a corrected quotient is negative")
        return divide(x, divisor)

    return call


def _joined(opcode: Opcode, detail: str, kind: ElementType) -> Function:
    """The second operation, ``opcode``, of what the first makes, which ``detail`` names."""
    name = detail.removesuffix(SUBTRACTED)
    is_rotation = name == Intrinsic.ROTATE
    first = _function(O.SHIFT_LEFT if is_rotation else O(name), name if is_rotation else "", (kind, kind), kind)
    second = _kernel(opcode, (kind, kind), kind)
    if detail.endswith(SUBTRACTED):
        return lambda a, b, other: second(other, first(a, b))
    return lambda a, b, other: second(first(a, b), other)
