"""Whether FlagGems computes a call of an ATen operator: what the compiler asks of the same call, once a signature.

Called by patching.py with tensors as FlagGems takes them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils._pytree import tree_leaves, tree_map

from flagos_backend.devices.target import Target
from flagos_backend.frontends.torch.compile.dtypes import STORED_TYPE
from flagos_backend.frontends.torch.compile.errors import NoLoweringError
from flagos_backend.frontends.torch.compile.lowering.aten_call import call_aten
from flagos_backend.frontends.torch.compile.lowering.emitter import Emitter
from flagos_backend.ir.builder import Builder
from flagos_backend.ir.hlo import Instruction
from flagos_backend.ir.opcode import Opcode
from flagos_backend.ir.types import ArrayShape
from flagos_backend.kernels.choice import implementations_of
from flagos_backend.kernels.flaggems import guards, loading
from flagos_backend.kernels.implementation import Implementation, Provider
from flagos_backend.kernels.own_calls import OwnCalls
from flagos_backend.kernels.policy import Policy


@dataclass(slots=True)
class Decision:
    """``compute``: FlagGems' function, with results as ATen's; None: PyTorch's own kernel, for ``reason``. ``has_run``:
    whether it has compiled and tuned what it needs."""

    compute: Callable[..., Any] | None
    reason: str = ""
    has_run: bool = False


def signature_of(value: Any) -> Hashable:
    """Equal for arguments of which the same is decided. 1, 1.0 and True are equal to Python and not to ATen."""
    if isinstance(value, torch.Tensor):
        return value.dtype, value.device, tuple(value.shape), value.stride(), value.is_conj(), value.is_neg()
    if isinstance(value, list | tuple):
        return tuple(map(signature_of, value))
    return type(value), repr(value) if isinstance(value, float | complex) else value


def decide(
    name: str,
    operator: OpOverload,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    target: Target,
    policy: Policy,
) -> Decision:
    """Of a call of ``operator``, which FlagGems calls ``name``. Raises nothing: what is wrong with the call PyTorch's
    own kernel says."""
    implementation = _implementation(name)
    reason = _unwanted(name, implementation, target, policy)
    if reason:
        return Decision(None, reason)
    try:
        outcome = operator(*tree_map(_traced, list(args)), **tree_map(_traced, dict(kwargs)))
    except Exception as error:  # of any kind: without values, not every operator knows the sizes of its results
        return Decision(None, f"the sizes of its results are not known before: {type(error).__name__}")
    if not all(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(outcome)):
        return Decision(None, "it gives more than tensors")
    try:
        instruction = instruction_of(operator, args, kwargs, outcome)
    except NoLoweringError as error:
        return Decision(None, f"it cannot be compiled: {error}")
    reason = implementation.unsupported(instruction, target)
    if reason:
        return Decision(None, reason)
    return Decision(_like_aten(guards.adapted(name, loading.function(name)), outcome))


def _unwanted(name: str, implementation: Implementation, target: Target, policy: Policy) -> str:
    operation = f"aten::{name.partition('.')[0]}"
    for wish in policy.wishes(operation):
        if wish.meets(implementation, target):
            break
        if wish.provider in (Provider.VENDOR, Provider.REFERENCE):
            return f"{wish} is preferred"
    return policy.denies(operation, implementation, target, loading.names_of(name))


def _implementation(name: str) -> Implementation:
    offers = implementations_of(f"aten::{name.partition('.')[0]}")
    return next(offer for offer in offers if offer.provider is Provider.FLAGOS)


def unsuitable(args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """Why FlagGems is not asked of a call, whatever it computes, or ""."""
    tensors = _tensors((args, kwargs))
    if any(isinstance(leaf, torch.device) for leaf in tree_leaves(kwargs)):
        return "a device is named"
    if len({tensor.device for tensor in tensors}) != 1:
        return "its tensors are on several devices"
    if any(tensor.is_conj() or tensor.is_neg() for tensor in tensors):
        return "its tensors are conjugated or negated lazily"
    return ""


def _traced(leaf: Any) -> Any:
    """The leaf of a call that computes nothing."""
    if not isinstance(leaf, torch.Tensor):
        return leaf
    return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device="meta")


def instruction_of(operator: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], outcome: Any) -> Instruction:
    """The custom call that torch.compile emits for a call; ``outcome`` is what it returns, or the same without values.

    Raises NoLoweringError for what cannot be compiled.
    """
    builder = Builder("call")
    # Laid out row by row, results come as they are and in no other order of their dimensions.
    result = tree_map(lambda part: part.contiguous() if isinstance(part, torch.Tensor) else part, outcome)

    def emitted(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if value.dtype not in STORED_TYPE:
            raise NoLoweringError(f"there is no type for {value.dtype}")
        return builder.parameter(ArrayShape(STORED_TYPE[value.dtype], tuple(value.shape)))

    traced = (list(args), dict(kwargs))
    arguments, keywords = tree_map(emitted, traced)
    value = call_aten(Emitter(builder), operator, result, arguments, keywords, traced, effect=False)
    call: Instruction = next(part for part in tree_leaves(value) if isinstance(part, Instruction))
    while call.opcode is not Opcode.CUSTOM_CALL:
        (call,) = call.operands
    return call


def _like_aten(function: Callable[..., Any], outcome: Any) -> Callable[..., Any]:
    """``function``, with results of the sizes, strides and structure of ``outcome``, in memory of their own."""
    expected = _tensors(outcome)

    def compute(*args: Any, **kwargs: Any) -> Any:
        with OwnCalls():
            found = _tensors(function(*args, **kwargs))
            if [t.dtype for t in found] != [t.dtype for t in expected]:
                kinds = ", ".join(str(t.dtype) for t in found)
                raise TypeError(f"it gives {kinds}, where ATen gives {', '.join(str(t.dtype) for t in expected)}")
            taken = {tensor.untyped_storage().data_ptr() for tensor in _tensors((args, kwargs))}
            made = [_placed(t, like, taken) for t, like in zip(found, expected, strict=True)]
        if isinstance(outcome, torch.Tensor):
            return made[0]
        return made if isinstance(outcome, list) else tuple(made)

    return compute


def _placed(found: torch.Tensor, like: torch.Tensor, taken: set[int]) -> torch.Tensor:
    result = found.reshape(like.shape)
    if result.stride() == like.stride() and result.untyped_storage().data_ptr() not in taken:
        return result
    return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=result.device).copy_(result)


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
