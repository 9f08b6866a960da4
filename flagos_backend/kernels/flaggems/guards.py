"""What FlagGems' kernels must not be given, though its functions would take it: measured, or read in its sources.

Each guard has its test in tests/cpu/kernels. What no guard knows of is found where kernels are measured: there, results
that are not ATen's rule a kernel out (kernels/tuning.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from flagos_backend.ir.hlo import Instruction
from flagos_backend.ir.types import ArrayShape, ElementType, leaves
from flagos_backend.kernels.reference.aten import argument_of

E = ElementType
# Kernels that compute in f32 whatever they are given lose f64's digits, so f64 goes to the few that do not.
_EXACT_IN_F64 = frozenset({"add", "cat", "gather", "index_select", "mm", "mul", "sub", "where"})
_NEVER = frozenset({E.C64, E.C128, E.U16, E.U32, E.U64})
# tl.dot has no integers here, and no 64-bit floats either on some chips.
_FLOAT_ONLY = frozenset({"mm", "bmm", "addmm", "baddbmm", "convolution", "conv2d"})
# Operators that draw from torch's generator, or depend on how an argument lies in memory.
_LEFT_TO_ATEN = frozenset(
    {
        *("topk", "sort", "argsort", "normed_cumsum", "multinomial", "unique_consecutive", "_unique2"),
        *("argmax", "argmin", "max", "min", "cummax", "cummin"),
    }
)
# Integers of them go through floats.
_INEXACT_IN_INTEGERS = frozenset({"pow", "square", "arange"})
# They take integers and truth values for floats, or for patterns of bits.
_WRONG_OF_INTEGERS = frozenset({"log", "erf", "atan2", "logical_not"})
# Arguments that ATen may leave out, and they read or write nevertheless.
_NEEDS = {
    **dict.fromkeys(("nll_loss_forward", "nll_loss2d_forward", "rms_norm", "_fused_rms_norm"), "weight"),
    "native_batch_norm": "running_mean",
}
# Their last windows begin before the end and end past the padding, which they divide by all the same.
_POOLS = frozenset({"avg_pool2d", "avg_pool2d_backward"})
# They read channels of the next group where a group has no power of two of them.
_GROUP_NORMS = frozenset({"native_group_norm", "native_group_norm_backward"})


def refuses(name: str, instruction: Instruction) -> str:
    """Why FlagGems' function for the ATen operator ``name`` must not compute ``instruction``, or ""."""
    operator = name.partition(".")[0]
    shapes = [leaf for o in (*instruction.operands, instruction) for leaf in leaves(o.shape)]
    types = {shape.element_type for shape in shapes}
    if operator in _LEFT_TO_ATEN:
        return f"FlagGems' {operator} orders equal elements, zeros and NaN in another way"
    if types & _NEVER:
        return f"FlagGems has no {min(types & _NEVER).name.lower()}"
    if E.F64 in types and operator not in _EXACT_IN_F64:
        return f"FlagGems' {operator} computes f64 in f32"
    if operator in _FLOAT_ONLY and not all(t.is_float for t in types):
        return f"FlagGems' {operator} multiplies no integers"
    if operator in _INEXACT_IN_INTEGERS and any(leaf.element_type.is_integer for leaf in leaves(instruction.shape)):
        return f"FlagGems' {operator} computes integers in floats"
    if operator in _WRONG_OF_INTEGERS and not all(leaf.element_type.is_float for leaf in _operands(instruction)):
        return f"FlagGems' {operator} is wrong of integers"
    if operator in _NEEDS and argument_of(instruction, _NEEDS[operator]) is None:
        return f"FlagGems' {operator} takes a {_NEEDS[operator]} that is not given"
    if operator == "linalg_vector_norm" and float(_number(argument_of(instruction, "ord"))) < 0:
        return f"FlagGems' {operator} counts elements that are not there, of which a negative power is no number"
    if operator in _POOLS and argument_of(instruction, "ceil_mode"):
        return f"FlagGems' {operator} divides by elements that windows have beyond the padding"
    if operator in _GROUP_NORMS and _group_is_ragged(instruction):
        return f"FlagGems' {operator} mixes groups of channels whose number is no power of two"
    if any(shape.num_elements == 0 for shape in shapes):
        return "FlagGems' kernels are not made for arrays without elements"
    return ""


def _operands(instruction: Instruction) -> list[ArrayShape]:
    return [leaf for operand in instruction.operands for leaf in leaves(operand.shape)]


def _number(value: Any) -> Any:
    """As configs have numbers: those that JSON lacks as text."""
    return value["float"] if isinstance(value, dict) else value


def _group_is_ragged(instruction: Instruction) -> bool:
    channels, groups = (int(argument_of(instruction, name)) for name in ("C", "group"))
    return groups > 1 and (channels // groups).bit_count() != 1


def contiguous(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` on dense row-major tensors: several kernels (index_select, topk, bucketize) ignore strides."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*[_dense(arg) for arg in args], **{name: _dense(arg) for name, arg in kwargs.items()})

    return call


def _dense(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.contiguous()
    return [_dense(part) for part in value] if isinstance(value, list) else value
