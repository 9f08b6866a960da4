"""The machine that a program is compiled for, as the stages from matching to emission see it."""

from __future__ import annotations

from dataclasses import dataclass

from flagos_backend.ir.cost import HOST_ROOFLINE, Roofline
from flagos_backend.ir.types import ElementType

# From this one on matrix units read 32-bit operands of a product only with the contracted dimension last, and kernels
# can start early.
_HOPPER = 90


@dataclass(frozen=True, slots=True)
class VendorFacts:
    """What a vendor's toolchain offers beyond plain Triton.

    ``math_library``: Triton binds its device library, whose functions round correctly, and whose products and sums
    round once; ``launch_options`` tell the vendor's compiler so. ``assembly``: kernels may hold NVIDIA's assembly.
    ``tensor_float``: matrix units read 32-bit floats rounded to TF32. ``limits_registers``: kernels may be told how
    many registers a thread takes. ``fast_float64``: 64-bit floats are computed at no less than half the rate of 32-bit
    ones, so that an iteration which then needs fewer steps may gain by them. ``nccl``: FlagCX passes collectives of
    one group on to NCCL.
    """

    math_library: bool = False
    launch_options: tuple[tuple[str, bool], ...] = ()
    assembly: bool = False
    tensor_float: bool = False
    limits_registers: bool = False
    fast_float64: bool = False
    nccl: bool = False


_NONE = VendorFacts()
# By FlagGems' name of the vendor. Each operation rounds itself, and subnormal numbers stay what they are. Integers wrap
# around: Triton writes a check beside each operation on them otherwise, which traps in its debug mode.
_VENDORS = {
    "amd": VendorFacts(math_library=True, launch_options=(("enable_fp_fusion", False), ("sanitize_overflow", False))),
    "nvidia": VendorFacts(
        math_library=True,
        launch_options=(
            ("enable_fp_fusion", False),
            ("enable_reflect_ftz", False),
            ("sanitize_overflow", False),
        ),
        assembly=True,
        tensor_float=True,
        limits_registers=True,
        fast_float64=True,
        nccl=True,
    ),
}


def facts_of(vendor: str) -> VendorFacts:
    """By FlagGems' name of the vendor; of one that is not known, nothing."""
    return _VENDORS.get(vendor, _NONE)


@dataclass(frozen=True, slots=True)
class SingleProgram:
    """What one program of a grid does alone on its multiprocessor in a second, about: bytes moved, and operations of
    one element each. ``start_seconds``: what several kernels take longer to start than one does, in a replay."""

    bytes_per_second: float
    operations_per_second: float
    start_seconds: float


@dataclass(frozen=True, slots=True)
class Chip:
    """``roofline``: matrix units on dense 16-bit floats and memory, by the data sheet. ``single_program``: measured;
    None where nobody has."""

    roofline: Roofline
    single_program: SingleProgram | None = None


# Measured on an H200. Of a chip of which nothing is known it is assumed.
_H200 = SingleProgram(7e10, 2e11, 5e-6)
# By the vendor's name of the instruction set, of the fastest chip that has it (A100 80 GB, H200), so that times by
# rooflines are lower bounds.
_CHIPS = {
    "sm_80": Chip(Roofline(3.12e14, 2.04e12)),
    "sm_90": Chip(Roofline(9.9e14, 4.8e12), _H200),
}
# Of a chip that is not measured: its multiprocessor's share of the roofline, times these, which hold on the H200. Alone
# it has more than its share of the memory, and operations are not the matrix units'.
_SHARE_OF_MEMORY, _SHARE_OF_MATRIX_UNITS = 1.9, 0.027
# PyTorch's device types whose libraries go by switches of the process for products of 32-bit floats.
_WITH_SWITCHES = frozenset({"cuda"})
# Instruction sets for which ATen has a kernel of grouped products of BF16; for others it loops, and waits for sizes.
_WITH_GROUPED_PRODUCTS = frozenset({"sm_90", "sm_100"})
# Those for which ATen has a fused attention that is used here.
_WITH_FUSED_ATTENTION = frozenset({"cuda"})


@dataclass(frozen=True, slots=True)
class Target:
    """Equal for all devices that can run the same generated code; part of every cache key.

    ``device_type``: PyTorch's name of the device ("cpu", "cuda", "npu", "musa", "mlu", ...). ``vendor``: FlagGems'
    name of its vendor ("nvidia", "ascend", "mthreads", ...), "" for the host. ``architecture``: the vendor's name of
    the instruction set ("sm_90"), "" for the host. ``multiprocessors``: how many programs of a grid run at once, at
    least. ``shared_memory_bytes``: what one program may use of the memory on chip. ``warp_size``: lanes that run in
    step.
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
    def facts(self) -> VendorFacts:
        """Of its vendor; of one that is not known, nothing."""
        return facts_of(self.vendor)

    @property
    def roofline(self) -> Roofline | None:
        """What one device does at most; None where nobody said."""
        if self.is_host:
            return HOST_ROOFLINE
        chip = _CHIPS.get(self.architecture)
        return chip.roofline if chip else None

    @property
    def single_program(self) -> SingleProgram:
        """Measured, or derived from the roofline, or an H200's."""
        chip = _CHIPS.get(self.architecture)
        if chip is None:
            return _H200
        if chip.single_program is not None:
            return chip.single_program
        share = 1 / self.multiprocessors
        return SingleProgram(
            chip.roofline.bytes_per_second * share * _SHARE_OF_MEMORY,
            chip.roofline.flops_per_second * share * _SHARE_OF_MATRIX_UNITS,
            _H200.start_seconds,
        )

    @property
    def has_tensor_float_switches(self) -> bool:
        """Whether PyTorch's switches decide if its library rounds 32-bit operands of products."""
        return self.device_type in _WITH_SWITCHES

    @property
    def has_grouped_products(self) -> bool:
        """Whether ATen multiplies groups of rows of BF16, each with a matrix of its own, in one kernel."""
        return self.device_type in _WITH_SWITCHES and self.architecture in _WITH_GROUPED_PRODUCTS

    @property
    def has_fused_attention(self) -> bool:
        """Whether ATen has one for devices of this type that is used here."""
        return self.device_type in _WITH_FUSED_ATTENTION

    @property
    def untaken_operations(self) -> int:
        """How many operations on elements cost no more than a branch around them, which takes some 100 ns of a host and
        some 10 us of an accelerator, where each branch is a node of a graph."""
        return 1024 if self.is_host else 1 << 23

    def reads_contracting_dimensions_minor(self, element_type: ElementType) -> bool:
        """Whether products of this type, rounded as matrix units want it, are faster of operands that lie so."""
        return self.launches_early and element_type is ElementType.F32

    @property
    def launches_early(self) -> bool:
        """Whether a kernel may start while the one before it ends, and waits by itself for what that one wrote."""
        return self._capability >= _HOPPER

    @property
    def triton_target(self) -> tuple[str, int, int] | None:
        """Backend, architecture and size of a warp as Triton names them, before its driver can be asked; None where
        only that says it."""
        return (self.device_type, self._capability, self.warp_size) if self._capability else None

    @property
    def _capability(self) -> int:
        """Of a chip that CUDA names ("sm_90"): 90; else 0."""
        version = self.architecture.removeprefix("sm_")
        return int(version) if self.facts.assembly and version.isdecimal() else 0


HOST = Target("cpu")
# The path of an accelerator over host memory, for tests: an unknown vendor with none of a vendor's extras.
SIMULATED = Target("cpu", vendor="simulated", architecture="host", multiprocessors=2, warp_size=1)
# NVIDIA's H100 and H200, for looking at their programs where there is none.
HOPPER = Target("cuda", "nvidia", "sm_90", multiprocessors=132, shared_memory_bytes=232448, warp_size=32)
#: By the name that the command line knows them under.
NAMED_TARGETS = {"cpu": HOST, "simulated": SIMULATED, "sm_90": HOPPER}
