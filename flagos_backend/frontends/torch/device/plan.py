"""What an operator's schema says of its arguments and results, as the native Kernel takes it. Read by kernels.py."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch._ops import OpOverload


class KernelFlag(enum.IntFlag):
    """The flags of a native Kernel; numbers as in native/kernel.c."""

    NONE = 0

    #: Outputs may be given another size.
    RESIZES = 1
    #: Operands beside the first may be on other devices.
    ANY_DEVICE = 2
    #: Draws from a generator.
    RANDOM = 4
    #: Results are memory of the arguments, and are not counted again.
    UNCOUNTED = 8
    #: Tensors may be conjugated or negated lazily.
    SEES_LAZY = 16


#: A result that is a tensor of its own; one that stays on the device that computed it.
FRESH: Final = -1
AS_IS: Final = -2

#: Operators to which PyTorch itself gives Python numbers as tensors, in the overload that takes tensors.
_TAKES_NUMBERS: Final = frozenset(
    name + suffix
    for name in ("add", "sub", "mul", "div", "true_divide", "floor_divide", "__lshift__", "__rshift__")
    for suffix in ("", "_")
)


@dataclass(frozen=True, slots=True)
class KernelPlan:
    """How to call an operator for tensors on the device."""

    name: str
    #: Bit i: argument i is a tensor.
    tensor_positions: int
    #: Position and name of the generator.
    generator: tuple[int, str]
    flags: KernelFlag
    #: Position (-1: by keyword only) and name of each argument that is written.
    written: tuple[tuple[int, str], ...]
    #: For each result FRESH, AS_IS, or the index in ``written`` of the argument that it is.
    returns: tuple[int, ...]
    #: Whether Python numbers in the place of tensors mean another overload.
    numbers_elsewhere: bool


def is_tensor(type_: Any) -> bool:
    """Whether an argument's type in a schema is Tensor or Tensor?."""
    return str(type_) in ("Tensor", "Optional[Tensor]")


def has_tensors(type_: Any) -> bool:
    """Whether a type in a schema is of tensors: Tensor, Tensor?, Tensor[], Tensor?[]."""
    return "Tensor" in str(type_)


def returns_view(op: OpOverload) -> bool:
    """Whether a result shares memory with an argument that is not written."""
    return any(r.alias_info is not None and not r.alias_info.is_write for r in op._schema.returns)


def plan_kernel(op: OpOverload, flags: KernelFlag = KernelFlag.NONE, as_is: frozenset[int] = frozenset()) -> KernelPlan:
    """The plan for an overload; ``as_is`` numbers the results that stay where they were computed."""
    schema = op._schema
    written: list[tuple[int, str]] = []
    aliases: dict[str, int] = {}
    tensors, generator = 0, (-1, "generator")
    for position, argument in enumerate(schema.arguments):
        place = -1 if argument.kwarg_only else position
        if is_tensor(argument.type) and position < 64 and not argument.kwarg_only:
            tensors |= 1 << position
        if argument.name == "generator":
            generator = (place, argument.name)
            flags |= KernelFlag.RANDOM
        if argument.alias_info is not None and argument.alias_info.is_write:
            aliases.update((name, len(written)) for name in argument.alias_info.before_set)
            written.append((place, argument.name))
            if argument.is_out:
                flags |= KernelFlag.RESIZES
    returns = []
    for index, result in enumerate(schema.returns):
        alias = next(iter(result.alias_info.before_set), None) if result.alias_info is not None else None
        returns.append(AS_IS if index in as_is else aliases.get(alias, FRESH) if alias is not None else FRESH)
    elsewhere = schema.name.removeprefix("aten::") not in _TAKES_NUMBERS and schema.name.startswith("aten::")
    return KernelPlan(name_of(op), tensors, generator, flags, tuple(written), tuple(returns), elsewhere)


def name_of(op: OpOverload) -> str:
    """The dispatcher's name of an overload: ``aten::add.Tensor``."""
    return str(op.name())  # type: ignore[no-untyped-call]


def overload(name: str) -> OpOverload:
    """The overload called ``aten::add.Tensor`` by the dispatcher."""
    namespace, _, rest = name.partition("::")
    base, _, variant = rest.partition(".")
    found = getattr(getattr(getattr(torch.ops, namespace), base), variant or "default")
    assert isinstance(found, OpOverload)
    return found
