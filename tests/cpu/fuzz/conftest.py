"""The backend through its table, and stock XLA's CPU as the oracle; JAX itself stays without flagos. The fuzzer is no
part of the wheel: it comes from the checkout, everything else from where it is installed."""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"
sys.path.append(str(Path(__file__).resolve().parents[3]))
