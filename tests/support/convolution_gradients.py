"""Convolutions with their gradients, compared with and without a pass."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import torch

from flagos_backend.compile.plan_builder import build_plan
from flagos_backend.ir.hlo import Module
from flagos_backend.kernels.reference.registry import Run
from programs import run_on_xla
from support.against_xla import assert_same


def compare(hlo: bytes, module: Module, *arguments: np.ndarray) -> None:
    with torch.inference_mode():
        results = build_plan(module.entry).run(Run(), [torch.from_numpy(a.copy()) for a in arguments])
    for ours, theirs in zip(results, run_on_xla(hlo, arguments), strict=True):
        assert_same(ours.numpy(), theirs, 2e-5)


def gradients(function: Any) -> Any:
    return lambda x, w: jax.grad(lambda x, w: (function(x, w) ** 2).sum(), (0, 1))(x, w)
