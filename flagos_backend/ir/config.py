"""The backend config of a custom call as JSON. It comes out of a program, which nobody vouches for."""

from __future__ import annotations

import json
from typing import Any

#: Levels of lists and objects in one another: what reads a config may recurse.
MAX_DEPTH = 64


def parse_config(text: bytes) -> Any:
    """The JSON value. Raises ValueError for what is none, and for one that nests deeper than MAX_DEPTH."""
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError("it nests too deep") from None
    level, depth = [value], 0
    while level := [part for parts in level for part in _parts(parts)]:
        depth += 1
        if depth > MAX_DEPTH:
            raise ValueError(f"it nests deeper than {MAX_DEPTH} levels")
    return value


def _parts(value: Any) -> Any:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()
