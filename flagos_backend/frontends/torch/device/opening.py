"""Whether PyTorch knows the device, and whether it has been used: its first use opens it.

What opens it, registration.py says; who uses the device asks here, and so needs nothing of what that brings.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final

import torch

from flagos_backend.frontends.torch.device.errors import DeviceUnavailable

#: The name of the device's type, as PyTorch's users write it.
DEVICE_TYPE: Final = "flagos"

_lock = threading.RLock()
_opener: Callable[[], None] | None = None
_is_open = False
_is_accepted = False
_waiting: list[Callable[[], None]] = []


def is_registered() -> bool:
    """Whether PyTorch knows the device. Another package may have given its own device the name."""
    return _opener is not None


def is_open() -> bool:
    """Whether the device has been used."""
    return _is_open


def is_accepted() -> bool:
    """Whether a backend is there for the device."""
    return _is_accepted or _is_open


def opens_by(opener: Callable[[], None], *, accepted: bool) -> None:
    """Says what loads the backend and registers the device's operators, and whether a backend is there for it. Without
    one the opener raises DeviceUnavailable."""
    global _opener, _is_accepted
    _opener, _is_accepted = opener, accepted


def open_device() -> None:
    """Loads the backend and registers the device's operators; a second call does nothing.

    Raises DeviceUnavailable with the loader's reason.
    """
    global _is_open
    with _lock:
        if _is_open:
            return
        if _opener is None:
            raise DeviceUnavailable(reason=f"PyTorch does not know the device {DEVICE_TYPE}; see `flagos doctor`.")
        # Registering must see the dispatcher as a plain program does, whatever called for the device.
        with torch.utils._python_dispatch._disable_current_modes(), torch._C.DisableTorchFunction():
            _opener()
        _is_open = True
        while _waiting:
            _waiting.pop(0)()


def when_open(action: Callable[[], None]) -> None:
    """Calls ``action`` once the device is open: now, or at the end of what opens it."""
    with _lock:
        if _is_open:
            action()
        else:
            _waiting.append(action)
