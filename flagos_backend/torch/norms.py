"""Operators of PyTorch that the device and torch.compile both correct the statistics of."""

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
