"""Operators of lists of tensors, as optimizers call them, taken apart: an operator for each tensor, which fuse. For
decompositions.py."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch

aten = torch.ops.aten
_PREFIX = "aten::_foreach_"
# Operators of one tensor that have another name than those of a list.
_OF_ONE: Mapping[str, Callable[..., Any]] = {
    "addcdiv": lambda x, y, z, value=1: aten.addcdiv(x, y, z, value=value),
    "addcmul": lambda x, y, z, value=1: aten.addcmul(x, y, z, value=value),
    "minimum": lambda x, y: aten.clamp_max(x, y) if isinstance(y, int | float) else aten.minimum(x, y),
    "maximum": lambda x, y: aten.clamp_min(x, y) if isinstance(y, int | float) else aten.maximum(x, y),
    "norm": lambda x, ord=2, dtype=None: aten.linalg_vector_norm(x, ord, dtype=dtype),
    "zero": lambda x: aten.zeros_like(x),
}


@functools.cache
def foreach_decompositions() -> Mapping[Any, Callable[..., Any]]:
    """By overload: of those that return a list of tensors, each made of the tensors at one place in the lists."""
    found: dict[Any, Callable[..., Any]] = {}
    for name in torch._C._dispatch_get_all_op_names():
        if not name.startswith(_PREFIX):
            continue
        packet, _, overload = name.removeprefix("aten::").partition(".")
        target = getattr(getattr(aten, packet), overload or "default")
        results = [str(result.type) for result in target._schema.returns]
        one = _of_one(packet.removeprefix("_foreach_"))
        if one is not None and results == ["List[Tensor]"] and not target._schema.is_mutable:
            found[target] = _apart(target, one)
    return found


def _of_one(name: str) -> Callable[..., Any] | None:
    known = _OF_ONE.get(name)
    return known if known is not None else getattr(aten, name, None)


def _apart(target: Any, one: Callable[..., Any]) -> Callable[..., Any]:
    lists = {argument.name for argument in target._schema.arguments if str(argument.type).startswith("List[")}
    order = [argument.name for argument in target._schema.arguments]
    first = next(name for name in order if name in lists)

    def decomposition(*operands: Any, **keywords: Any) -> list[Any]:
        given = dict(zip(order, operands, strict=False)) | keywords
        count = len(given[first])
        return [
            one(
                *(given[n][number] if n in lists else given[n] for n in order[: len(operands)]),
                **{n: v[number] if n in lists else v for n, v in keywords.items()},
            )
            for number in range(count)
        ]

    return decomposition
