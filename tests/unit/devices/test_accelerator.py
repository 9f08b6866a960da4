"""Memory of a device that torch drives, with an allocator that has none left."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest
import torch

from flagos_backend.devices.accelerator import StreamKind, TorchAccelerator
from flagos_backend.devices.device_lock import device_lock
from flagos_backend.errors import DeviceMemoryExhausted


class Full(TorchAccelerator):
    """Whose allocator has ``kept`` bytes that nobody uses, and does not give them back while a program is captured."""

    def __init__(self, kept: int) -> None:
        self.ordinal, self.device = 0, torch.device("cpu")
        self.kept, self.free, self.captures = kept, 0, False
        self._module = SimpleNamespace(empty_cache=self.give_back, mem_get_info=lambda ordinal: (self.free, 100))

    def give_back(self) -> None:
        if not self.captures:
            self.free, self.kept = self.free + self.kept, 0

    def _allocate(self, num_bytes: int, stream: StreamKind) -> torch.Tensor:
        if num_bytes > self.free:
            raise torch.OutOfMemoryError("none left")
        self.free -= num_bytes
        return torch.empty(num_bytes, dtype=torch.uint8)


def test_what_the_allocator_keeps_is_used_before_memory_is_exhausted() -> None:
    device = Full(50)
    assert device.allocate(40, StreamKind.COMPUTE).numel() == 40
    with pytest.raises(DeviceMemoryExhausted, match="40"):
        device.allocate(40, StreamKind.COMPUTE)
    assert not device_lock.locked()


def test_it_waits_for_a_capture_that_has_the_allocator_give_nothing_back() -> None:
    device = Full(50)
    found: list[torch.Tensor] = []
    device.captures = True
    with device_lock:
        thread = threading.Thread(target=lambda: found.append(device.allocate(40, StreamKind.TO_DEVICE)))
        thread.start()
        thread.join(0.1)
        device.captures = False
    thread.join()
    assert [tensor.numel() for tensor in found] == [40]
