"""A corpus of named JAX programs, their HLO bytes, and stock XLA as the oracle that runs them.

``PROGRAMS[name]`` holds a function and its argument specs; ``hlo_bytes`` lowers it, ``run_on_xla`` runs HLO on jaxlib's
CPU client.
"""

from programs import contraction, elementwise, models, movement
from programs.core import PROGRAMS, Program, hlo_bytes, make_argument, program, run_on_xla, run_with_jax

__all__ = [
    "PROGRAMS",
    "Program",
    "contraction",
    "elementwise",
    "hlo_bytes",
    "make_argument",
    "models",
    "movement",
    "program",
    "run_on_xla",
    "run_with_jax",
]
