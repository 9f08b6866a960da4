"""Makes the device known to torch.distributed: the backend flagos, and which groups carry the device's tensors.

What it changes are PyTorch's own tables of backends, and two functions of its own that ask no table.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Final, cast

import torch
import torch.distributed as dist

from flagos_backend.frontends.torch.device.api.devices import index_of
from flagos_backend.frontends.torch.device.opening import DEVICE_TYPE, open_device

#: The backend's name is the device's.
BACKEND: Final = DEVICE_TYPE
#: What a group has that no backend was named for, where the host computes for the device. It is the same whether or not
#: a process has used the device: its peers may differ in that.
_UNNAMED: Final = f"cpu:gloo,{DEVICE_TYPE}:gloo"


def install(*, host_memory: bool) -> None:
    """Once, when the device is registered. ``host_memory``: whether only the host can compute for it."""
    if not dist.is_available():
        return
    dist.Backend.register_backend(BACKEND, _make, devices=[DEVICE_TYPE])
    able = dist.Backend.backend_capability
    able["gloo"] = [*able["gloo"], DEVICE_TYPE]
    module: Any = dist.distributed_c10d
    if host_memory:
        config: Any = module.BackendConfig
        config.__init__ = _without_a_name(config.__init__)
    for place in (cast(Any, dist), module):
        place.init_process_group = _binding_nothing(module.init_process_group)


def install_opened(library: Any) -> None:
    """Once, when the device is opened. ``library``: a function from a namespace to its torch.library.Library."""
    if not dist.is_available():
        return
    from flagos_backend.frontends.torch.distributed import kernels

    operators = library("c10d")
    with warnings.catch_warnings():
        # PyTorch's own kernels hand the device's tensors to a backend, and none takes them.
        warnings.filterwarnings("ignore", "(?s).*Overriding a previously registered kernel")
        for name, kernel in kernels.registrations():
            operators.m.impl(name, "PrivateUse1", kernel)


def _make(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    """The backend flagos of a group: that of the inner device. Raises RuntimeError where torch.distributed has none."""
    from flagos_backend.devices.process_groups import backend_for, make_backend
    from flagos_backend.frontends.torch.device.runtime import runtime

    open_device()
    return make_backend(backend_for(runtime().inner.type), store, rank, size, timeout)


def _without_a_name(original: Callable[..., None]) -> Callable[..., None]:
    """A group without a named backend: PyTorch asks which accelerator the process has, and takes the one for that."""

    @functools.wraps(original)
    def __init__(self: Any, backend: str) -> None:
        original(self, _UNNAMED if str(backend) == "undefined" else backend)

    return __init__


def _binding_nothing(original: Callable[..., Any]) -> Callable[..., Any]:
    """init_process_group(device_id=torch.device("flagos", 0)): a process has one device, so that there is nothing to
    bind. PyTorch would have it be the accelerator by then, and split groups in NCCL's way."""

    @functools.wraps(original)
    def init_process_group(*args: Any, **kwargs: Any) -> Any:
        device = kwargs.get("device_id")
        if isinstance(device, torch.device) and device.type == DEVICE_TYPE:
            index_of(device)  # which refuses others
            kwargs["device_id"] = None
        return original(*args, **kwargs)

    return init_process_group
