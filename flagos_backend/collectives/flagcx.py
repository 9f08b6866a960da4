"""When FlagCX only passes the collectives of a group on to NCCL, as read in its sources (v0.12, v0.13, 0c72129:
flagcx/flagcx.cc, runner/homo_runner.cc). Its module for PyTorch does not say. For context_peers.py."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Final

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


def unlike_nccl(makers: Iterable[str]) -> str:
    """Why a group of devices of these makers (FlagGems' names) is more to FlagCX than one of NCCL, or ""."""
    found = _settings()
    for name in _SETTINGS:
        if found.get(name, "") not in _OFF:
            return f"{name} is {found[name]}"
    names = sorted(set(makers))
    return "" if names == ["nvidia"] else f"FlagCX joins devices of {', '.join(names)}"


def _settings() -> dict[str, str]:
    """The environment, and what FlagCX adds to it from its files."""
    found = dict(os.environ)
    for file in (Path.home() / ".flagcx.conf", Path("/etc/flagcx.conf")):
        with contextlib.suppress(OSError):
            for line in file.read_text(errors="replace").splitlines():
                name, _, value = line.partition("=")
                found.setdefault(name, value)
    return found
