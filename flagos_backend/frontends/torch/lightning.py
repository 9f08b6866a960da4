"""Lightning on the device: ``Trainer(strategy=flagos_backend.frontends.torch.lightning.strategy())``.

Lightning chooses among devices that it knows by name, and takes one that it does not know as an object.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

import torch

from flagos_backend.frontends.torch.device.opening import DEVICE_TYPE


def strategy() -> Any:
    """Lightning's strategy for one device, with the device as its accelerator; of the package that is imported,
    ``lightning`` or ``pytorch_lightning``."""
    package = "pytorch_lightning" if "pytorch_lightning" in sys.modules else "lightning.pytorch"
    accelerators = importlib.import_module(f"{package}.accelerators")
    strategies = importlib.import_module(f"{package}.strategies")
    device = torch.device(DEVICE_TYPE, 0)
    return strategies.SingleDeviceStrategy(device=device, accelerator=_accelerator(accelerators.Accelerator))


def _accelerator(base: Any) -> Any:
    class FlagosAccelerator(base):  # type: ignore[misc]
        """Lightning's accelerator for the device."""

        def setup_device(self, device: torch.device) -> None:
            """Opens the device, and refuses another one's name."""
            with torch.get_device_module(DEVICE_TYPE).device(device):
                torch.get_device_module(DEVICE_TYPE).init()

        def get_device_stats(self, device: Any) -> dict[str, Any]:
            """The counters of the device's memory."""
            stats: dict[str, Any] = torch.get_device_module(DEVICE_TYPE).memory_stats(device)
            return stats

        def teardown(self) -> None:
            """Nothing is kept for later."""

        @staticmethod
        def parse_devices(devices: Any) -> Any:
            """A number of devices, or their indices."""
            return devices

        @staticmethod
        def get_parallel_devices(devices: Any) -> list[torch.device]:
            """A process has one."""
            return [torch.device(DEVICE_TYPE, 0)]

        @staticmethod
        def auto_device_count() -> int:
            """How many devices this process can use."""
            count: int = torch.get_device_module(DEVICE_TYPE).device_count()
            return count

        @staticmethod
        def is_available() -> bool:
            """Whether a backend is accepted."""
            return FlagosAccelerator.auto_device_count() > 0

        @staticmethod
        def name() -> str:
            """What Lightning calls it."""
            return DEVICE_TYPE

    return FlagosAccelerator()
