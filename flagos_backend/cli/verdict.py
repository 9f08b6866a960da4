"""What `flagos doctor` concludes: whether programs find the device, in one line, and the next command to run."""

from __future__ import annotations

import os
import shlex
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import Final

from plugin_abi.errors import CHOSEN_BY_USER
from plugin_abi.frameworks import detect
from plugin_abi.loader import DEFAULT_PLATFORM, LoadResult
from plugin_abi.search import DISABLE_VARIABLE, FILES_VARIABLE, SELECT_VARIABLE

AUTOLOAD_VARIABLE: Final = "TORCH_DEVICE_BACKEND_AUTOLOAD"
_DEVICE_VARIABLE: Final = "FLAGOS_DEVICE"
_HOST_NAMES: Final = ("cpu", "simulated")
_INSTALL: Final = "pip install -e . --no-build-isolation"
#: Programs to begin with.
TRY_JAX: Final = "import jax; print(jax.device_put(1.0, jax.devices('flagos')[0]) + 1)"
TRY_TORCH: Final = "import torch; print(torch.ones(2, device='flagos') + 1)"
TRY_TORCH_COMPILE: Final = "import torch; print(torch.compile(torch.sin, backend='flagos')(torch.ones(2)))"


@dataclass(frozen=True, slots=True)
class Verdict:
    """``line``: what is there, or what is wrong. ``command``: what to run next."""

    ready: bool
    line: str
    command: str

    def __str__(self) -> str:
        return f"{'ready' if self.ready else 'not ready'}: {self.line}\nnext: {self.command}"


@dataclass(frozen=True, slots=True)
class Reach:
    """Whether programs of one framework find the device. ``obstacle``: why not, or ""; ``command`` removes it or looks
    further. ``note``: how they find it, where that is not the usual way. ``trial``: a program to begin with."""

    framework: str
    trial: str = ""
    obstacle: str = ""
    command: str = ""
    note: str = ""


def without_backend(result: LoadResult, variables: Mapping[str, str] = os.environ) -> Verdict:
    """Of a platform for which no backend was accepted."""
    if result.warnings:
        first = result.warnings[0]
        line = f"every backend for {result.platform} that was found is refused, the first with FLAGOS-{first.code}"
        return Verdict(False, line, f"flagos check {shlex.quote(first.manifest)}")
    chosen = [name for name in (SELECT_VARIABLE, DISABLE_VARIABLE) if variables.get(name)]
    if chosen and any(refusal.code in CHOSEN_BY_USER for refusal in result.refusals):
        said = " and ".join(f"{name}={variables[name]}" for name in chosen)
        return Verdict(
            False, f"{said} leaves out every backend for {result.platform}", _doctor(result.platform, chosen)
        )
    if variables.get(FILES_VARIABLE):
        line = f"{FILES_VARIABLE}={variables[FILES_VARIABLE]} has no manifest for {result.platform}"
        return Verdict(False, line, _doctor(result.platform, [FILES_VARIABLE]))
    line = f"no backend for {result.platform} is installed; install one, or name its manifest"
    return Verdict(False, line, f"{FILES_VARIABLE}=MANIFEST {_doctor(result.platform)}")


def without_device(error: object, variables: Mapping[str, str] = os.environ) -> Verdict:
    """Of a backend that was accepted and gives no device, for the reason ``error``."""
    line = f"the backend gives no device: {' '.join(str(error).split())}"
    named = variables.get(_DEVICE_VARIABLE, "")
    if named and named not in _HOST_NAMES:  # PyTorch's own words say what its driver lacks
        return Verdict(False, line, _python(f"import torch; torch.zeros(1, device={named!r})"))
    return Verdict(False, line, "FLAGOS_DEBUG=2 flagos devices")


def with_devices(kinds: Sequence[str], reaches: Sequence[Reach], *, undriven: bool = False) -> Verdict:
    """Of a backend that gives this process devices of ``kinds``. ``reaches``: of the frameworks that are installed.
    ``undriven``: the machine seems to have an accelerator that PyTorch does not drive."""
    if not reaches:
        return Verdict(False, "neither JAX nor PyTorch is installed", "pip install jax")
    blocked = [reach for reach in reaches if reach.obstacle]
    if blocked:
        return Verdict(
            False, "; ".join(f"{reach.framework}: {reach.obstacle}" for reach in blocked), blocked[0].command
        )
    devices = ", ".join(f"{count} × {kind}" if count > 1 else kind for kind, count in Counter(kinds).items())
    notes = [f"{reach.framework}: {reach.note}" for reach in reaches if reach.note]
    if undriven:
        notes.append("this machine seems to have an accelerator, but the installed PyTorch drives none")
    line = "; ".join([f"{devices}, for {' and '.join(reach.framework for reach in reaches)}", *notes])
    return Verdict(True, line, _python(reaches[0].trial))


def reaches(variables: Mapping[str, str] = os.environ) -> list[Reach]:
    """Of each framework that is installed, as a process with this environment has it. May import PyTorch."""
    found = [_jax(variables)] if detect("jax") is not None else []
    return [*found, _torch(variables)] if detect("torch") is not None else found


def is_announced(group: str) -> bool:
    """Whether an installed package announces flagos to a framework under this group of entry points."""
    return any(entry.name == DEFAULT_PLATFORM for entry in metadata.entry_points(group=group))


def _jax(variables: Mapping[str, str]) -> Reach:
    if not is_announced("jax_plugins"):
        return Reach("JAX", obstacle="flagos is built but not installed, so JAX does not look for it", command=_INSTALL)
    named = variables.get("JAX_PLATFORMS", "")
    platforms = [name.strip() for name in named.split(",") if name.strip()]
    if platforms and DEFAULT_PLATFORM not in platforms:
        return Reach(
            "JAX", obstacle=f"JAX_PLATFORMS={named} leaves flagos out", command=_doctor(without=["JAX_PLATFORMS"])
        )
    return Reach("JAX", TRY_JAX)


def _torch(variables: Mapping[str, str]) -> Reach:
    from flagos_backend.frontends.torch import autoload
    from flagos_backend.frontends.torch.device.opening import is_registered

    def blocked(obstacle: str, command: str) -> Reach:
        return Reach("PyTorch", obstacle=obstacle, command=command)

    if not is_announced("torch.backends"):
        return blocked("flagos is built but not installed, so PyTorch does not look for it", _INSTALL)
    if variables.get(AUTOLOAD_VARIABLE, "1") != "1":
        obstacle = f"{AUTOLOAD_VARIABLE}={variables[AUTOLOAD_VARIABLE]} keeps it from loading the device"
        return blocked(obstacle, _doctor(without=[AUTOLOAD_VARIABLE]))
    choice = variables.get(autoload.DEVICE_VARIABLE, "auto")
    if choice == "0":
        return blocked(f"{autoload.DEVICE_VARIABLE}=0 leaves flagos out", _doctor(without=[autoload.DEVICE_VARIABLE]))
    try:
        reason = autoload.enable(choice)
    except ValueError as error:
        return blocked(str(error), _doctor(without=[autoload.DEVICE_VARIABLE]))
    if reason and is_registered():  # by name: its first use gives the loader's reason
        return blocked(reason, _python(TRY_TORCH))
    if reason and choice != "auto":
        return blocked(f"it has no device flagos: {reason}", _doctor(without=[autoload.DEVICE_VARIABLE]))
    return Reach("PyTorch", TRY_TORCH_COMPILE if reason else TRY_TORCH, note=reason)


def _doctor(platform: str = DEFAULT_PLATFORM, without: Iterable[str] = ()) -> str:
    """The command line of doctor, in an environment without some variables."""
    unset = " ".join(f"-u {name}" for name in without)
    option = "" if platform == DEFAULT_PLATFORM else f" --platform {shlex.quote(platform)}"
    return f"env {unset} flagos doctor{option}" if unset else f"flagos doctor{option}"


def _python(code: str) -> str:
    # Double quotes read better around Python's single ones; nothing here holds what a shell would replace.
    return f'python -c "{code}"' if not set(code) & set('"$`\\!') else f"python -c {shlex.quote(code)}"
