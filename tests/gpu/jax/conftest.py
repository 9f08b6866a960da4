"""JAX with this machine's first accelerators."""

from __future__ import annotations

import os

import torch

# tests/conftest.py names the host for the suites that are meant for it.
os.environ["FLAGOS_DEVICE"] = (torch.accelerator.current_accelerator() or torch.device("cpu")).type
os.environ["JAX_PLATFORMS"] = "flagos,cpu"
os.environ["FLAGOS_PREFER"] = "vendor"  # nothing is measured: these tests are not about kernels

import flagos_backend.frontends.jax

flagos_backend.frontends.jax.initialize()
