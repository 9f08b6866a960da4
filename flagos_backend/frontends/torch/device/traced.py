"""What PyTorch traces for tensors on the device: it takes any device but its cpu for an accelerator, whose norms return
other statistics than the host's, and lets images of an unknown one be row-major. Tracing says what the inner device
returns."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch._decomp import decomposition_table
from torch._subclasses.fake_impls import op_implementations_dict

from flagos_backend.frontends.torch.corrected import BATCH_NORMS, IMAGE_OPERATORS
from flagos_backend.frontends.torch.device import checkpoints
from flagos_backend.frontends.torch.device.generator import DeviceGenerator
from flagos_backend.frontends.torch.device.opening import DEVICE_TYPE
from flagos_backend.frontends.torch.recurrent import CELLS
from flagos_backend.frontends.torch.tracing import when_loaded

aten = torch.ops.aten


def install() -> None:
    """Once, when the device is registered. Nothing changes for tensors of other devices."""
    for target in IMAGE_OPERATORS:
        op_implementations_dict[target] = _corrected(target, op_implementations_dict.get(target, _unknown), first=2)
    for target in (*BATCH_NORMS, aten.native_layer_norm.default):
        if target in decomposition_table:
            decomposition_table[target] = _corrected(target, decomposition_table[target])
        if target in op_implementations_dict:  # takes the mode and the operator first
            op_implementations_dict[target] = _corrected(target, op_implementations_dict[target], first=2)
    for target, cell in CELLS.items():
        op_implementations_dict.setdefault(target, _of_parts(cell))
    when_loaded("torch._dynamo.variables.builder", _break_at_generators)
    when_loaded("torch._prims.rng_prims", checkpoints.install)


def _corrected(target: Any, original: Callable[..., Any], first: int = 0) -> Callable[..., Any]:
    """A rule of PyTorch's for tensors without data, the input being its argument number ``first``."""

    @functools.wraps(original)  # PyTorch goes by its name
    def rule(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        if args[first].device.type != DEVICE_TYPE:
            return result
        # Imported where there is such a tensor: it takes the backend, and much of PyTorch that not every program needs.
        from flagos_backend.frontends.torch.compile.corrections import corrected

        return corrected(target, args[first:], result)

    return rule


def _unknown(_mode: Any, _operator: Any, *_args: Any, **_kwargs: Any) -> Any:
    """The rule of an operator that PyTorch has none for: its own function for meta tensors."""
    return NotImplemented


def _of_parts(cell: Callable[..., Any]) -> Callable[..., Any]:
    """A cell for tensors of the device without data; PyTorch's own rules know no cell without biases, nor GRU's."""

    def rule(mode: Any, _operator: Any, *args: Any, **kwargs: Any) -> Any:
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
        if not tensors or tensors[0].device.type != DEVICE_TYPE:
            return NotImplemented
        with mode:
            return cell(*args, **kwargs)

    return rule


def _break_at_generators(builder: Any) -> None:
    """Has Dynamo leave what draws from a generator of the device to eager mode, as for PyTorch's generators. Those it
    knows by their type alone; another one it would trace without what it is."""
    rule = builder.VariableBuilder.wrap_user_defined
    for with_numpy in (True, False):  # a table for each
        with builder.config.patch(trace_numpy=with_numpy):
            builder.VariableBuilder._type_dispatch()[DeviceGenerator] = rule
