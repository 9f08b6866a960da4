"""Loads torch for the backend, and settles before the backend computes what torch would settle while it does. Imported
before anything else of runtime/.

OpenMP threads spin at their barriers by default: on a machine with other work each small parallel loop then waits for a
time slice of every thread, which has cost 100 to 1000 times the loop itself. The policy is read once, when the OpenMP
library is loaded with torch; a program that imported torch before, or set a policy of its own, keeps what it has.

Functions of floats are those of MKL's vector library where torch has it, and MKL looks for the processor's code in the
first call. Threads that make that call at the same time, devices of the host or torch's own, may get code that is right
to 12 bits only (github.com/pytorch/pytorch/issues/188792): one thread makes it here.
"""

from __future__ import annotations

import os
import sys

_POLICY = "OMP_WAIT_POLICY"

if "torch" not in sys.modules and _POLICY not in os.environ:
    os.environ[_POLICY] = "passive"
    try:
        import torch
    finally:
        del os.environ[_POLICY]

import torch  # noqa: E402

# Those of ATen/cpu/vml.h, each for both types that it has.
_OF_MKL = (
    *(torch.acos, torch.asin, torch.atan, torch.ceil, torch.cos, torch.erf, torch.erfc, torch.exp, torch.floor),
    *(torch.log, torch.log10, torch.log1p, torch.log2, torch.sin, torch.sqrt, torch.tan, torch.tanh, torch.trunc),
)


def call_vector_functions() -> None:
    """Calls each function that torch may have of MKL's vector library once, in this thread."""
    for dtype in (torch.float32, torch.float64):
        one = torch.ones(1, dtype=dtype)
        for function in _OF_MKL:
            function(one)


call_vector_functions()
