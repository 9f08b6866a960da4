"""The backend library through its table."""

from support.backend import backend, context, memory

__all__ = ["backend", "context", "memory"]
