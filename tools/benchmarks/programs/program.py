"""What a measured program is, and the two scales it comes in."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

Arguments = tuple[Any, ...]


class Scale(enum.Enum):
    """How large the programs are: what a host with a few cores, or an accelerator, is busy with for milliseconds."""

    HOST = "host"
    ACCELERATOR = "accelerator"


@dataclass(frozen=True)
class Program:
    """``arguments`` makes random inputs as NumPy arrays (bfloat16 ones of ml_dtypes), new ones for each seed.

    ``flops`` and the bytes of ``traffic`` are the least that any implementation computes and moves: matrix products
    only, inputs read once, results written once unless the program ``updates_in_place``. They give the floor.
    ``precision``: largest error allowed between two implementations, relative to the largest magnitude of the array.
    ``donated``: arguments whose storage the program may use up.
    ``asking``: the same program as who knows the peer writes it, with the kernel asked for that the peer has for it.
    """

    name: str
    function: Callable[..., Any]
    arguments: Callable[[np.random.Generator], Arguments]
    flops: float = 0.0
    precision: float = 2e-2
    donated: tuple[int, ...] = ()
    updates_in_place: bool = False
    asking: Callable[..., Any] | None = None

    def traffic(self, arguments: Arguments) -> float:
        """Bytes read and written."""
        results = () if self.updates_in_place else jax.eval_shape(self.function, *arguments)
        return num_bytes(arguments, results)


def num_bytes(*trees: Any) -> float:
    """Bytes of all arrays (or shapes of arrays) in the trees."""
    leaves = jax.tree.leaves(trees)
    return float(sum(int(np.prod(leaf.shape)) * np.dtype(leaf.dtype).itemsize for leaf in leaves))
