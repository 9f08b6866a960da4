"""One accelerator through torch's module of its device type (torch.cuda, torch.npu, torch.musa, ...): memory, streams,
copies. Called by native/accelerator.cc and native/python_streams.cc; nothing here names a vendor's own interface."""

from __future__ import annotations

import contextlib
import enum
import functools
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import ModuleType
from typing import Any, NamedTuple, Protocol

from flagos_backend.devices.attributes import CORE_COUNT, DLPACK_DEVICE, MEMORY_BYTES, TORCH_DEVICE
from flagos_backend.devices.device_lock import device_lock
from flagos_backend.devices.streams import own_stream
from flagos_backend.devices.target import Target
from flagos_backend.devices.vendors import vendor_of
from flagos_backend.errors import DeviceMemoryExhausted
from flagos_backend.process.torch_loading import torch

Capsule = Any


def from_dlpack(capsule: Capsule) -> torch.Tensor:
    """A tensor over what the capsule holds; torch.utils.dlpack's wrapper does more."""
    return torch._C._from_dlpack(capsule)


class StreamKind(enum.IntEnum):
    """The streams of a device; the numbers are those of ``flagos::Stream`` in native/accelerator.h."""

    COMPUTE = 0  # torch's default stream, so that tensors pass between flagos and torch without waiting
    TO_DEVICE = 1
    FROM_DEVICE = 2


class Event(Protocol):
    """A place in a stream."""

    def query(self) -> bool: ...

    def synchronize(self) -> None: ...


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """What the host is told of a device. ``kind`` is the product's name; ``memory_bytes`` what the device has."""

    kind: str
    memory_bytes: int


def attributes_of(
    target: Target, device: torch.device, facts: DeviceFacts
) -> tuple[tuple[tuple[str, str], ...], tuple[tuple[str, int], ...]]:
    """What a host may ask of a device by name: texts, and numbers."""
    texts = (
        ("vendor", target.vendor),
        ("architecture", target.architecture),
        ("device_type", target.device_type),
        (TORCH_DEVICE, str(device)),
    )
    numbers = (CORE_COUNT, target.multiprocessors), (MEMORY_BYTES, facts.memory_bytes)
    return texts, (*numbers, *zip(DLPACK_DEVICE, dlpack_device(device), strict=True))


class MemoryStats(NamedTuple):
    """Bytes and counts as FlagosDeviceMemoryStatsArgs has them; -1: the device does not know."""

    in_use: int
    peak: int
    allocations: int
    limit: int


class Accelerator(Protocol):
    """What the runtime needs of a device. Safe to call from any thread; every method names its stream itself."""

    ordinal: int
    target: Target
    device: torch.device

    def facts(self) -> DeviceFacts: ...

    def guard(self) -> AbstractContextManager[None]:
        """Makes this the current device of the thread, and its compute stream the current one: whoever launches a
        program in a thread of its own may have another one there, and replays go to the compute stream."""

    def allocate(self, num_bytes: int, stream: StreamKind) -> torch.Tensor:
        """A uint8 tensor that work on ``stream`` may write at once, and the compute stream after it. Raises
        DeviceMemoryExhausted."""

    def allocate_pinned(self, num_bytes: int) -> torch.Tensor:
        """Host memory that the device copies from and to without the processor."""

    def record(self, stream: StreamKind) -> Event: ...

    def wait(self, stream: StreamKind, event: Event) -> None:
        """What is enqueued on ``stream`` from now on begins after ``event``."""

    def copy(self, stream: StreamKind, to: Capsule, source: Capsule) -> None:
        """Enqueues a copy of equally many bytes, between DLPack capsules."""

    def memory_stats(self, clear_peaks: bool) -> MemoryStats: ...

    def handles(self) -> tuple[str, tuple[int, ...]]:
        """The device type, and the driver's handle of each stream if that type has one; ("", ()) otherwise."""


class TorchAccelerator:
    """An accelerator that torch drives."""

    def __init__(self, device_type: str, ordinal: int) -> None:
        self.ordinal = ordinal
        self.device = torch.device(device_type, ordinal)
        self._module: ModuleType = torch.get_device_module(device_type)
        self._properties: Any = self._module.get_device_properties(ordinal)
        self.target = self._target()
        with self._module.device(ordinal):
            self._streams: tuple[Any, ...] = (
                self._module.default_stream(ordinal),
                own_stream(self.device),
                own_stream(self.device),
            )

    def _target(self) -> Target:
        properties = self._properties
        return Target(
            device_type=self.device.type,
            vendor=vendor_of(self.device.type, str(properties.name)),
            architecture=_architecture(properties),
            multiprocessors=int(getattr(properties, "multi_processor_count", 1)),
            shared_memory_bytes=int(getattr(properties, "shared_memory_per_block_optin", 0)),
            warp_size=int(getattr(properties, "warp_size", 1)),
        )

    def facts(self) -> DeviceFacts:
        return DeviceFacts(str(self._properties.name), int(self._properties.total_memory))

    def guard(self) -> AbstractContextManager[None]:
        guard: AbstractContextManager[None] = self._module.stream(self._streams[StreamKind.COMPUTE])
        return guard

    def allocate(self, num_bytes: int, stream: StreamKind) -> torch.Tensor:
        with contextlib.suppress(torch.OutOfMemoryError):
            return self._allocate(num_bytes, stream)
        with device_lock:  # while any thread captures, torch gives nothing back
            self._module.empty_cache()
            try:
                return self._allocate(num_bytes, stream)
            except torch.OutOfMemoryError:
                raise self.exhausted(num_bytes) from None

    def exhausted(self, num_bytes: int) -> DeviceMemoryExhausted:
        """The error of an allocation that does not fit."""
        free, total = self._module.mem_get_info(self.ordinal)
        return DeviceMemoryExhausted(device=self.device, wanted=num_bytes, free=free, total=total)

    def _allocate(self, num_bytes: int, stream: StreamKind) -> torch.Tensor:
        if stream == StreamKind.COMPUTE:
            return torch.empty(num_bytes, dtype=torch.uint8, device=self.device)
        with self._module.stream(self._streams[stream]):
            tensor = torch.empty(num_bytes, dtype=torch.uint8, device=self.device)
        tensor.record_stream(self._streams[StreamKind.COMPUTE])
        return tensor

    def allocate_pinned(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def record(self, stream: StreamKind) -> Event:
        event: Event = self._module.Event()
        with self._module.device(self.ordinal):
            event.record(self._streams[stream])  # type: ignore[attr-defined]
        return event

    def wait(self, stream: StreamKind, event: Event) -> None:
        self._streams[stream].wait_event(event)

    def copy(self, stream: StreamKind, to: Capsule, source: Capsule) -> None:
        with self._module.stream(self._streams[stream]):
            from_dlpack(to).copy_(from_dlpack(source), non_blocking=True)

    def memory_stats(self, clear_peaks: bool) -> MemoryStats:
        stats = self._module.memory_stats(self.ordinal)
        if clear_peaks:
            self._module.reset_peak_memory_stats(self.ordinal)
        return MemoryStats(
            int(stats.get("allocated_bytes.all.current", 0)),
            int(stats.get("allocated_bytes.all.peak", 0)),
            int(stats.get("allocation.all.current", 0)),
            int(self._properties.total_memory),
        )

    def handles(self) -> tuple[str, tuple[int, ...]]:
        if self.device.type != "cuda" or torch.version.cuda is None:
            return "", ()
        return "cuda", tuple(int(stream.cuda_stream) for stream in self._streams)


def _architecture(properties: Any) -> str:
    if torch.version.hip is not None:
        return str(properties.gcnArchName).split(":")[0]
    if hasattr(properties, "major"):
        return f"sm_{properties.major}{properties.minor}"
    return ""


@functools.cache
def dlpack_device(device: torch.device) -> tuple[int, int]:
    """DLPack's type and number of a device, as torch exports them."""
    kind, number = torch.empty(0, dtype=torch.uint8, device=device).__dlpack_device__()
    return int(kind), int(number)
