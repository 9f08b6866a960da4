"""Where programs run: the host, and the accelerators that the backend found. Contexts of the plugin ABI, opened once.

A program runs where its tensors are. Between placement.py, which knows tensors, and executable.py.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from flagos_backend.devices.attributes import TORCH_DEVICE
from flagos_backend.frontends.torch.compile.errors import BackendUnavailable
from plugin_abi import loader
from plugin_abi.errors import FlagosStatusError
from plugin_abi.host import Context, Device
from plugin_abi.isolation import OUT_OF_REACH, PROCESS_ATTRIBUTE

HOST, FLAGOS = "cpu", "flagos"

_lock = threading.RLock()


@dataclass(frozen=True, slots=True, eq=False)
class DeviceContext:
    """One device of a context. ``torch_device``: PyTorch's device whose memory it has."""

    context: Context
    device: Device
    torch_device: torch.device

    @property
    def is_host(self) -> bool:
        return self.device.is_host_memory

    @property
    def is_first(self) -> bool:
        """Whether programs go there that name no device."""
        return self.device is self.context.addressable_devices[0]

    def streams(self) -> tuple[Any, Any] | None:
        """PyTorch's current stream there and the one that programs run on; None where these are one."""
        if self.torch_device.type == HOST:
            return None
        module = torch.get_device_module(self.torch_device)
        current, compute = module.current_stream(self.torch_device), module.default_stream(self.torch_device)
        return None if current == compute else (current, compute)


def _open(options: dict[str, str | int]) -> Context:
    backend = loader.load().accepted
    if backend is None:
        raise BackendUnavailable(reason=loader.no_such_device_message())
    # Every launch on the host is waited for, and PyTorch's own threads are those of the thread that calls.
    try:
        return Context(backend, {"inline_launches": 1, **options})
    except FlagosStatusError as error:
        raise BackendUnavailable(reason=loader.no_device_message(backend, error)) from error


@functools.cache
def _host() -> DeviceContext:
    context = _open({"device": HOST})
    # A backend that knows no such option gives what it has: a device that cannot read the pointers of these tensors.
    devices = context.addressable_devices[:1]
    if not any(device.is_host_memory for device in devices):
        reason = f"{context.platform_version} has no device for tensors of the host; move them to one that it has."
        if any(PROCESS_ATTRIBUTE in device.attributes for device in devices):
            reason = loader.no_device_message(context.api.backend, OUT_OF_REACH)
        context.close()
        raise BackendUnavailable(reason=reason)
    return DeviceContext(context, context.addressable_devices[0], torch.device(HOST))


@functools.cache
def _all() -> tuple[DeviceContext, ...]:
    """The devices that the backend chooses by itself; only the host where that is what it chooses."""
    context = _open({})
    device_contexts = []
    for device in context.addressable_devices:
        name = device.attributes.get(TORCH_DEVICE)
        if isinstance(name, str) and not device.is_host_memory:
            device_contexts.append(DeviceContext(context, device, torch.device(name)))
    if device_contexts:
        return tuple(device_contexts)
    context.close()
    return (_host(),)


@functools.cache
def _of_flagos() -> DeviceContext:
    # Imported where there is such a tensor: the package registers the device.
    from flagos_backend.frontends.torch.device.runtime import runtime

    return _host() if runtime().device.is_host_memory else _all()[0]


def host() -> DeviceContext:
    """The host. Raises BackendUnavailable with the loader's reason."""
    with _lock:
        return _host()


def find(device: torch.device) -> DeviceContext | None:
    """Where programs on tensors of ``device`` run, without a number that of PyTorch's current one; None if the backend
    reaches no such memory. Raises BackendUnavailable."""
    with _lock:
        if device.type == HOST:
            return _host()
        if device.type == FLAGOS:
            return _of_flagos()
        alike = [device_context for device_context in _all() if device_context.torch_device.type == device.type]
        if not alike:
            return None
        index = torch.get_device_module(device).current_device() if device.index is None else device.index
        return next((device_context for device_context in alike if device_context.torch_device.index == index), None)


def device_context_of(devices: Iterable[torch.device]) -> DeviceContext:
    """Where a program on tensors of all these devices runs: on the accelerator if there is one among them, to which it
    brings what the host has. Raises ValueError naming two accelerators."""
    found: dict[DeviceContext, torch.device] = {}
    for device in dict.fromkeys(devices):
        device_context = find(device)
        if device_context is not None and device_context is not host():
            found[device_context] = device
    if len(found) > 1:
        raise ValueError("tensors on " + " and on ".join(map(str, found.values())))
    return next(iter(found), None) or host()
