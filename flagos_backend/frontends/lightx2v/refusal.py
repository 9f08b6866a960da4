"""What LightX2V's user is told of a call that a key cannot serve: the key, the fact, and the cure."""

from __future__ import annotations

from typing import Any, NoReturn

import torch


def refuse(key: str, fact: str, cure: str, kind: type[Exception] = ValueError) -> NoReturn:
    """Raises ``kind``: ValueError for sizes and values, TypeError for dtypes, RuntimeError for what a device lacks."""
    raise kind(f"{key}: {fact}. {cure}")


def floats(key: str, **tensors: Any) -> None:
    """Refuses what is no tensor of floats of 16 bits or more, and tensors on different devices."""
    devices = set()
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor):
            refuse(key, f"{name} is a {type(tensor).__name__}", "Pass a tensor.", TypeError)
        if not tensor.is_floating_point() or tensor.element_size() < 2:
            refuse(key, f"{name} is of {tensor.dtype}", "Pass float32, bfloat16 or float16.", TypeError)
        devices.add(tensor.device)
    if len(devices) > 1:
        places = ", ".join(f"{name} on {tensor.device}" for name, tensor in tensors.items())
        refuse(key, f"its tensors lie apart: {places}", "Move them to one device.", RuntimeError)
