"""What `import torch` calls at its end: makes the device flagos known when a backend is there for it.

Entry point group torch.backends. An exception from here would break `import torch`, so none leaves.
"""

from __future__ import annotations

import logging
import os
from typing import Final

#: `auto`: unless this process has another accelerator; `1`: always; `0`: never.
DEVICE_VARIABLE: Final = "FLAGOS_TORCH_DEVICE"

logger = logging.getLogger("flagos.torch")


def autoload() -> None:
    """Registers the device with PyTorch, or says in one line why not."""
    try:
        reason = enable(os.environ.get(DEVICE_VARIABLE, "auto"))
    except Exception as error:
        logger.warning("PyTorch starts without the device flagos: %s: %s", type(error).__name__, error)
        return
    if reason:
        logger.info("PyTorch starts without the device flagos: %s", reason)


def enable(choice: str = "1") -> str:
    """Registers the device; returns why it is not registered, "" where it is. ``choice``: as DEVICE_VARIABLE's."""
    import torch

    if choice not in ("auto", "0", "1"):
        raise ValueError(f"{DEVICE_VARIABLE} is {choice!r}; it can be auto, 0 or 1")
    if choice == "0":
        return f"{DEVICE_VARIABLE}=0"
    owner = torch._C._get_privateuse1_backend_name()
    if owner == "flagos":
        return ""
    if owner != "privateuseone":
        reason = f"the extension of device {owner!r} has PyTorch's one place for such devices"
        logger.warning('%s; torch.compile(backend="flagos") works all the same', reason)
        return reason
    if choice == "auto" and (other := other_accelerator()):
        return f"the accelerator of this process is {other}; {DEVICE_VARIABLE}=1 makes it flagos"

    from flagos_backend.torch.device import registration, verdict

    if not verdict.accepted():
        return "no backend is accepted; see `flagos doctor`"

    registration.register()
    return ""


def other_accelerator() -> str:
    """The type of an accelerator that PyTorch was built for and that is there; "" without one. Initializes none."""
    import torch

    other = torch.accelerator.current_accelerator()
    if other is None or not torch.get_device_module(other).device_count():
        return ""
    return other.type
