"""torch.compile in three processes of a gloo group: worker.py makes the checks, once for all tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.processes import Outcomes, run_processes

PROCESSES = 3


@pytest.fixture(scope="session")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    folder = tmp_path_factory.mktemp("processes")
    return run_processes(Path(__file__).with_name("worker.py"), PROCESSES, folder, timeout=240)
