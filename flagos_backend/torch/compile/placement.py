"""Where the tensors of a graph are: on the host, on an accelerator, or on the device flagos over the memory of either.

A program sees the memory of its site and no devices; what belongs to a device is done at the border. For program.py and
executable.py.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from flagos_backend.torch.compile.sites import FLAGOS, HOST, Site, find

# Held again where a launch calls back what launches another program.
_drawing = threading.RLock()
_draws_already = False


def is_supported(device: torch.device) -> bool:
    """Whether programs reach the memory of the device's tensors."""
    return device.type in (HOST, FLAGOS) or (device.type != "meta" and find(device) is not None)


def computes_on_host(device: torch.device) -> bool:
    """Whether PyTorch's own kernels for the device are those of the CPU."""
    if device.type != FLAGOS:
        return device.type == HOST
    # Imported where there is such a tensor: the package registers the device.
    from flagos_backend.torch.device.runtime import runtime

    return runtime().inner.type == HOST


def is_flagos(value: object) -> bool:
    """Whether the value is a tensor on the device flagos, perhaps one without data."""
    return isinstance(value, torch.Tensor) and value.device.type == FLAGOS


def lies_at(device: torch.device, site: Site) -> bool:
    """Whether tensors of ``device`` lie in the memory of ``site``, under whatever name."""
    return device.type == FLAGOS or device == site.torch_device


def move(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The tensor on ``device``; over the same memory where it lies there under another name."""
    if device.type != FLAGOS:
        return tensor.to(device)
    # Imported where there is such a tensor: the package registers the device.
    from flagos_backend.torch.device.memory import wrap
    from flagos_backend.torch.device.runtime import runtime

    return wrap(tensor.to(runtime().inner))


@contextmanager
def drawing_on_flagos() -> Iterator[None]:
    """Has random numbers of the inner device drawn from the generator of the device flagos.

    PyTorch's operators that draw without being given a generator take the inner device's own, whose state is put aside
    meanwhile: what other threads draw from it then is not what they would have drawn.
    """
    global _draws_already
    from flagos_backend.torch.device.api import random
    from flagos_backend.torch.device.runtime import runtime

    (generator,) = random.default_generators()
    inner = _default_generator(runtime().inner)
    with _drawing:
        if _draws_already:
            yield
            return
        kept = inner.get_state()
        inner.set_state(generator.get_state())
        _draws_already = True
        try:
            yield
        finally:
            _draws_already = False
            generator.set_state(inner.get_state())
            inner.set_state(kept)


def _default_generator(device: torch.device) -> torch.Generator:
    if device.type == HOST:
        return torch.default_generator
    generator: torch.Generator = torch.get_device_module(device).default_generators[device.index]
    return generator
