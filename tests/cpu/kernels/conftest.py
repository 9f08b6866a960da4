"""Library kernels in Triton's interpreter. Before anything imports Triton, which then reads the variable."""

from __future__ import annotations

import importlib.util
import os

import pytest

os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(scope="session")
def flag_gems():
    """FlagGems on host tensors. tools/test installs it; elsewhere it may be missing."""
    if importlib.util.find_spec("flag_gems") is None and os.environ.get("FLAGOS_TEST_INSTALLED") != "1":
        pytest.skip("FlagGems is not installed: pip install --no-deps flag_gems SQLAlchemy")
    from support.flaggems_interpreter import load

    return load()
