"""Which convolutions are asked of libraries as gradients of weights. For the pass that lays their operands out and the
kernels that ask."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from flagos_backend.ir.attributes import WindowDimension


def is_weight_gradient(
    window: Sequence[WindowDimension], counts: Sequence[int], spatial: Sequence[int], groups: int
) -> bool:
    """Whether a convolution of inputs with gradients of results, as gradients of weights are, can be asked for as
    that: with windows larger than the result, which other algorithms are not made for. ``counts`` and ``spatial``: the
    sizes of result and input along the window's dimensions.
    """
    if groups != 1 or prod(w.size for w in window) <= prod(counts):
        return False
    for size, count, w in zip(spatial, counts, window, strict=True):
        if w.base_dilation != 1 or w.padding_low < 0:
            return False
        # The forward convolution that has these weights has a result as large as the window.
        reach = size + 2 * w.padding_low - w.stride * (count - 1) - 1
        if reach < 0 or reach // w.window_dilation + 1 != w.size:
            return False
    return True
