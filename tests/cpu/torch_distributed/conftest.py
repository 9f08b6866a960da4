"""torch.compile in three processes of a gloo group, and eager PyTorch on the device in two: worker.py and
device_worker.py make the checks, once for all tests."""

from __future__ import annotations

from pathlib import Path

from support.processes import outcomes_fixture

outcomes = outcomes_fixture(Path(__file__).parent, 3)
device_outcomes = outcomes_fixture(Path(__file__).parent, 2, prefix="device_")
