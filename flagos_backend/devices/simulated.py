"""An accelerator that is not there: the path of a device, over host tensors, so that a machine without one can test all
of it but the silicon. Chosen with FLAGOS_DEVICE=simulated, never by default."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import threading
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from flagos_backend.devices import target
from flagos_backend.devices.accelerator import Capsule, DeviceFacts, Event, MemoryStats, StreamKind, from_dlpack
from flagos_backend.errors import DeviceMemoryExhausted
from flagos_backend.process.torch_loading import torch

SIMULATED = "simulated"
#: Small enough that a test can fill it, large enough for every other test.
MEMORY_BYTES = 4 << 30


@dataclass(frozen=True, slots=True)
class _Reached:
    """Streams of this device are done when the call that enqueues returns."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


@functools.cache
def _interpret_one_at_a_time() -> None:
    """Triton's interpreter swaps functions of Triton's while a kernel runs, and several devices are several threads. It
    also parses a kernel first, and CPython 3.11 counts the depth of a tree for all threads together."""
    if importlib.util.find_spec("triton") is None:
        return
    interpreted: Any = importlib.import_module("triton.runtime.interpreter").InterpretedFunction
    lock, original = threading.Lock(), interpreted.run

    @functools.wraps(original)
    def run(self: Any, *arguments: Any, **keywords: Any) -> Any:
        with lock:
            return original(self, *arguments, **keywords)

    interpreted.run = run


class SimulatedAccelerator:
    """Fills what it allocates with a pattern, so that reading memory before it is written shows."""

    def __init__(self, ordinal: int) -> None:
        # Read when Triton is imported, which nothing of a simulated device's process has done before.
        os.environ.setdefault("TRITON_INTERPRET", "1")
        _interpret_one_at_a_time()
        self.ordinal = ordinal
        self.device = torch.device("cpu")
        self.target = target.SIMULATED

    def facts(self) -> DeviceFacts:
        return DeviceFacts("simulated accelerator", MEMORY_BYTES)

    def guard(self) -> AbstractContextManager[None]:
        return nullcontext()

    def allocate(self, num_bytes: int, stream: StreamKind) -> torch.Tensor:
        if num_bytes > MEMORY_BYTES:
            raise DeviceMemoryExhausted(device=SIMULATED, wanted=num_bytes, free=MEMORY_BYTES, total=MEMORY_BYTES)
        return torch.full((num_bytes,), 0xA5, dtype=torch.uint8)

    def allocate_pinned(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8)

    def record(self, stream: StreamKind) -> Event:
        return _Reached()

    def wait(self, stream: StreamKind, event: Event) -> None:
        pass

    def copy(self, stream: StreamKind, to: Capsule, source: Capsule) -> None:
        from_dlpack(to).copy_(from_dlpack(source))

    def memory_stats(self, clear_peaks: bool) -> MemoryStats:
        return MemoryStats(-1, -1, -1, MEMORY_BYTES)

    def handles(self) -> tuple[str, tuple[int, ...]]:
        return "", ()
