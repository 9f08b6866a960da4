"""Tensors that change their device in place: parameters that Module.to moves, and tensors whose data is set."""

from __future__ import annotations

import functools
import warnings
from typing import Any, Final

import torch
from torch.nn.parameter import UninitializedParameter
from torch.utils.weak import WeakIdKeyDictionary

from flagos_backend.frontends.torch.device.opening import DEVICE_TYPE

_HOOKS: Final = ("_backward_hooks", "_post_accumulate_grad_hooks")


def install() -> None:
    """Once, when the device is registered. Nothing changes between other devices."""
    torch.nn.Module._apply = _keeping_parameters(torch.nn.Module._apply)  # type: ignore[method-assign]


def install_opened() -> None:
    """Once, when the device is opened."""
    tensor: Any = torch.Tensor
    tensor.data = _settable(tensor.data)


def _is_here(tensor: torch.Tensor) -> bool:
    return tensor.device.type == DEVICE_TYPE


def _settable(original: Any) -> property:
    """``tensor.data = tensor.data.to("flagos")``: PyTorch sets data across devices that it knows only."""
    set_same = original.__set__

    def set_data(self: torch.Tensor, data: Any) -> None:
        crosses = isinstance(data, torch.Tensor) and _is_here(self) != _is_here(data)
        if not crosses or torch.overrides.has_torch_function((self, data)):
            set_same(self, data)
        else:
            _set_data(self, data)

    return property(original.__get__, set_data, doc=original.__doc__)


def _set_data(tensor: torch.Tensor, data: torch.Tensor) -> None:
    if not tensor.is_leaf:
        raise RuntimeError(
            f"cannot set the data of a tensor on {tensor.device} to a tensor on {data.device} when a graph made it: "
            f"use tensor.to({str(data.device)!r})"
        )
    moved = data.detach().requires_grad_(tensor.requires_grad)
    if isinstance(tensor, torch.nn.Parameter):
        moved = torch.nn.Parameter(moved, tensor.requires_grad)
    if tensor.grad is not None:
        moved.grad = tensor.grad.to(data.device, data.dtype)
    try:
        _exchange(tensor, moved)
    except RuntimeError as error:
        raise RuntimeError(
            f"cannot set the data of a tensor on {tensor.device} to a tensor on {data.device}, since something else "
            f"rests on it: {error}"
        ) from error


def _keeping_parameters(original: Any) -> Any:
    """Module._apply moves parameters between devices that it knows in place; to and from this one, it would replace
    them, and optimizers and tied weights would keep the old ones."""

    @functools.wraps(original)
    def _apply(self: torch.nn.Module, fn: Any, recurse: bool = True) -> torch.nn.Module:
        before = {name: parameter for name, parameter in self._parameters.items() if parameter is not None}
        original(self, fn, recurse)
        for name, parameter in before.items():
            moved = self._parameters[name]
            if (
                moved is not None
                and moved is not parameter
                and (moved.device.type == DEVICE_TYPE) != (parameter.device.type == DEVICE_TYPE)
            ):
                del moved
                _move_in_place(self, name, parameter)
        return self

    return _apply


def _move_in_place(module: torch.nn.Module, name: str, parameter: torch.nn.Parameter) -> None:
    """Has a parameter take the place and the contents of the one that replaced it."""
    moved = module._parameters[name]
    assert moved is not None
    if isinstance(parameter, UninitializedParameter):  # what replaced it has a size, and so would never get its own
        unsized: Any = UninitializedParameter  # PyTorch types it as a Parameter, which takes its data
        moved = module._parameters[name] = unsized(parameter.requires_grad, moved.device, moved.dtype)
        assert moved is not None
    try:
        _exchange(parameter, moved)
    except RuntimeError as error:
        module._parameters[name] = _replacement(f"{type(module).__name__}.{name}", parameter, moved, error)
        return
    module._parameters[name] = parameter


def _exchange(tensor: torch.Tensor, moved: torch.Tensor) -> None:
    """Gives a tensor the contents of ``moved`` and its gradient; its class, attributes and hooks stay.

    Raises RuntimeError where something else rests on what it was: a weak reference, or a graph.
    """
    gradient, moved.grad = moved.grad, None
    held, tensor.grad = tensor.grad, None
    hooks = {name: getattr(tensor, name) for name in _HOOKS if getattr(tensor, name)}
    for name in hooks:
        setattr(tensor, name, None)
    class_: type[torch.Tensor] = type(tensor)
    try:
        torch.utils.swap_tensors(tensor, moved)  # type: ignore[no-untyped-call]
        if type(tensor) is torch.nn.Parameter is not class_:
            tensor.__class__ = class_  # type: ignore[assignment]
        tensor.__dict__, moved.__dict__ = moved.__dict__, tensor.__dict__
        tensor.grad = gradient
    except RuntimeError:
        tensor.grad, moved.grad = held, gradient
        raise
    finally:  # again: PyTorch keeps them with the contents, too
        for name, kept in hooks.items():
            setattr(tensor, name, kept)


#: Parameters that could not be moved in place, and what stands for them.
_replaced: WeakIdKeyDictionary = WeakIdKeyDictionary()


def _replacement(
    place: str, parameter: torch.nn.Parameter, moved: torch.nn.Parameter, reason: Exception
) -> torch.nn.Parameter:
    """What replaces a parameter: the same in all modules that share it."""
    known = _replaced.get(parameter)  # type: ignore[no-untyped-call]
    if isinstance(known, torch.nn.Parameter) and (known.device, known.dtype) == (moved.device, moved.dtype):
        return known
    _replaced[parameter] = moved
    message = f"{place} was replaced, not moved in place, so an optimizer may hold the old one: {reason}"
    warnings.warn(message, stacklevel=4)
    return moved
