"""Turns FlagGems for eager programs on and off: the context manager, and the variables. Front ends call it by name."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import logging
import os
import sys
import threading
from collections.abc import Collection, Mapping
from types import TracebackType
from typing import Any, Final, Self

import torch

from flagos_backend import environment
from flagos_backend.devices.simulated import SIMULATED
from flagos_backend.devices.vendors import VENDORS
from flagos_backend.errors import FlagosBackendError
from flagos_backend.frontends.torch.device import opening
from flagos_backend.gems.patching import OperatorReport, Patch, Place, operators
from flagos_backend.kernels.flaggems import loading
from flagos_backend.kernels.policy import Policy

#: Whether FlagGems computes the operators of every eager program.
VARIABLE: Final = "FLAGOS_GLOBAL_GEMS"
_DEVICE: Final = "FLAGOS_DEVICE"

logger = logging.getLogger("flagos.gems")

_lock = threading.RLock()
# Those that are on, the innermost last: it alone is installed.
_active: list[gems] = []


class gems:
    """Within it FlagGems computes the operators of eager programs on accelerators, in all threads.

    ``allow``, ``deny``: the only operators, or those not, in the place of FLAGOS_FLAGOS_WHITELIST and
    FLAGOS_FLAGOS_BLACKLIST; by FlagGems' names or ATen's. Of several that are on the one begun last counts.
    Raises ValueError for names that FlagGems does not know, and, when it begins, RuntimeError where FlagGems cannot
    compute.
    """

    def __init__(self, *, allow: Collection[str] | None = None, deny: Collection[str] | None = None) -> None:
        if allow is not None and deny is not None:
            raise ValueError("gems takes allow or deny, not both: what is not allowed is denied")
        self._allow, self._deny = _known("allow", allow), _known("deny", deny)
        self._patches: list[Patch] = []

    def __enter__(self) -> Self:
        with _lock:
            policy = self._policy()
            patches = [Patch(place, policy) for place in _places()]
            before = _active[-1] if _active else None
            if before is not None:
                before._remove()
            try:
                for patch in patches:
                    patch.install()
            except BaseException:
                for patch in patches:
                    patch.remove()
                if before is not None:
                    before._install()
                raise
            self._patches = patches
            _active.append(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with _lock:
            innermost = _active[-1] is self
            _active.remove(self)
            if innermost:
                self._remove()
                if _active:
                    _active[-1]._install()

    def reports(self) -> Mapping[str, OperatorReport]:
        """What became of the calls so far, by FlagGems' name of the operator."""
        return {name: report for patch in self._patches for name, report in patch.reports.items()}

    def _policy(self) -> Policy:
        policy = Policy.from_environment()
        if self._allow is None and self._deny is None:
            return policy
        return dataclasses.replace(policy, whitelist=self._allow or frozenset(), blacklist=self._deny or frozenset())

    def _install(self) -> None:
        for patch in self._patches:
            patch.install()

    def _remove(self) -> None:
        for patch in self._patches:
            patch.remove()


def reports() -> Mapping[str, OperatorReport]:
    """What became of the calls of each operator since FlagGems was turned on; nothing where it is off."""
    return _active[-1].reports() if _active else {}


def asked(variables: Mapping[str, str] = os.environ) -> bool:
    """Whether the environment asks for it. Raises ValueError for a value that is none."""
    text = variables.get(VARIABLE, "").strip().lower()
    if text and text not in environment.TRUE | environment.FALSE:
        raise ValueError(f"{VARIABLE} is {variables[VARIABLE]!r}; it can be 1 or 0")
    shared = environment.uses_flaggems(variables)
    if not text:
        return shared is True
    if text in environment.TRUE and shared is False:
        environment.warn_once(f"{VARIABLE}=1 does not count: {environment.USE_FLAGGEMS}=0 turns FlagGems off")
        return False
    return text in environment.TRUE


def follow_environment() -> None:
    """Turns it on where the environment asks for it, or says in one line why not. Called once, by ``import torch``."""
    try:
        if not asked():
            return
        if _is_simulated():
            opening.when_open(_follow)
        else:
            _follow()
    except (FlagosBackendError, RuntimeError, ValueError) as error:
        logger.warning("FlagGems does not compute PyTorch's operators: %s", error)


def _follow() -> None:
    try:
        gems().__enter__()
    except (FlagosBackendError, RuntimeError, ValueError) as error:
        logger.warning("FlagGems does not compute PyTorch's operators: %s", error)


def unavailable() -> str:
    """Why FlagGems cannot compute for eager programs of this process, or ""."""
    reason = loading.missing()
    if reason:
        return reason
    return "" if _is_simulated() or _device_types() else "FlagGems has no kernels for the host"


def describe() -> list[str]:
    """What this environment gives to FlagGems, for `flagos doctor`."""
    try:
        policy, on = Policy.from_environment(), asked()
    except (FlagosBackendError, ValueError) as error:
        return [f"wrong variable: {error}"]
    found = [f"eager operators: {'on' if on else f'off; {VARIABLE}=1 turns it on, and so does torch.flagos.gems()'}"]
    reason = unavailable()
    if reason:
        return [*found, f"cannot compute here: {reason}"]
    return [*found, f"operators that it may compute: {len(list(operators(policy)))} of its {len(loading.listed())}"]


def _places() -> list[Place]:
    """Raises RuntimeError where there is none."""
    reason = unavailable()
    if reason:
        raise RuntimeError(reason)
    module: Any = sys.modules.get("flag_gems")
    if getattr(module, "current_work_registrar", None) is not None:
        raise RuntimeError("flag_gems.enable() has given PyTorch's operators to FlagGems already, without guards")
    if _is_simulated():
        from flagos_backend.frontends.torch.device.memory import unwrap, wrap

        opening.open_device()  # its own kernels come first
        return [Place(opening.DEVICE_TYPE, "PrivateUse1", unwrap, wrap)]
    return [Place(kind, torch._C._dispatch_key_for_device(kind)) for kind in _device_types()]


def _is_simulated() -> bool:
    return os.environ.get(_DEVICE) == SIMULATED and opening.is_registered()


def _device_types() -> list[str]:
    """The accelerators that PyTorch drives in this process."""
    found = []
    for kind in dict.fromkeys(vendor.device_type for vendor in VENDORS):
        module = getattr(torch, kind, None)
        if module is not None and getattr(module, "is_available", lambda: False)():
            found.append(kind)
    return found


def _known(argument: str, names: Collection[str] | None) -> frozenset[str] | None:
    if names is None:
        return None
    if isinstance(names, str):
        raise ValueError(f"{argument} is {names!r}; it takes a list of names: {argument}=[{names!r}]")
    known = _names()
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(str(name), known, 3) or sorted(known)[:3]
            raise ValueError(
                f"{argument} has {name!r}, which FlagGems does not compute; it computes {', '.join(near)}, …"
            )
    return frozenset(names)


@functools.cache
def _names() -> frozenset[str]:
    """By which an operator may be called."""
    return frozenset() if loading.missing() else frozenset().union(*map(loading.names_of, loading.listed()))
