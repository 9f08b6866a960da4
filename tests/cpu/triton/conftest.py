"""Generated Triton kernels: on this machine's accelerator if it has one, else through Triton's interpreter."""

from __future__ import annotations

import os

import torch

if not torch.accelerator.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported
