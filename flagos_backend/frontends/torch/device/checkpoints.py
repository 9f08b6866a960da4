"""Random numbers that a compiled checkpoint draws again: PyTorch's two operators for them know devices by a list, which
this device is not on."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch._C import DispatchKey
from torch._subclasses.fake_tensor import FakeTensorMode

from flagos_backend.frontends.torch.device.api.random import get_rng_state, set_rng_state
from flagos_backend.frontends.torch.device.opening import DEVICE_TYPE

_Rule = Callable[..., Any]


def install(operators: Any) -> None:
    """Teaches the operators of torch._prims.rng_prims. Nothing changes for tensors of other devices."""
    saving, again = operators.run_and_save_rng_state, operators.run_with_rng_state
    for operator, rule in ((saving, _run_and_save), (again, _run_again)):
        kernels = operator.py_kernels
        kernels[DispatchKey.BackendSelect] = _also_here(kernels[DispatchKey.BackendSelect], rule)
    # The other one is traced as what it runs, on any device.
    traced, key = _tracing(saving)
    traced[key] = _also_here(traced[key], _run_and_save)


def _run_and_save(op: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Tensor, Any]:
    """The state that an operator draws from, and what it returns."""
    return get_rng_state(), op(*args, **kwargs)


def _run_again(state: Tensor, op: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What an operator returns that draws from ``state``."""
    current = get_rng_state()
    set_rng_state(state)
    try:
        return op(*args, **kwargs)
    finally:
        set_rng_state(current)


def _tracing(operator: Any) -> tuple[Any, Any]:
    """The table, and its key, of the rule by which an operator is traced."""
    from torch._higher_order_ops import utils

    table = getattr(utils, "registered_hop_fake_fns", {})
    return (table, operator) if operator in table else (operator.python_key_table, FakeTensorMode)


def _also_here(original: _Rule, rule: _Rule) -> _Rule:
    """A kernel, or a rule for tensors without data, that goes by another one for tensors of the device."""

    def kernel(*given: Any, **kwargs: Any) -> Any:
        places = [torch.device(kwargs["device"])] if kwargs.get("device") else []
        places += [value.device for value in given if isinstance(value, Tensor)]
        if not any(place.type == DEVICE_TYPE for place in places):
            return original(*given, **kwargs)
        traces = isinstance(given[0], FakeTensorMode)
        with given[0] if traces else nullcontext():
            return rule(*(given[1:] if traces else given), **kwargs)

    return kernel
