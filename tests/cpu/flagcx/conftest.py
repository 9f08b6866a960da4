"""The suite is of the checkout, which has the tools."""

from __future__ import annotations

import sys
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[3]
sys.path += [str(_ROOT), str(_ROOT / "tools")]
