"""Random convolutions, and their HLO text."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from flagos_backend.ir.attributes import WindowDimension
from flagos_backend.kernels.reference.windows import window_count


@dataclass(frozen=True)
class Convolution:
    lhs: tuple[int, ...]
    rhs: tuple[int, ...]
    result: tuple[int, ...]
    attributes: str


def labels(names: str, order: np.ndarray) -> str:
    return "".join(names[i] for i in order)


def random_convolution(rank: int, rng: np.random.Generator, padded: bool = True) -> Convolution:
    while True:
        groups = int(rng.integers(1, 4))
        kind = rng.choice(["none", "feature", "batch"])
        feature_groups = groups if kind == "feature" else 1
        batch_groups = groups if kind == "batch" else 1
        per_group, outputs = int(rng.integers(1, 4)), int(rng.integers(1, 4)) * groups
        batch = int(rng.integers(1, 4)) * batch_groups
        spatial = [int(d) for d in rng.integers(1, 8, rank)]
        window = [
            WindowDimension(
                int(rng.integers(1, 4)),
                int(rng.integers(1, 3)) if rng.random() < 0.6 else 1,
                int(rng.integers(-1, 4)) if padded else 0,
                int(rng.integers(-1, 4)) if padded else 0,
                int(rng.integers(1, 3)),
                int(rng.integers(1, 4)) if padded and rng.random() < 0.5 else 1,
                bool(rng.random() < 0.3),
            )
            for _ in range(rank)
        ]
        counts = [window_count(s, w) for s, w in zip(spatial, window, strict=True)]
        if all(counts):
            break
    names = "".join(map(str, range(rank)))
    orders = [rng.permutation(rank + 2) for _ in range(3)]
    if any(w.padding_low < 0 < w.padding_high for w in window):
        # XLA's CPU reads outside of its array, also where it brings others into the order in which it does:
        # test_cut_at_one_end_and_padded_at_the_other.
        return random_convolution(rank, rng, padded)
    sizes = (
        [batch, per_group * feature_groups, *spatial],
        [outputs, per_group, *(w.size for w in window)],
        [batch // batch_groups, outputs, *counts],
    )
    lhs, rhs, result = (tuple(s[i] for i in order) for s, order in zip(sizes, orders, strict=True))
    dim_labels = (
        f"{labels('bf' + names, orders[0])}_{labels('oi' + names, orders[1])}->{labels('bf' + names, orders[2])}"
    )
    attributes = f"dim_labels={dim_labels}"
    if rank:
        attributes += (
            f", window={{size={'x'.join(str(w.size) for w in window)} stride={'x'.join(str(w.stride) for w in window)}"
            f" pad={'x'.join(f'{w.padding_low}_{w.padding_high}' for w in window)}"
            f" lhs_dilate={'x'.join(str(w.base_dilation) for w in window)}"
            f" rhs_dilate={'x'.join(str(w.window_dilation) for w in window)}"
            f" rhs_reversal={'x'.join(str(int(w.window_reversal)) for w in window)}}}"
        )
    if feature_groups > 1:
        attributes += f", feature_group_count={feature_groups}"
    if batch_groups > 1:
        attributes += f", batch_group_count={batch_groups}"
    return Convolution(lhs, rhs, result, attributes)


def convolution_text(c: Convolution, lhs: str, rhs: str, result: str) -> str:
    def shape(name: str, dims: tuple[int, ...]) -> str:
        return f"{name}[{','.join(map(str, dims))}]"

    return f"""
ENTRY e {{
  x = {shape(lhs, c.lhs)} parameter(0)
  w = {shape(rhs, c.rhs)} parameter(1)
  ROOT r = {shape(result, c.result)} convolution(x, w), {c.attributes}
}}"""
