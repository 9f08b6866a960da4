"""Streams of a device that nobody else is given: for copies (devices/accelerator.py), and to capture graphs on
(runtime/accelerator/memory.py).

torch has 32 streams of a device and hands them out in turns, to the user's program too. Whoever captures on one of
those records what other threads enqueue there meanwhile, which then does not happen.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flagos_backend.process.torch_loading import torch

# The driver's handle of a new stream of the device of that ordinal; 0 where the library drives none.
MakeStream = Callable[[int], int]

_make: MakeStream | None = None


def make_with(make: MakeStream) -> None:
    """How streams are made from now on: by the native side, which opens the devices."""
    global _make
    _make = make


def own_stream(device: torch.device) -> Any:
    """A new stream of ``device``, which stays for good; one of torch's where the native side makes none."""
    module = torch.get_device_module(device)
    is_driven = device.type == "cuda" and torch.version.cuda is not None
    handle = _make(device.index) if _make is not None and is_driven else 0
    return module.ExternalStream(handle, device=device) if handle else module.Stream(device=device)
