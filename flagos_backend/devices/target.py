"""The machine that a program is compiled for, as the stages from matching to emission see it."""

from __future__ import annotations

from dataclasses import dataclass

from flagos_backend.ir.types import ElementType

# From this one on matrix units read 32-bit operands of a product only with the contracted dimension last, and kernels
# can start early.
_HOPPER = 90


@dataclass(frozen=True, slots=True)
class Target:
    """Equal for all devices that can run the same generated code; part of every cache key.

    ``device_type``: PyTorch's name of the device ("cpu", "cuda", "npu", "musa", "mlu", ...). ``vendor``: FlagGems'
    name of its maker ("nvidia", "ascend", "mthreads", ...), "" for the host. ``architecture``: the maker's name of the
    instruction set ("sm_90"), "" for the host. ``multiprocessors``: how many programs of a grid run at once, at least.
    ``shared_memory_bytes``: what one program may use of the memory on chip. ``warp_size``: lanes that run in step.
    """

    device_type: str
    vendor: str = ""
    architecture: str = ""
    multiprocessors: int = 1
    shared_memory_bytes: int = 0
    warp_size: int = 1

    @property
    def is_host(self) -> bool:
        return self.device_type == "cpu" and not self.vendor

    @property
    def untaken_operations(self) -> int:
        """How many operations on elements cost no more than a branch around them, which takes some 100 ns of a host and
        some 10 us of an accelerator, where each branch is a node of a graph."""
        return 1024 if self.is_host else 1 << 23

    def reads_contracted_last(self, element_type: ElementType) -> bool:
        """Whether products of this type, rounded as matrix units want it, are faster of operands that lie so."""
        return self.launches_early and element_type is ElementType.F32

    @property
    def launches_early(self) -> bool:
        """Whether a kernel may start while the one before it ends, and waits by itself for what that one wrote."""
        version = self.architecture.removeprefix("sm_")
        return self.vendor == "nvidia" and version.isdecimal() and int(version) >= _HOPPER


HOST = Target("cpu")
