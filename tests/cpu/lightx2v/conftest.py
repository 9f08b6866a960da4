"""The tools are no part of the wheel: the suite and the block come from the checkout."""

from __future__ import annotations

import sys
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[3]
sys.path += [str(_ROOT), str(_ROOT / "tools")]
