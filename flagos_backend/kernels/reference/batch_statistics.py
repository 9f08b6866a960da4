"""Batch norm's statistics in programs that PyTorch traced for another device than its cpu, and that the host computes.

PyTorch takes any other device for an accelerator, where the statistics of halves are float32, and known ones are handed
on to the backward pass. The host's kernels have them in the parameters' dtype, and hand on nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch

aten = torch.ops.aten

#: Return statistics at 1 and 2.
FORWARD: Final = frozenset(
    {
        *(aten.native_batch_norm, aten._native_batch_norm_legit_functional),
        *(aten._native_batch_norm_legit_no_training, aten._batch_norm_no_update),
    }
)
#: Take them.
BACKWARD: Final = frozenset({aten.native_batch_norm_backward, aten.batch_norm_backward})
STATISTICS: Final = frozenset({1, 2})


def handing_on(operator: Any) -> Callable[..., Any]:
    """An operator of FORWARD that returns the statistics which it was given."""
    places = _places(operator)

    def call(*arguments: Any, **keywords: Any) -> Any:
        results = operator(*arguments, **keywords)
        if results[1].numel() or not arguments[0].shape[1]:
            return results
        mean, variance = arguments[places["running_mean"]], arguments[places["running_var"]]
        variance = variance.to(torch.promote_types(variance.dtype, torch.float32))
        return results[0], mean.clone(), torch.rsqrt(variance + arguments[places["eps"]]), *results[3:]

    return call


def as_parameters(operator: Any) -> Callable[..., Any]:
    """An operator of BACKWARD that takes statistics in any dtype, on the host too."""
    places = _places(operator)
    parameters = [places[name] for name in ("weight", "running_mean", "running_var")]
    statistics = [number for name, number in places.items() if name.startswith("save_")]

    def call(*arguments: Any, **keywords: Any) -> Any:
        given = [arguments[number] for number in parameters if arguments[number] is not None]
        if given and given[0].device.type == "cpu":
            dtype = given[0].dtype
            arguments = tuple(a.to(dtype) if n in statistics and a is not None else a for n, a in enumerate(arguments))
        return operator(*arguments, **keywords)

    return call


def _places(operator: Any) -> dict[str, int]:
    return {argument.name: number for number, argument in enumerate(operator._schema.arguments)}
