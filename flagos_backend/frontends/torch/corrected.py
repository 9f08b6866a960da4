"""Operators of PyTorch whose traced results the device and torch.compile both correct; see compile/corrections.py."""

from __future__ import annotations

from typing import Final

import torch

aten = torch.ops.aten

#: Batch norms, whose results 1 and 2 are statistics.
BATCH_NORMS: Final = (
    aten.native_batch_norm.default,
    aten._native_batch_norm_legit.default,
    aten._native_batch_norm_legit.no_stats,
    aten._native_batch_norm_legit_functional.default,
    aten._native_batch_norm_legit_no_training.default,
    aten._batch_norm_with_update.default,
    aten._batch_norm_with_update_functional.default,
    aten._batch_norm_no_update.default,
)

#: Operators whose results lie as the images that they are given, by rules for each device.
IMAGE_OPERATORS: Final = (
    aten.convolution.default,
    aten.convolution_backward.default,
    aten.pixel_shuffle.default,
)
