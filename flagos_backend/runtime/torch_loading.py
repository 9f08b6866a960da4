"""Loads torch for the backend so that its threads sleep while they wait. Imported before anything else of runtime/.

OpenMP threads spin at their barriers by default: on a machine with other work each small parallel loop then waits for a
time slice of every thread, which has cost 100 to 1000 times the loop itself. The policy is read once, when the OpenMP
library is loaded with torch; a program that imported torch before, or set a policy of its own, keeps what it has.
"""

from __future__ import annotations

import os
import sys

_POLICY = "OMP_WAIT_POLICY"

if "torch" not in sys.modules and _POLICY not in os.environ:
    os.environ[_POLICY] = "passive"
    try:
        import torch  # noqa: F401
    finally:
        del os.environ[_POLICY]
