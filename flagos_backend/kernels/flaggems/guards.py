"""What FlagGems' kernels must not be given, though its functions would take it: measured, or read in its sources.

Each guard has its test in tests/cpu/kernels. What no guard knows of is found where kernels are measured: there, results
that are not ATen's rule a kernel out (kernels/tuning.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from flagos_backend.ir.attributes import CustomCallAttributes
from flagos_backend.ir.hlo import Instruction
from flagos_backend.ir.types import ArrayShape, ElementType, leaves
from flagos_backend.kernels.reference.aten import argument_of, arguments_of
from flagos_backend.process.torch_loading import torch

E = ElementType
# Kernels that compute in f32 whatever they are given lose f64's digits, so f64 goes to the few that do not. mm does on
# Hopper, where its sums are f32, to which Triton refuses to add f64 products.
_EXACT_IN_F64 = frozenset({"add", "cat", "gather", "index_select", "mul", "sub", "where"})
_NEVER = frozenset({E.C64, E.C128, E.U16, E.U32, E.U64, *(t for t in E if t.name.startswith("F8"))})
_HALF_FLOATS = frozenset({E.F16, E.BF16})
# Integers that f32 does not hold.
_WIDE = frozenset({E.S32, E.S64})
# Integers, and truth values, that devices do not add to where they lie.
_NO_ATOMICS = frozenset({E.PRED, E.S8, E.S16, E.U8})
# What arguments are called that are dimensions of the first one.
_DIMENSIONS = frozenset({"dim", "dims"})
_MEAN = 1  # of ATen's ways to join a loss


# ---- what is asked of a call ----


def _operands(instruction: Instruction) -> list[ArrayShape]:
    return [leaf for operand in instruction.operands for leaf in leaves(operand.shape)]


def _types(instruction: Instruction) -> set[ElementType]:
    """Of its operands."""
    return {operand.element_type for operand in _operands(instruction)}


def _all_types(instruction: Instruction) -> set[ElementType]:
    """Of its operands and results."""
    return _types(instruction) | {leaf.element_type for leaf in leaves(instruction.shape)}


def _takes_floats(instruction: Instruction) -> bool:
    return any(t.is_float for t in _types(instruction))


def _is_negative(value: Any) -> bool:
    """Of an argument that may be a number. As configs have them, those that JSON lacks are text."""
    if isinstance(value, dict):
        return "float" in value and float(value["float"]) < 0
    return isinstance(value, int | float) and value < 0


def _lacks(name: str) -> Callable[[Instruction], bool]:
    return lambda instruction: argument_of(instruction, name) is None


def _is_empty(name: str) -> Callable[[Instruction], bool]:
    return lambda instruction: argument_of(instruction, name) == []


def _group_is_ragged(instruction: Instruction) -> bool:
    channels, groups = (int(argument_of(instruction, name)) for name in ("C", "group"))
    return groups > 1 and (channels // groups).bit_count() != 1


def _broadcasts_first(instruction: Instruction) -> bool:
    return isinstance(instruction.shape, ArrayShape) and _operands(instruction)[0].dims != instruction.shape.dims


def _operands_differ(instruction: Instruction) -> bool:
    first, *others = _operands(instruction)
    return any((other.dims, other.element_type) != (first.dims, first.element_type) for other in others)


def _sums_narrowly(instruction: Instruction) -> bool:
    """Integers whose sums are of a wider type."""
    (result,), (summed,) = leaves(instruction.shape), _operands(instruction)
    return not summed.element_type.is_float and summed.element_type is not result.element_type


def _sums_all_half_floats(instruction: Instruction) -> bool:
    (result,) = leaves(instruction.shape)
    return bool(_types(instruction) & _HALF_FLOATS) and result.element_type in _HALF_FLOATS and result.num_elements == 1


def _has_sides_of_one_number(instruction: Instruction) -> bool:
    sides = [argument_of(instruction, name) for name in ("kernel_size", "stride", "padding")]
    return not all(isinstance(side, list) and len(side) == 2 for side in sides)


# ---- the guards ----


@dataclass(frozen=True, slots=True)
class _Guard:
    """``fact`` goes on from "FlagGems' OPERATOR"; ``applies`` says of which calls of ``operators``."""

    fact: str
    operators: frozenset[str]
    applies: Callable[[Instruction], bool]


def _guard(operators: str, applies: Callable[[Instruction], bool], fact: str) -> _Guard:
    return _Guard(fact, frozenset(operators.split()), applies)


_COMPARISONS = "eq ne lt le gt ge"
_GUARDS = (
    # They draw from torch's generator, or depend on how an argument lies in memory.
    _guard(
        "topk sort argsort normed_cumsum multinomial unique_consecutive _unique2 argmax argmin max min cummax cummin",
        lambda _: True,
        "orders equal elements, zeros and NaN in another way",
    ),
    # What is not finite, which no call tells.
    _guard("hypot logaddexp", lambda _: True, "is NaN where both operands are infinite"),
    _guard("aminmax angle clamp clamp_min clip hardsigmoid std threshold", _takes_floats, "loses NaN"),
    # ---- types ----
    # tl.dot has no integers, and no 64-bit floats either on some chips.
    _guard(
        "mm bmm addmm addmv baddbmm convolution conv2d",
        lambda i: not all(t.is_float for t in _all_types(i)),
        "multiplies no integers",
    ),
    _guard(
        "pow square arange",
        lambda i: any(leaf.element_type.is_integer for leaf in leaves(i.shape)),
        "computes integers in floats",
    ),
    _guard(
        f"{_COMPARISONS} clamp clamp_min clamp_max clip ceil addcmul prod cumsum native_dropout_backward",
        lambda i: bool(_all_types(i) & _WIDE),
        "computes integers in floats",
    ),
    # They take integers and truth values for floats, or for patterns of bits, or refuse them.
    _guard(
        "log erf sqrt special_i0e special_i1 atan2 logical_not logit nan_to_num upsample_bicubic2d",
        lambda i: not all(t.is_float for t in _types(i)),
        "is wrong of integers",
    ),
    _guard(
        "_to_copy",
        lambda i: _takes_floats(i) and E.PRED in _all_types(i),
        "makes what is less than one false",
    ),
    _guard("add native_dropout_backward", lambda i: _operands(i)[0].element_type is E.PRED, "is wrong of truth values"),
    _guard(
        _COMPARISONS,
        lambda i: E.U8 in _types(i) and _is_negative(argument_of(i, "other")),
        "compares no unsigned integers with negative numbers",
    ),
    _guard(
        "floor_divide",
        lambda i: E.U8 in _types(i) and len(_types(i)) > 1,
        "divides no unsigned integers by signed ones",
    ),
    _guard("floor_divide", lambda i: bool(_types(i) & _HALF_FLOATS), "has no rounding division of 16-bit floats"),
    _guard(
        "div",
        lambda i: bool(_types(i) & _HALF_FLOATS) and argument_of(i, "rounding_mode") is not None,
        "has no rounding division of 16-bit floats",
    ),
    _guard("sum", _sums_narrowly, "sums integers in their own type"),
    _guard("sum mean", _sums_all_half_floats, "keeps sums of parts in 16-bit floats"),
    _guard(
        "index_add",
        lambda i: _operands(i)[0].element_type in _NO_ATOMICS,
        "adds to no integers of less than 32 bits",
    ),
    _guard(
        "index_put",
        lambda i: _operands(i)[0].element_type in _NO_ATOMICS and bool(argument_of(i, "accumulate")),
        "adds to no integers of less than 32 bits",
    ),
    _guard(
        "scatter",
        lambda i: _operands(i)[0].element_type in _NO_ATOMICS and argument_of(i, "reduce") is not None,
        "adds to no integers of less than 32 bits",
    ),
    # ---- sizes ----
    _guard(
        "addcdiv masked_fill masked_scatter", _broadcasts_first, "gives its first argument's size to what is broadcast"
    ),
    # Hopper's kernel, which reads and writes as many elements of each as the first operand has.
    _guard("mul", _operands_differ, "takes all operands for such as the first one"),
    _guard("addmm", lambda i: not _operands(i)[0].dims, "takes no scalar"),
    _guard("repeat", _is_empty("repeats"), "takes no scalar"),
    _guard("unfold_backward", _is_empty("input_sizes"), "takes no scalar"),
    _guard(
        "embedding_dense_backward",
        lambda i: len(_operands(i)[0].dims) == 1,
        "takes no single index",
    ),
    # They read channels of the next group where a group has no power of two of them.
    _guard(
        "native_group_norm native_group_norm_backward",
        _group_is_ragged,
        "mixes groups of channels whose number is no power of two",
    ),
    # ---- other arguments ----
    _guard(
        "addmm addmv addr baddbmm",
        lambda i: argument_of(i, "beta") == 0,
        "multiplies by zero what it is to leave out, which may be NaN",
    ),
    # ATen may leave them out, and they read or write them nevertheless.
    _guard("rms_norm _fused_rms_norm", _lacks("weight"), "takes a weight that is not given"),
    _guard("native_batch_norm", _lacks("running_mean"), "takes a running_mean that is not given"),
    _guard(
        "nll_loss_forward nll_loss2d_forward",
        lambda i: argument_of(i, "reduction") != _MEAN,
        "leaves the sum of weights unwritten where it divides by none",
    ),
    _guard(
        "linalg_vector_norm",
        lambda i: _is_negative(argument_of(i, "ord")),
        "counts elements that are not there, of which a negative power is no number",
    ),
    # The last windows begin before the end and end past the padding, which they divide by all the same.
    _guard(
        "avg_pool2d avg_pool2d_backward",
        lambda i: bool(argument_of(i, "ceil_mode")),
        "divides by elements that windows have beyond the padding",
    ),
    _guard("avg_pool2d avg_pool2d_backward", _has_sides_of_one_number, "takes two numbers for the sides of a window"),
    _guard(
        "reflection_pad2d",
        lambda i: any(map(_is_negative, argument_of(i, "padding"))),
        "takes nothing away",
    ),
    _guard(
        "select_backward",
        lambda i: _is_negative(argument_of(i, "index")),
        "takes no index that is counted from the last",
    ),
    # Its kernel; in Triton's interpreter it calls ATen's.
    _guard("_upsample_nearest_exact1d", lambda _: True, "takes the element before, where another is nearest"),
)


def refuses(name: str, instruction: Instruction) -> str:
    """Why FlagGems' function for the ATen operator ``name`` must not compute ``instruction``, or ""."""
    operator = name.partition(".")[0]
    types = _all_types(instruction)
    if types & _NEVER:
        return f"FlagGems has no {min(types & _NEVER).name.lower()}"
    if E.F64 in types and operator not in _EXACT_IN_F64:
        return f"FlagGems' {operator} computes f64 in f32"
    for guard in _GUARDS:
        if operator in guard.operators and guard.applies(instruction):
            return f"FlagGems' {operator} {guard.fact}"
    if _names_dimension_of_scalar(instruction):
        return f"FlagGems' {operator} takes no dimension of a scalar"
    if any(shape.num_elements == 0 for shape in (*_operands(instruction), *leaves(instruction.shape))):
        return "FlagGems' kernels are not made for arrays without elements"
    return ""


def _names_dimension_of_scalar(instruction: Instruction) -> bool:
    attributes, operands = instruction.attributes, _operands(instruction)
    if not isinstance(attributes, CustomCallAttributes) or not attributes.target.startswith("aten::"):
        return False
    return bool(operands) and not operands[0].dims and not _DIMENSIONS.isdisjoint(arguments_of(instruction))


# ---- how they are called ----


# They take a dimension that is counted from the last one, and then lose it.
_COUNT_FROM_FIRST = frozenset({"count_nonzero"})


def adapted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """``function``, which FlagGems has for the ATen operator ``name``, on whatever that is called with."""
    return contiguous(_from_first(function) if name in _COUNT_FROM_FIRST else function)


def _from_first(function: Callable[..., Any]) -> Callable[..., Any]:
    """With a dimension, or none, as the second argument."""

    def call(tensor: torch.Tensor, dim: int | None = None) -> Any:
        return function(tensor, dim if dim is None else dim % tensor.dim())

    return call


def contiguous(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` on dense row-major tensors: several kernels (index_select, topk, bucketize) ignore strides."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*[_dense(arg) for arg in args], **{name: _dense(arg) for name, arg in kwargs.items()})

    return call


def _dense(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.contiguous()
    return [_dense(part) for part in value] if isinstance(value, list) else value
