"""The JAX programs of the speed comparison, each with its arguments and what it must at least move and compute."""

from .everyday import everyday
from .program import Program, Scale
from .suite import programs
from .wild import wild

__all__ = ["Program", "Scale", "everyday", "programs", "wild"]
