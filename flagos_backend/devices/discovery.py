"""Finds the accelerators of this process. Called once, by native/context.cc, when a cheap look or FLAGOS_DEVICE says
that there may be one; everything after it asks ``opened``."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import threading

from flagos_backend.devices.accelerator import (
    Accelerator,
    DeviceFacts,
    TorchAccelerator,
    attributes_of,
    dlpack_device,
)
from flagos_backend.devices.simulated import SIMULATED, SimulatedAccelerator
from flagos_backend.devices.streams import MakeStream, make_with
from flagos_backend.devices.vendors import VENDORS, package_of
from flagos_backend.errors import DeviceMissing
from flagos_backend.process.torch_loading import torch

logger = logging.getLogger("flagos_backend")

# What native/accelerator.cc reads of a device: the object, the product's name, bytes of memory, DLPack's type and
# number, the driver's name and its stream handles, and attributes: texts, then numbers.
Opened = tuple[
    Accelerator,
    str,
    int,
    int,
    int,
    str,
    tuple[int, ...],
    tuple[tuple[str, str], ...],
    tuple[tuple[str, int], ...],
]

_lock = threading.Lock()
_opened: dict[str, tuple[Accelerator, ...]] = {}
_undriven = threading.Event()


def open_accelerators(name: str, count: int, make_stream: MakeStream) -> tuple[Opened, ...]:
    """All accelerators of one device type.

    ``name``: what FLAGOS_DEVICE says: a device type of torch, "simulated" (``count`` devices in host memory), or "" for
    whatever torch has, which may be nothing. ``make_stream``: as of devices/streams.py. Raises DeviceMissing for a name
    that torch does not drive here.
    """
    with _lock:
        make_with(make_stream)
        key = f"{name}:{count}" if name == SIMULATED else name
        if key not in _opened:
            _opened[key] = _simulated(count) if name == SIMULATED else _found(name)
        return tuple(_describe(accelerator) for accelerator in _opened[key])


def opened(ordinal: int) -> Accelerator:
    """The accelerator ``ordinal`` of this process's devices; LookupError when its devices are host CPUs."""
    with _lock:
        for accelerators in _opened.values():
            if ordinal < len(accelerators):
                return accelerators[ordinal]
    raise LookupError(f"no accelerator {ordinal} was opened")


def undriven() -> bool:
    """Whether this machine seems to have an accelerator that torch does not drive, so that programs run on the host."""
    return _undriven.is_set()


def _simulated(count: int) -> tuple[Accelerator, ...]:
    return tuple(SimulatedAccelerator(ordinal) for ordinal in range(count))


def _found(name: str) -> tuple[Accelerator, ...]:
    types = (name,) if name else tuple(dict.fromkeys(vendor.device_type for vendor in VENDORS))
    for device_type in types:
        reason = _unavailable(device_type, bool(name))
        if not reason:
            number = torch.get_device_module(device_type).device_count()
            return tuple(TorchAccelerator(device_type, ordinal) for ordinal in range(number))
        if name:
            raise DeviceMissing(name=name, reason=reason, torch=torch.__version__)
    _undriven.set()
    logger.warning(
        "this machine seems to have an accelerator, but torch %s drives none; programs run on the host",
        torch.__version__,
    )
    return ()


def _unavailable(device_type: str, named: bool) -> str:
    """Why torch cannot drive ``device_type``, or ""."""
    package = package_of(device_type)
    if package and importlib.util.find_spec(package):
        importlib.import_module(package)
    elif package and not named:
        return f"the package {package} is not installed"
    try:
        module = torch.get_device_module(device_type)
    except (RuntimeError, AttributeError) as error:
        return f"{error}{f'; it comes with the package {package}' if package else ''}"
    if not hasattr(module, "get_device_properties") or not hasattr(module, "default_stream"):
        return "it has no devices with streams"
    return "" if module.is_available() and module.device_count() > 0 else "no device of this type answers"


def _describe(accelerator: Accelerator) -> Opened:
    facts: DeviceFacts = accelerator.facts()
    kind, number = dlpack_device(accelerator.device)
    driver, handles = accelerator.handles()
    texts, numbers = attributes_of(accelerator.target, accelerator.device, facts)
    return accelerator, facts.kind, facts.memory_bytes, kind, number, driver, handles, texts, numbers
