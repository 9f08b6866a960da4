"""Report the environment, the folders searched, every manifest with its verdict, and the devices.

Ends with a verdict and the next command to run. Exits with 0 if the verdict is "ready".
"""

from __future__ import annotations

import argparse
import os
import platform
import shlex

from flagos_backend import __version__, environment
from flagos_backend.cli import verdict
from flagos_backend.cli.devices import describe_devices
from flagos_backend.cli.verdict import Verdict
from flagos_backend.devices import discovery
from flagos_backend.process import torch_loading
from plugin_abi import isolation, loader, rights, trial
from plugin_abi.errors import FlagosStatusError
from plugin_abi.files import exists
from plugin_abi.frameworks import detect
from plugin_abi.host import Context
from plugin_abi.loader import Backend, Candidate
from plugin_abi.policy import HOST_ABI

FRAMEWORKS = ("jax", "jaxlib", "torch", "triton", "flag_gems", "llvmlite")
_VARIABLE_PREFIXES = (
    *("FLAGOS_", "FLAGCX_PATH", "JAX_PLATFORMS", "XLA_FLAGS", verdict.AUTOLOAD_VARIABLE),
    *(environment.USE_FLAGGEMS, *environment.FAMILIES),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--platform", default=loader.DEFAULT_PLATFORM, help="the platform to look for")


def run(options: argparse.Namespace) -> int:
    _print_environment()
    _print_flaggems()
    _print_triton()
    _print_isolation()
    _print_search()
    judged = _examine(options.platform)
    print(f"\n{judged}")
    return 0 if judged.ready else 1


def _examine(platform_name: str) -> Verdict:
    """Prints the backend and the devices, or why there are none."""
    result = loader.load(platform_name)
    if result.accepted is None:
        print(f"\n{loader.no_such_device_message(platform_name)}")
        return verdict.without_backend(result)
    _print_backend(result.accepted)
    print("Devices")
    try:
        with Context(result.accepted) as context:
            print("\n".join(f"  {line}" for line in describe_devices(context)))
            kinds = [device.kind for device in context.devices if device.is_addressable]
    except FlagosStatusError as error:
        print(f"  {loader.no_device_message(result.accepted, error)}")
        return verdict.without_device(error)
    if not kinds:
        return verdict.without_device("none of its devices belongs to this process")
    if platform_name != loader.DEFAULT_PLATFORM:  # which no framework asks for
        return Verdict(True, ", ".join(kinds), f"flagos check {shlex.quote(str(result.accepted.place))}")
    return verdict.with_devices(kinds, verdict.reaches(), undriven=discovery.undriven())


def _print_environment() -> None:
    print("Environment")
    libc = " ".join(platform.libc_ver())
    print(f"  flagos {__version__}, Python {platform.python_version()}, {libc}, {platform.machine()}")
    for name in FRAMEWORKS:
        found = detect(name)
        if found is None:
            print(f"  {name}: not installed")
            continue
        facts = (f"git {found.git_revision}" if found.git_revision else "", found.compiler or "")
        print(f"  {name} {found.version}" + "".join(f", {fact}" for fact in facts if fact))
    for name in sorted(os.environ):
        if name.startswith(_VARIABLE_PREFIXES):
            print(f"  {name}={os.environ[name]}")


def _print_flaggems() -> None:
    """What PyTorch programs that this environment starts get of FlagGems."""
    print("FlagGems")
    if detect("torch") is None:
        print("  nothing: torch is not installed")
        return
    torch_loading.load()
    from flagos_backend.gems import switch

    for line in switch.describe():
        print(f"  {line}")


def _print_triton() -> None:
    """Whose launchers kernels get on NVIDIA's devices."""
    if detect("triton") is None or detect("torch") is None:
        return
    torch_loading.load()
    from flagos_backend.kernels.triton.loading import launchers

    print("Triton")
    try:
        print(f"  launchers on NVIDIA's devices: {launchers()}")
    except ImportError as error:
        print(f"  it cannot be imported: {error}")


def _print_isolation() -> None:
    """Where backends run, and what holds for one in a process of its own."""
    mode = isolation.isolation_mode(os.environ)
    print("Isolation")
    known = mode.value if mode is not None else f"{os.environ[isolation.MODE_VARIABLE]}, which nobody knows"
    print(f"  {isolation.MODE_VARIABLE} is {known}; of a process of its own:")
    for line in rights.describe(os.environ):
        print(f"  {line}")


def _print_search() -> None:
    searched, candidates = loader.search()
    print("Searched")
    for place in searched.places:
        print(f"  {place.path} ({place.origin.value}){'' if exists(place.path) else ': does not exist'}")
    print("Manifests")
    for candidate in candidates:
        print(f"  {candidate.found.path}: {_verdict(candidate)}")
    if not candidates:
        print("  none")


def _verdict(candidate: Candidate) -> str:
    refusal = candidate.refusal
    if refusal is None and candidate.manifest is not None:
        refusal = loader.check(candidate.manifest.path)
    if refusal is not None:
        return f"refused\n    {refusal}"
    assert candidate.manifest is not None
    if candidate.manifest.unknown_fields:
        print(f"  {loader.unknown_fields_message(candidate.manifest)}")
    denied = ", ".join(trial.denied(candidate.manifest.path))
    held = f"\n    in its trial it was denied: {denied}" if denied else ""
    return f"accepted, for the platform {candidate.manifest.platform}, priority {candidate.manifest.priority}{held}"


def _print_backend(backend: Backend) -> None:
    info = backend.info
    print("Backend")
    print(f"  {info.name} {info.version} ({info.build_id}), git {info.git_revision or 'unknown'}")
    print(f"  {backend.place}")
    print(f"  {info.compiler}, glibc {info.glibc}, ABI {backend.version} negotiated (this host speaks {HOST_ABI})")
