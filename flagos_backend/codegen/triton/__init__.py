"""The emitter for accelerators: a region in, Triton source and a prepared kernel out. Beside codegen/cpu/emitter.py."""

from flagos_backend.codegen.triton.compiling import Measurement, warm_up_together
from flagos_backend.codegen.triton.kernel import RegionKernel, prepare
from flagos_backend.codegen.triton.measured import RegionKernels
from flagos_backend.codegen.triton.schedule import schedule

__all__ = ["Measurement", "RegionKernel", "RegionKernels", "prepare", "schedule", "warm_up_together"]
