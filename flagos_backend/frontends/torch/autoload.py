"""What `import torch` calls at its end: makes the device flagos known, whose first use says why it cannot be used.

Entry point group torch.backends. An exception from here would break `import torch`, so none leaves.
"""

from __future__ import annotations

import importlib.util
import logging
import os
from importlib import metadata
from typing import Final

from flagos_backend.devices.simulated import SIMULATED

#: `auto`: unless this process has another accelerator; `1`: always; `0`: never.
DEVICE_VARIABLE: Final = "FLAGOS_TORCH_DEVICE"

#: FlagOS' other package with a device, a backend of Dynamo's and one of torch.distributed's called flagos. PyTorch ends
#: the process where two packages have kernels for PrivateUse1.
_SAME_NAMES: Final = "torch_fl"

logger = logging.getLogger("flagos.torch")


def autoload() -> None:
    """Registers the device with PyTorch, or says in one line why not."""
    if os.environ.get("FLAGOS_DEVICE") == SIMULATED:
        # Triton reads it when it is imported, which torch.compile does before the device is used.
        os.environ.setdefault("TRITON_INTERPRET", "1")
    try:
        reason = enable(os.environ.get(DEVICE_VARIABLE, "auto"))
    except Exception as error:
        logger.warning("PyTorch starts without the device flagos: %s: %s", type(error).__name__, error)
        return
    if reason:
        logger.info("PyTorch starts without the device flagos: %s", reason)


def enable(choice: str = "1") -> str:
    """Registers the device; returns why it cannot be used, "" where it can. ``choice``: as DEVICE_VARIABLE's."""
    import torch

    from flagos_backend.frontends.torch.device.opening import is_registered

    if choice not in ("auto", "0", "1"):
        raise ValueError(f"{DEVICE_VARIABLE} is {choice!r}; it can be auto, 0 or 1")
    if choice == "0":
        return f"{DEVICE_VARIABLE}=0"
    owner = torch._C._get_privateuse1_backend_name()
    if is_registered():
        return "" if torch.get_device_module(owner).is_available() else "no backend is accepted; see `flagos doctor`"
    if owner != "privateuseone":
        reason = f"the extension of device {owner!r} has PyTorch's one place for such devices"
        # torch_fl has this project's name in Dynamo, too.
        backend = "flagos_backend.torch.compile.backend.flagos" if owner == "flagos" else '"flagos"'
        logger.warning("%s; torch.compile(backend=%s) works all the same", reason, backend)
        return reason
    if choice == "auto" and importlib.util.find_spec(_SAME_NAMES) is not None:
        return f"{_SAME_NAMES} is installed, whose device has the same name; {DEVICE_VARIABLE}=1 gives it to this one"
    if choice == "auto" and (other := other_accelerator()):
        return f"the accelerator of this process is {other}; {DEVICE_VARIABLE}=1 makes it flagos"

    from flagos_backend.frontends.torch.device import registration, verdict

    accepted = verdict.accepted()
    if accepted or not _others_may_come():
        registration.register(accepted=accepted)  # without a backend too: its first use then says why there is none
    return "" if accepted else "no backend is accepted; see `flagos doctor`"


def _others_may_come() -> bool:
    """Whether another package has a device that `import torch` makes known. PyTorch's one place is left to it."""
    return any(entry.name != "flagos" for entry in metadata.entry_points(group="torch.backends"))


def other_accelerator() -> str:
    """The type of an accelerator that PyTorch was built for and that is there; "" without one. Initializes none."""
    import torch

    other = torch.accelerator.current_accelerator()
    if other is None or not torch.get_device_module(other).device_count():
        return ""
    return other.type
