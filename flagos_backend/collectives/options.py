"""What the environment says of collectives."""

from __future__ import annotations

import math
import os
from typing import Final

from flagos_backend.errors import CollectiveTimeoutInvalid

VARIABLE: Final = "FLAGOS_COLLECTIVE_TIMEOUT"
_DEFAULT: Final = 600.0


def timeout_seconds() -> float:
    """How long a collective waits for its participants. Raises CollectiveTimeoutInvalid."""
    text = os.environ.get(VARIABLE, "")
    if not text:
        return _DEFAULT
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise CollectiveTimeoutInvalid(variable=VARIABLE, value=text)
    return seconds
