"""torch.flagos: the device as PyTorch's programs see it, by the conventions of PyTorch's own device modules."""

from __future__ import annotations

from typing import Any

from flagos_backend.frontends.torch.device.api.amp import get_amp_supported_dtype, is_bf16_supported
from flagos_backend.frontends.torch.device.api.devices import (
    DeviceProperties,
    current_device,
    device,
    device_count,
    device_of,
    get_device_capability,
    get_device_name,
    get_device_properties,
    init,
    is_available,
    is_initialized,
    set_device,
)
from flagos_backend.frontends.torch.device.api.gems import gems
from flagos_backend.frontends.torch.device.api.memory import (
    empty_cache,
    get_per_process_memory_fraction,
    max_memory_allocated,
    max_memory_reserved,
    mem_get_info,
    memory_allocated,
    memory_reserved,
    memory_stats,
    memory_summary,
    nested_memory_stats,
    reset_accumulated_memory_stats,
    reset_peak_memory_stats,
    set_per_process_memory_fraction,
)
from flagos_backend.frontends.torch.device.api.random import (
    _is_in_bad_fork as _is_in_bad_fork,
)
from flagos_backend.frontends.torch.device.api.random import (
    default_generators as _default_generators,
)
from flagos_backend.frontends.torch.device.api.random import (
    get_rng_state,
    get_rng_state_all,
    initial_seed,
    manual_seed,
    manual_seed_all,
    seed,
    seed_all,
    set_rng_state,
    set_rng_state_all,
)
from flagos_backend.frontends.torch.device.api.streams import (
    Event,
    Stream,
    StreamContext,
    current_stream,
    default_stream,
    set_stream,
    stream,
    synchronize,
)
from flagos_backend.frontends.torch.device.memory import from_dlpack, unwrap, wrap

__all__ = [
    "DeviceProperties",
    "Event",
    "Stream",
    "StreamContext",
    "current_device",
    "current_stream",
    "default_generators",
    "default_stream",
    "device",
    "device_count",
    "device_of",
    "empty_cache",
    "from_dlpack",
    "gems",
    "get_amp_supported_dtype",
    "get_device_capability",
    "get_device_name",
    "get_device_properties",
    "get_per_process_memory_fraction",
    "get_rng_state",
    "get_rng_state_all",
    "init",
    "initial_seed",
    "is_available",
    "is_bf16_supported",
    "is_initialized",
    "manual_seed",
    "manual_seed_all",
    "max_memory_allocated",
    "max_memory_reserved",
    "mem_get_info",
    "memory_allocated",
    "memory_reserved",
    "memory_stats",
    "memory_summary",
    "nested_memory_stats",
    "reset_accumulated_memory_stats",
    "reset_peak_memory_stats",
    "seed",
    "seed_all",
    "set_device",
    "set_per_process_memory_fraction",
    "set_rng_state",
    "set_rng_state_all",
    "set_stream",
    "stream",
    "synchronize",
    "unwrap",
    "wrap",
]


def __getattr__(name: str) -> Any:
    if name == "_initialized":
        return is_initialized()
    # Made when asked for: it is the first use of the device.
    if name == "default_generators":
        return _default_generators()
    raise AttributeError(f"module 'torch.flagos' has no attribute {name!r}")
