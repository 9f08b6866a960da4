"""The tools are no part of the wheel: they come from the checkout, everything else from where it is installed."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[3]))
