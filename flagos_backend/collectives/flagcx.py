"""When FlagCX only passes the collectives of a group on to NCCL, as read in its sources (v0.12, v0.13, 0c72129:
flagcx/flagcx.cc, runner/homo_runner.cc). Its module for PyTorch does not say. For context_peers.py."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Final

from flagos_backend.devices.target import facts_of

# With these it goes through the host or its own threads, has its own kernels, measures its calls, or calls another
# library.
_SETTINGS: Final = (
    "FLAGCX_USE_HETERO_COMM",
    "FLAGCX_USE_HOST_COMM",
    "FLAGCX_CLUSTER_SPLIT_LIST",
    "FLAGCX_USE_TUNER",
    "FLAGCX_CUSTOM_OP_ENABLE",
    "FLAGCX_CCL_ADAPTOR_PLUGIN",
    "FLAGCX_DEVICE_ADAPTOR_PLUGIN",
)
_OFF: Final = frozenset({"", "0", "none"})


def unlike_nccl(vendor: str) -> str:
    """Why FlagCX does more than to call NCCL for a device of this vendor (FlagGems' name), as this process is set up,
    or "". Of a group all members have to say "" to it."""
    found = _settings()
    for name in _SETTINGS:
        if found.get(name, "") not in _OFF:
            return f"{name} is {found[name]}"
    return "" if facts_of(vendor).nccl else f"FlagCX calls another library for devices of {vendor}"


def _settings() -> dict[str, str]:
    """The environment, and what FlagCX adds to it from its files."""
    found = dict(os.environ)
    for file in ("~/.flagcx.conf", "/etc/flagcx.conf"):
        with contextlib.suppress(OSError, RuntimeError):  # or there is no home
            for line in Path(file).expanduser().read_text(errors="replace").splitlines():
                name, _, value = line.partition("=")
                found.setdefault(name, value)
    return found
