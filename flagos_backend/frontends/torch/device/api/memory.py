"""torch.flagos: how much of the device's memory tensors hold, in bytes.

Counted where tensors are made. Nothing is kept for later by this package, so what is reserved is what is allocated.
"""

from __future__ import annotations

from pathlib import Path

from flagos_backend.frontends.torch.device import _native
from flagos_backend.frontends.torch.device.api.devices import DeviceLike, index_of, opened

#: The counters at the last reset_accumulated_memory_stats.
_baseline = (0, 0, 0, 0, 0)
#: The share of the device's memory that tensors may hold.
_fraction = 1.0


def memory_allocated(device: DeviceLike = None) -> int:
    """Bytes that tensors hold now."""
    index_of(device)
    return _native.memory_counters()[0]


def max_memory_allocated(device: DeviceLike = None) -> int:
    """The most bytes that tensors held at once since the last reset_peak_memory_stats."""
    index_of(device)
    return _native.memory_counters()[1]


memory_reserved = memory_allocated
max_memory_reserved = max_memory_allocated


def reset_peak_memory_stats(device: DeviceLike = None) -> None:
    """The peak becomes what is allocated now."""
    index_of(device)
    _native.reset_peak()


def reset_accumulated_memory_stats(device: DeviceLike = None) -> None:
    """Counts allocations and frees from here on."""
    global _baseline
    index_of(device)
    _baseline = _native.memory_counters()


def memory_stats(device: DeviceLike = None) -> dict[str, int]:
    """The counters under the names that torch.cuda.memory_stats has for them."""
    index_of(device)
    allocated, peak, allocations, frees, total = _native.memory_counters()
    allocated_then, _, allocations_then, frees_then, total_then = _baseline
    freed = (total - allocated) - (total_then - allocated_then)
    stats: dict[str, int] = {}
    for pool in ("allocated_bytes", "reserved_bytes", "active_bytes"):
        stats |= {f"{pool}.all.current": allocated, f"{pool}.all.peak": peak}
        stats |= {f"{pool}.all.allocated": total - total_then, f"{pool}.all.freed": freed}
    return stats | {
        "allocation.all.current": allocations - frees,
        "allocation.all.allocated": allocations - allocations_then,
        "allocation.all.freed": frees - frees_then,
    }


def nested_memory_stats(device: DeviceLike = None) -> dict[str, dict[str, dict[str, int]]]:
    """memory_stats as torch.accelerator takes it: names nested, not dotted."""
    nested: dict[str, dict[str, dict[str, int]]] = {}
    for name, value in memory_stats(device).items():
        pool, kind, counter = name.split(".")
        nested.setdefault(pool, {}).setdefault(kind, {})[counter] = value
    return nested


def memory_summary(device: DeviceLike = None, abbreviated: bool = False) -> str:
    """The counters as text, one a line."""
    lines = (f"{name:36}{value:>20,}" for name, value in memory_stats(device).items())
    return "\n".join(line for line in lines if not abbreviated or "allocat" in line)


def mem_get_info(device: DeviceLike = None) -> tuple[int, int]:
    """Free and total bytes, as the backend sees them."""
    found = opened(device)
    if found.inner.type == "cpu":
        return _host_free_bytes(), found.memory_bytes
    free, total = found.inner_module.mem_get_info(found.inner)
    return int(free), int(total)


def _host_free_bytes() -> int:
    """MemAvailable of /proc/meminfo: what can be allocated without swapping."""
    with Path("/proc/meminfo").open(encoding="ascii") as lines:
        for line in lines:
            name, _, value = line.partition(":")
            if name == "MemAvailable":
                return int(value.split()[0]) * 1024
    raise RuntimeError("/proc/meminfo names no MemAvailable")


def empty_cache() -> None:
    """Gives memory that is kept for later back: the inner device's, where it keeps some."""
    inner = opened().inner_module
    if hasattr(inner, "empty_cache"):
        inner.empty_cache()


def set_per_process_memory_fraction(fraction: float, device: DeviceLike = None) -> None:
    """Lets tensors hold at most this share of the device's memory; more raises torch.OutOfMemoryError."""
    global _fraction
    if not 0 <= fraction <= 1:
        raise ValueError(f"Invalid fraction value: {fraction}. Allowed range: 0~1")
    limit = int(opened(device).memory_bytes * fraction)
    _native.set_limit(limit if fraction < 1 else -1)
    _fraction = float(fraction)


def get_per_process_memory_fraction(device: DeviceLike = None) -> float:
    """The share of the device's memory that tensors may hold."""
    index_of(device)
    return _fraction
