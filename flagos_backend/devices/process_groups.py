"""What torch.distributed carries collectives over: the backend for a kind of memory, and what its errors say. For
``collectives``, which compiled programs meet through, and for PyTorch's device."""

from __future__ import annotations

import importlib
import os
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _DistributedBackendOptions

from flagos_backend.devices import flagcx

BACKEND_VARIABLE: Final = "FLAGOS_COLLECTIVE_BACKEND"
FLAGCX: Final = "flagcx"
_REASON_LENGTH: Final = 400


def wanted_backend() -> str:
    """The backend of torch.distributed to meet over; "": as it comes."""
    return os.environ.get(BACKEND_VARIABLE, "").strip().lower()


def backend_for(device_type: str) -> str:
    """The backend of torch.distributed for torch's devices of this type: what the user names, else FlagCX where it is
    there for them. Raises RuntimeError when there is none or it does not load."""
    wanted = wanted_backend()
    if wanted in ("", FLAGCX):
        _load_flagcx()
    able, default = dist.Backend.backend_capability, dist.Backend.default_device_backend_map
    if wanted:
        if device_type not in able.get(wanted, ()):
            raise RuntimeError(
                f"{BACKEND_VARIABLE} is {wanted}, which torch.distributed does not have for {device_type}"
            )
        return wanted
    if device_type in able.get(FLAGCX, ()):
        return FLAGCX
    if device_type not in default:
        raise RuntimeError(f"torch.distributed has no backend for {device_type}")
    return default[device_type]


def _load_flagcx() -> None:
    """FlagCX's module registers its backend itself. One that is installed and broken is no reason to go on without: the
    other processes may have one that works."""
    if FLAGCX in dist.Backend.backend_list or not flagcx.find():
        return
    try:
        importlib.import_module(FLAGCX)
    except (ImportError, OSError) as error:
        raise RuntimeError(
            f"FlagCX is installed but does not load ({reason_of(error)}); with {BACKEND_VARIABLE} another is taken"
        ) from error


def make_backend(backend: str, store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    """A backend of torch.distributed without a group of the user's around it."""
    if backend == "gloo":
        return dist.ProcessGroupGloo(store, rank, size, timeout)
    if backend == "nccl":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        return dist.ProcessGroupNCCL(store, rank, size, options)
    plugin = dist.Backend._plugins[backend.upper()]
    if not plugin.extended_api:
        return plugin.creator_fn(store, rank, size, timeout)
    facts = _DistributedBackendOptions()
    facts.store, facts.group_rank, facts.group_size, facts.timeout = store, rank, size, timeout
    return plugin.creator_fn(facts, None)


def backend_of(group: dist.ProcessGroup, *device_types: str) -> Any:
    """A group's backend for torch's devices of the first of these types that it has one for; None without any."""
    known = {device.type for device in group._device_types}
    found = next((name for name in device_types if name in known), None)
    return None if found is None else group._get_backend(torch.device(found))


def reason_of(error: Exception) -> str:
    """What torch.distributed says, on one line: some backends name the place on the first and the cause on the next.
    Without the stack that PyTorch may add."""
    text = str(error).partition("Exception raised from ")[0]
    line = "; ".join(part.strip().rstrip(".,;:") for part in text.splitlines() if part.strip())
    return line if len(line) <= _REASON_LENGTH else line[: _REASON_LENGTH - 1] + "…"


def is_late(reason: str) -> bool:
    """Whether a timeout has passed. Transports say it in words only."""
    return "timed out" in reason.lower() or "timeout" in reason.lower()


def members_text(kind: str, members: Sequence[int]) -> str:
    """Members of a group as messages name them."""
    return f"{'processes' if kind == 'process' else 'devices'} {list(members)}"
