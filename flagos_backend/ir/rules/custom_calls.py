"""Shapes of the custom calls that kernels and native code take at their word: kernels/reference/CUSTOM_CALLS.md says
what each takes and makes. Of other targets the declared shape stands, and who prepares their kernel refuses them."""

from __future__ import annotations

from collections.abc import Callable

from flagos_backend.ir.attributes import CustomCallAttributes
from flagos_backend.ir.rules.common import Operation, broken, expect_same_dims, expect_scalar
from flagos_backend.ir.types import ArrayShape, ElementType, Shape, leaves

#: The arrays that a call makes; raises RuleBroken.
Convention = Callable[[Operation], tuple[ArrayShape, ...]]


def custom_call(operation: Operation) -> Shape:
    """The rule of custom-call: the declared shape, which must hold what the target's convention makes."""
    declared = operation.declared
    if declared is None:
        broken("a custom call declares its shape")
    target = operation.attributes_as(CustomCallAttributes).target
    convention = _CONVENTIONS.get(target)
    if convention is not None:
        made, found = convention(operation), tuple(leaves(declared))
        if made != found:
            broken(f"{target} of these operands makes {', '.join(map(str, made))}, not {', '.join(map(str, found))}")
    return declared


def _matrix(operation: Operation) -> ArrayShape:
    shape = operation.array(0)
    if shape.rank < 2:
        broken(f"its first operand is {shape}, not a matrix")
    return shape


def _qr(operation: Operation) -> tuple[ArrayShape, ...]:
    operation.expect_operands(1)
    a = _matrix(operation)
    return a, ArrayShape(a.element_type, (*a.dims[:-2], min(a.dims[-2:])))


def _reflectors(operation: Operation) -> tuple[ArrayShape, ...]:
    operation.expect_operands(2)
    a, taus = _matrix(operation), operation.array(1)
    if taus.element_type is not a.element_type or taus.dims[:-1] != a.dims[:-2] or taus.rank != a.rank - 1:
        broken(f"the factors {taus} do not fit the reflectors {a}")
    return (a,)


def _lu(operation: Operation) -> tuple[ArrayShape, ...]:
    operation.expect_operands(1)
    a = _matrix(operation)
    pivots, rows = (*a.dims[:-2], min(a.dims[-2:])), a.dims[:-1]
    return a, ArrayShape(ElementType.S32, pivots), ArrayShape(ElementType.S32, rows)


def _top_k(operation: Operation) -> tuple[ArrayShape, ...]:
    operation.expect_operands(1)
    a, declared = operation.array(0), operation.declared
    found = tuple(leaves(declared)) if declared is not None else ()
    if not found or not a.rank or found[0].rank != a.rank or found[0].dims[-1] > a.dims[-1]:
        broken(f"a top-k of {a} does not make {declared}")
    dims = (*a.dims[:-1], found[0].dims[-1])
    return ArrayShape(a.element_type, dims), ArrayShape(ElementType.S32, dims)


def _partial_reduce(operation: Operation) -> tuple[ArrayShape, ...]:
    """Arrays of one size and as many initial values -> as many arrays, shorter along one dimension at most."""
    arrays, declared = operation.arrays(), operation.declared
    found = tuple(leaves(declared)) if declared is not None else ()
    count = len(arrays) // 2
    if not count or len(arrays) != 2 * count or len(found) != count or len(operation.called) != 1:
        broken(f"PartialReduce takes n arrays, n initial values and a comparator, got {len(arrays)} operands")
    expect_same_dims(arrays[:count])
    for value in arrays[count:]:
        expect_scalar(value, "an initial value")
    before, after = arrays[0].dims, found[0].dims
    shorter = len(before) == len(after) and [new < old for old, new in zip(before, after, strict=True) if old != new]
    if shorter not in ([], [True]):
        broken(f"PartialReduce of {arrays[0]} does not make {found[0]}")
    return tuple(ArrayShape(array.element_type, after) for array in arrays[:count])


def _elementwise(operation: Operation) -> tuple[ArrayShape, ...]:
    operation.expect_operands(1)
    return (operation.array(0),)


def _of_one(operation: Operation) -> tuple[ArrayShape, ...]:
    """What says something of a value: whether it changes it is for the kernel to judge."""
    operation.expect_operands(1)
    return tuple(leaves(operation.declared)) if operation.declared is not None else ()


_FUNCTIONS = ("acos", "acosh", "asin", "asinh", "atanh", "cosh", "erf", "sinh", "tan")
_MARKERS = ("Sharding", "SPMDFullToShardShape", "SPMDShardToFullShape", "LayoutConstraint", "annotate_device_placement")
_CONVENTIONS: dict[str, Convention] = {
    **dict.fromkeys(("Qr", "flagos.geqrf"), _qr),
    **dict.fromkeys(("ProductOfElementaryHouseholderReflectors", "flagos.householder_product"), _reflectors),
    "flagos.lu": _lu,
    **dict.fromkeys(("TopK", "mhlo.topk"), _top_k),
    "PartialReduce": _partial_reduce,
    **dict.fromkeys([f"mhlo.{name}" for name in _FUNCTIONS], _elementwise),
    **dict.fromkeys(_MARKERS, _of_one),
}
