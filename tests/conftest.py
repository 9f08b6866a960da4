"""What every test shares: markers by folder, an environment free of the machine's settings, repeatable seeds."""

from __future__ import annotations

import atexit
import contextlib
import gc
import logging
import os
import random
import shutil
import sys
import tempfile
from importlib import metadata
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings

from support import not_isolated, older_emitters
from support.seeds import SEED_VARIABLE, fresh

TESTS = Path(__file__).resolve().parent
GROUPS = ("unit", "cpu", "gpu", "multi")

settings.register_profile("flagos", deadline=None, print_blob=True)
settings.load_profile("flagos")


# Until tests begin, there is next to nothing to collect, but all modules to look at, again and again.
gc.disable()


def _quick_xla() -> list[str]:
    """Flags with which XLA, the oracle, compiles in a third of the time, for its code is not optimized, and of small
    programs in half of that, for it is not split among threads. XLA ends a process that gives a flag that it has not:
    0.10 of jaxlib has the second."""
    flags = ["--xla_backend_optimization_level=0"]
    with contextlib.suppress(metadata.PackageNotFoundError):
        if metadata.version("jaxlib").startswith("0.10."):
            flags.append("--xla_cpu_parallel_codegen_split_count=1")
    return flags


def isolate_environment() -> None:
    """Takes away settings of the machine, before a test module imports a framework or the loader."""
    kept = ("FLAGOS_TEST_", "FLAGOS_NUM_CPU_DEVICES")
    for name in list(os.environ):
        if name.startswith(("FLAGOS_", "JAX_", "XLA_", "TF_", "PJRT_")) and not name.startswith(kept):
            del os.environ[name]
    os.environ["XLA_FLAGS"] = " ".join(_quick_xla())
    # PyTorch refuses what it warns of elsewhere, where a continuous integration's variable is set.
    os.environ.pop("CI", None)
    # Suites share the processors. PyTorch's threads, where they wait for one another, would spin through what others
    # need, which can be most of the time that large operators take.
    os.environ["OMP_WAIT_POLICY"] = "passive"
    # The host, also where there is an accelerator, unless a run is meant for another device: "cuda", "simulated", ...
    os.environ["FLAGOS_DEVICE"] = os.environ.get("FLAGOS_TEST_DEVICE", "cpu")
    # Backends in processes of their own, if a run is meant for that: "process".
    if "FLAGOS_TEST_ISOLATION" in os.environ:
        os.environ["FLAGOS_ISOLATION"] = os.environ["FLAGOS_TEST_ISOLATION"]
        os.environ["FLAGOS_ISOLATION_NEEDS"] = "network"  # for contexts of several processes
    # Another backend than the one of this tree, named by its manifest.
    if "FLAGOS_TEST_DRIVER_FILES" in os.environ:
        os.environ["FLAGOS_DRIVER_FILES"] = os.environ["FLAGOS_TEST_DRIVER_FILES"]
    if "FLAGOS_TEST_SCRATCH" not in os.environ:  # xdist workers share their controller's
        os.environ["FLAGOS_TEST_SCRATCH"] = tempfile.mkdtemp(prefix="flagos-tests-")
        atexit.register(shutil.rmtree, os.environ["FLAGOS_TEST_SCRATCH"], ignore_errors=True)
    scratch = Path(os.environ["FLAGOS_TEST_SCRATCH"])
    for name in ("XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME"):
        folder = scratch / name.lower()
        folder.mkdir(exist_ok=True, mode=0o700)
        os.environ[name] = str(folder)


def require_installed_packages() -> None:
    """Stops a run that is meant for an installed wheel and would test the source tree."""
    import flagos_backend
    import plugin_abi

    for package in (plugin_abi, flagos_backend):
        if Path(package.__path__[0]).resolve().parent == TESTS.parent:
            raise pytest.UsageError(f"{package.__name__} comes from the source tree; run through tools/test")


isolate_environment()
os.environ.setdefault(SEED_VARIABLE, str(random.SystemRandom().randrange(2**32)))


def pytest_configure(config: pytest.Config) -> None:
    if os.environ.get("FLAGOS_TEST_INSTALLED") == "1":
        require_installed_packages()


def pytest_report_header() -> str:
    return f"flagos: fresh inputs drawn from seed {os.environ[SEED_VARIABLE]} (repeat with {SEED_VARIABLE}=)"


def _missing_hardware(group: str) -> str | None:
    """Why tests of `group` cannot run here, or None."""
    if group not in ("gpu", "multi"):
        return None
    if os.environ["FLAGOS_DEVICE"] == "simulated":
        return None
    import torch

    needed = 2 if group == "multi" else 1
    found = torch.accelerator.device_count() if torch.accelerator.is_available() else 0
    return None if found >= needed else f"needs {needed} accelerators, torch sees {found}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reasons = {}
    for item in items:
        group = item.path.relative_to(TESTS).parts[0]
        if group not in GROUPS:
            raise pytest.UsageError(f"{item.path}: tests live under one of {', '.join(GROUPS)}; see tests/README.md")
        item.add_marker(group)
        if group not in reasons:
            reasons[group] = _missing_hardware(group)
        if reasons[group] is not None:
            item.add_marker(pytest.mark.skip(reason=reasons[group]))
        if (cause := not_isolated.cause_of(item.path.relative_to(TESTS), item.name)) is not None:
            item.add_marker(pytest.mark.skip(reason=f"FLAGOS_TEST_ISOLATION: {cause}"))


def pytest_collection_finish() -> None:
    """Modules and tests live as long as the process. With PyTorch and JAX they are a million objects, which each full
    collection would look at again, those that tests ask for too."""
    gc.collect()
    gc.freeze()
    gc.enable()
    atexit.register(gc.unfreeze)  # what Python frees at its end, it frees


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    """Fresh random numbers, different in each run and each test, repeatable through the seed in the report header."""
    return fresh(request.node.nodeid)


def _leave_out_what_torch_measures() -> None:
    """Two things that PyTorch does with each compile take a tenth of its time and more, and show in no result."""
    # pytest adds handlers to each logger that does not propagate, some before its first test. With one, PyTorch writes
    # out its structured trace, all graphs in it.
    trace = logging.getLogger("torch.__trace")
    trace.propagate = True
    trace.handlers.clear()
    # The time that guards take, for which 256 MB are written so that caches are cold.
    if "torch._dynamo.guards" in sys.modules:
        sys.modules["torch._dynamo.guards"].profile_guard_manager = lambda *arguments: 0.0


@pytest.fixture(autouse=True)
def quick_oracle() -> None:
    """JAX's CPU compiles what tests compare with in less time."""
    older_emitters.install()


@pytest.fixture(autouse=True)
def repeatable_torch(request: pytest.FixtureRequest) -> None:
    """What PyTorch draws on the host is a test's own too, whatever ran before it; a test may still seed it itself."""
    if "torch" in sys.modules:
        draws = sys.modules["torch"].default_generator  # torch.manual_seed would open the devices
        draws.manual_seed(int(fresh(request.node.nodeid).integers(2**63)))
        _leave_out_what_torch_measures()
