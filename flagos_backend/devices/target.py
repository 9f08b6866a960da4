"""The machine that a program is compiled for, as the stages from matching to emission see it."""

from __future__ import annotations

from dataclasses import dataclass


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


HOST = Target("cpu")
