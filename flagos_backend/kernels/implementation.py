"""What a provider offers for an instruction: the vocabulary between kernels/choice.py and the providers' folders."""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from flagos_backend.devices.target import Target
from flagos_backend.ir.attributes import CustomCallAttributes
from flagos_backend.ir.hlo import Instruction
from flagos_backend.ir.printer import print_instruction
from flagos_backend.kernels.reference.registry import InPlaceKernel, Kernel


class Provider(enum.StrEnum):
    """Who wrote a kernel, in FlagOS' order of preference. Values are what the environment variables say."""

    FLAGOS = "flagos"  # FlagGems
    TRITON = "triton"  # ours
    VENDOR = "vendor"  # the vendor's libraries, through ATen
    REFERENCE = "reference"  # kernels/reference, on tensors of the device


@dataclass(frozen=True, slots=True)
class Variant:
    """One prepared way to compute an instruction; ``name`` tells it from its siblings.

    ``into(run, outputs, *operands)``, for kernels that can, computes the same, each array of the result in the
    row-major one that ``outputs`` has for it, if any. ``warm_up()``, for kernels whose first call takes long, does what
    that would, for the current device: loads modules, compiles. It may be called from any thread. ``in_place``, for
    kernels that can, computes the same over operands.
    """

    name: str
    kernel: Kernel
    into: Kernel | None = None
    warm_up: Callable[[], object] | None = None
    in_place: InPlaceKernel | None = None


@dataclass(frozen=True, slots=True)
class Implementation:
    """One provider's kernels of one operation.

    ``unsupported``: why it cannot compute an instruction on a target, "" when it can; cheap and without a device.
    ``variants``: its kernels, the best guess first; called only where supported. ``library``: the vendor's library
    computes it. ``tunes_itself``: the first call of a shape measures configurations of its own, for seconds.
    ``is_checked``: where kernels are measured, what it computes of the random operands must be what the reference does.
    """

    name: str
    provider: Provider
    unsupported: Callable[[Instruction, Target], str]
    variants: Callable[[Instruction, Target], Sequence[Variant]]
    library: bool = False
    tunes_itself: Callable[[Instruction], bool] = lambda instruction: False
    is_checked: Callable[[Instruction], bool] = lambda instruction: False

    @property
    def identifier(self) -> str:
        """FlagOS' name of an implementation: ``triton.attention``."""
        return f"{self.provider}.{self.name}"


def signature_of(instruction: Instruction) -> tuple[str, ...]:
    """What ``instruction`` computes, whatever it and its operands are called: equal layers of a model share it."""
    operands = ", ".join(str(operand.shape) for operand in instruction.operands)
    text = print_instruction(instruction).partition(" = ")[2].partition("  # ")[0].partition("), ")[2]
    return (str(instruction.opcode), str(instruction.shape), operands, text)


def operation_of(instruction: Instruction) -> str:
    """The name under which kernels of an instruction are registered: its opcode, or a custom call's target, of
    ``aten::op.overload`` without the overload."""
    if not isinstance(instruction.attributes, CustomCallAttributes):
        return str(instruction.opcode)
    target = instruction.attributes.target
    return target.partition(".")[0] if "::" in target else target
