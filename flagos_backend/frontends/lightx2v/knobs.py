"""The environment variables of the front end. Read where they take effect; README.md lists them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Final

#: Whether importing this package registers it.
AUTO_REGISTER: Final = "LIGHTX2V_FL_AUTO_REGISTER"
#: Whether FlagGems computes PyTorch's own operators in this process, too.
GLOBAL_GEMS: Final = "LIGHTX2V_FL_GLOBAL_GEMS"
#: Functions of FlagGems that are left to PyTorch then, separated by commas.
GEMS_UNUSED: Final = "LIGHTX2V_FL_GEMS_UNUSED"
#: Whether processes meet over the vendor's library though FlagCX is there.
DISABLE_FLAGCX: Final = "LIGHTX2V_FL_DISABLE_FLAGCX"
#: Whether ``use_compile`` of a configuration means this backend.
COMPILE: Final = "LIGHTX2V_FL_COMPILE"
#: The device type of torch to compute on.
DEVICE: Final = "LIGHTX2V_FL_DEVICE"

_VALUES = {"1": True, "true": True, "on": True, "yes": True, "0": False, "false": False, "off": False, "no": False}


def flag(name: str, *, default: bool, variables: Mapping[str, str] = os.environ) -> bool:
    """What a variable says; ``default`` where it is unset or empty. Raises RuntimeError for anything but yes and no."""
    text = variables.get(name, "").strip()
    if not text:
        return default
    value = _VALUES.get(text.lower())
    if value is None:
        raise RuntimeError(f"{name} is {text!r}, in the environment; it can be 1 or 0. Correct or unset it.")
    return value


def names(name: str, variables: Mapping[str, str] = os.environ) -> list[str]:
    """A list separated by commas. Raises RuntimeError for what cannot be the name of a function."""
    found = [part.strip() for part in variables.get(name, "").split(",") if part.strip()]
    for part in found:
        if not part.isidentifier():
            raise RuntimeError(
                f"{name} holds {part!r}, in the environment, which names no function of FlagGems. "
                "Give names as mm,softmax, separated by commas."
            )
    return found


def device_type(variables: Mapping[str, str] = os.environ) -> str:
    """The device type that was asked for, or "". Raises RuntimeError for what is none of torch's."""
    text = variables.get(DEVICE, "").strip()
    if text and not text.isidentifier():
        raise RuntimeError(
            f"{DEVICE} is {text!r}, in the environment; it takes a device type without a number, as cuda, npu, cpu or "
            "flagos. Each process gets its own device by LOCAL_RANK."
        )
    return text
