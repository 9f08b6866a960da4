"""The backend library through its table, in a process with three host devices."""

from __future__ import annotations

import os

os.environ["FLAGOS_NUM_CPU_DEVICES"] = "3"

from support.backend import backend, context, memory

__all__ = ["backend", "context", "memory"]
