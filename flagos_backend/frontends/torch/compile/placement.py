"""Where the tensors of a graph are: on the host, on an accelerator, or on the device flagos over the memory of either.

A program sees the memory of its device context and no devices; what belongs to a device is done at the border. For
program.py and executable.py.
"""

from __future__ import annotations

import torch

from flagos_backend.frontends.torch.compile.device_contexts import FLAGOS, HOST, DeviceContext, find


def is_supported(device: torch.device) -> bool:
    """Whether programs reach the memory of the device's tensors."""
    return device.type in (HOST, FLAGOS) or (device.type != "meta" and find(device) is not None)


def computes_on_host(device: torch.device) -> bool:
    """Whether PyTorch's own kernels for the device are those of the CPU."""
    return inner_device(device).type == HOST


def inner_device(device: torch.device) -> torch.device:
    """Whose kernels compute for the device."""
    if device.type != FLAGOS:
        return device
    # Imported where there is such a tensor: the package registers the device.
    from flagos_backend.frontends.torch.device.runtime import runtime

    return runtime().inner


def is_flagos(value: object) -> bool:
    """Whether the value is a tensor on the device flagos, perhaps one without data."""
    return isinstance(value, torch.Tensor) and value.device.type == FLAGOS


def lies_at(device: torch.device, device_context: DeviceContext) -> bool:
    """Whether tensors of ``device`` lie in the memory of ``device_context``, under whatever name."""
    return device.type == FLAGOS or device == device_context.torch_device


def move(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The tensor on ``device``; over the same memory where it lies there under another name."""
    if device.type != FLAGOS:
        return tensor.to(device)
    # Imported where there is such a tensor: the package registers the device.
    from flagos_backend.frontends.torch.device.memory import wrap
    from flagos_backend.frontends.torch.device.runtime import runtime

    return wrap(tensor.to(runtime().inner))
