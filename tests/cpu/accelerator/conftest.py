"""The path of an accelerator over host memory: two simulated devices, and Triton's interpreter for its kernels."""

from __future__ import annotations

import os

os.environ["FLAGOS_DEVICE"] = "simulated"
os.environ["FLAGOS_NUM_CPU_DEVICES"] = "2"
os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported
os.environ["JAX_PLATFORMS"] = "flagos,cpu"

from support.backend import backend, context, memory

__all__ = ["backend", "context", "memory"]
