"""The backend config of a custom call as JSON. It comes out of a program, which nobody vouches for."""

from __future__ import annotations

import json
from typing import Any, TypeGuard

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


def is_integer(value: Any) -> TypeGuard[int]:
    """Whether the value is an integer of 64 bits, which true and false are not."""
    return type(value) is int and -(1 << 63) <= value < 1 << 63


def is_size(value: Any) -> TypeGuard[int]:
    return is_integer(value) and value >= 0


def is_permutation(value: Any, rank: int) -> TypeGuard[list[int]]:
    """Whether the value is a list of the numbers of so many dimensions."""
    return isinstance(value, list) and all(map(is_integer, value)) and sorted(value) == list(range(rank))


def _parts(value: Any) -> Any:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()
