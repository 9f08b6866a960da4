"""What the device has not: refused by name, in PyTorch's words where it has some."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from flagos_backend.frontends.torch.device.generator import is_of_device
from flagos_backend.frontends.torch.device.opening import DEVICE_TYPE


def refuse_layout(layout: str) -> Callable[..., NoReturn]:
    """A fallback for operators on tensors of a layout: names the operator."""

    def refuse(op: Any, *_args: Any, **_kwargs: Any) -> NoReturn:
        raise NotImplementedError(
            f"{op}: {layout} tensors are not available on device '{DEVICE_TYPE}'. Use strided tensors there, or move "
            f"this part to the cpu."
        )

    return refuse


def refuse_operator(name: str, reason: str) -> Callable[..., NoReturn]:
    """A kernel for an operator that the device will not have."""

    def refuse(*_args: Any, **_kwargs: Any) -> NoReturn:
        raise NotImplementedError(f"{name} is not available on device '{DEVICE_TYPE}': {reason}")

    return refuse


def no_nested_tensor(_tensor: Tensor, _mask: Tensor) -> bool:
    """aten::_nested_tensor_from_mask_left_aligned: no mask is one that a nested tensor can be made by on the device.
    Encoders ask, and compute with padded rows then."""
    return False


def refuse_devices(
    name: str, argument_names: Sequence[str], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> NoReturn:
    """Raises PyTorch's error for operands on several devices; names the first that differs."""
    here = torch.device(DEVICE_TYPE, 0)
    named = [*zip(argument_names, args, strict=False), *kwargs.items()]
    for argument, value in named:
        for tensor in value if isinstance(value, list | tuple) else (value,):
            if isinstance(tensor, Tensor) and tensor.device.type != DEVICE_TYPE:
                raise RuntimeError(
                    "Expected all tensors to be on the same device, but found at least two devices, "
                    f"{here} and {tensor.device}! (when checking argument for argument {argument} in method {name})"
                )
    raise RuntimeError(f"Expected all tensors to be on the same device (in method {name})")


def refuse_ordinal(name: str, device: torch.device) -> None:
    """Raises for a device of this type that is not there; others are no matter of this one."""
    if device.type == DEVICE_TYPE:
        raise RuntimeError(f"{name}: invalid device ordinal: {device}; there is {DEVICE_TYPE}:0 only")


def check_generator(generator: torch.Generator) -> None:
    """Raises PyTorch's error for a generator of another device."""
    if not is_of_device(generator):
        found = torch.device(generator.device).type
        raise RuntimeError(f"Expected a '{DEVICE_TYPE}' device type for generator but found '{found}'")
