"""The backend through its table, and stock XLA's CPU as the oracle; JAX itself stays without flagos."""

from __future__ import annotations

import os

os.environ["JAX_PLATFORMS"] = "cpu"
