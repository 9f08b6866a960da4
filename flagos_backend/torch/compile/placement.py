"""Where the tensors of a graph are: in host memory, as PyTorch's own or as those of the device flagos over it.

A program sees memory and no devices; what belongs to a device is done at the border. For program.py and executable.py.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

HOST, FLAGOS = "cpu", "flagos"

_drawing = threading.Lock()


def is_supported(device: torch.device) -> bool:
    """Whether programs reach the memory of the device's tensors."""
    return device.type in (HOST, FLAGOS)


def is_flagos(value: object) -> bool:
    """Whether the value is a tensor on the device flagos, perhaps one without data."""
    return isinstance(value, torch.Tensor) and value.device.type == FLAGOS


def wrap(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor on the device flagos over the memory of a host tensor."""
    # Imported where there is such a tensor: the package registers the device.
    from flagos_backend.torch.device import memory

    return memory.wrap(tensor)


@contextmanager
def drawing_on_flagos() -> Iterator[None]:
    """Has random numbers of the host drawn from the generator of the device flagos."""
    from flagos_backend.torch.device.api import random

    (generator,) = random.default_generators()
    host = torch.default_generator
    with _drawing:
        kept = host.get_state()
        host.set_state(generator.get_state())
        try:
            yield
        finally:
            generator.set_state(host.get_state())
            host.set_state(kept)
