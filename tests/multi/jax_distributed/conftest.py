"""JAX in two processes of one accelerator each: worker.py makes the checks, once for all tests."""

from __future__ import annotations

from pathlib import Path

from support.processes import outcomes_fixture

outcomes = outcomes_fixture(Path(__file__).parent, 2)
