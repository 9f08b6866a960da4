"""Where a random program's decisions come from: recorded, so that it can be made again, and made smaller.

First stage of the fuzzer. A block holds the decisions of one instruction; 0 is the simplest decision everywhere.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")

Blocks = tuple[tuple[int, ...], ...]


class Tape:
    """Random decisions, or those of ``blocks``: beyond their end every decision is 0, and no block is left."""

    def __init__(self, rng: random.Random | None, blocks: Blocks = ()) -> None:
        self._rng = rng
        self._replayed = blocks
        self._recorded: list[list[int]] = []
        self._position = 0

    @property
    def blocks(self) -> Blocks:
        """What was decided, enough to make the same program again."""
        return tuple(map(tuple, self._recorded))

    @property
    def is_empty(self) -> bool:
        """Whether a replay has no further instruction."""
        return self._rng is None and len(self._recorded) >= len(self._replayed)

    def open_block(self) -> None:
        self._recorded.append([])
        self._position = 0

    def below(self, limit: int) -> int:
        """A number in [0, limit)."""
        if self._rng is not None:
            value = self._rng.randrange(limit)
        else:
            number = len(self._recorded) - 1
            block = self._replayed[number] if number < len(self._replayed) else ()
            value = min(block[self._position], limit - 1) if self._position < len(block) else 0
        self._position += 1
        self._recorded[-1].append(value)
        return value

    def chance(self, one_in: int) -> bool:
        """True once in ``one_in`` times; False is the simple answer."""
        return self.below(one_in) == one_in - 1

    def pick(self, choices: Sequence[T]) -> T:
        return choices[self.below(len(choices))]

    def nearly_first(self, choices: Sequence[T]) -> T:
        """One of ``choices``, the first ones more often."""
        return choices[min(self.below(len(choices)), self.below(len(choices)))]

    def shuffled(self, count: int) -> list[int]:
        """A permutation of range(count); the simple one is the identity."""
        rest = list(range(count))
        return [rest.pop(self.below(len(rest))) for _ in range(count)]

    def subset(self, count: int) -> list[int]:
        """Some of range(count), increasing; the simple one is empty."""
        return [number for number in range(count) if self.below(2)]
