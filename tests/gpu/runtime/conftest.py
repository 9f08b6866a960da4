"""The backend library on this machine's first accelerator."""

from __future__ import annotations

import os

import torch

# tests/conftest.py names the host for the suites that are meant for it.
os.environ["FLAGOS_DEVICE"] = (torch.accelerator.current_accelerator() or torch.device("cpu")).type
os.environ["JAX_PLATFORMS"] = "flagos,cpu"
os.environ["FLAGOS_PREFER"] = "vendor"  # nothing is measured: these tests are not about kernels

from support.backend import backend, context, memory

__all__ = ["backend", "context", "memory"]
