"""What a reader of hostile bytes is to the fuzzer: inputs that it takes, inputs that it may refuse, and its bounds."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

#: The outcome of an input that is taken whole.
ACCEPTED = "accepted"


@dataclass(frozen=True)
class Target:
    """`take` reads an input and says what came of it: ACCEPTED, or a word for how it was refused. Whatever it raises is
    a finding. `valid` inputs are accepted, before all others and between them."""

    name: str
    valid: Callable[[], Sequence[bytes]]
    make: Callable[[random.Random], bytes]
    take: Callable[[bytes], str]
    #: Bounds for one input: of the process's CPU time, and of what it adds to the process's memory.
    seconds: float = 2.0
    megabytes: int = 64

    def input(self, seed: int) -> bytes:
        return self.make(random.Random(f"{self.name} {seed}"))
