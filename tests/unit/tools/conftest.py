"""The tools are no part of the wheel: they come from the checkout, everything else from where it is installed."""

from __future__ import annotations

import sys
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[3]
sys.path += [str(_ROOT), str(_ROOT / "tools")]
