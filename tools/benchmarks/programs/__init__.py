"""The JAX programs of the speed comparison, each with its arguments and what it must at least move and compute."""

from benchmarks.programs.everyday import everyday
from benchmarks.programs.program import Program, Scale
from benchmarks.programs.suite import programs
from benchmarks.programs.wild import wild

__all__ = ["Program", "Scale", "everyday", "programs", "wild"]
