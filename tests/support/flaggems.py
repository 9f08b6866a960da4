"""FlagGems' kernels on host tensors, through the provider that programs use. Needs the fixture ``flag_gems``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from flagos_backend.devices.target import Target
from flagos_backend.ir.attributes import DotAttributes
from flagos_backend.ir.builder import Builder
from flagos_backend.ir.hlo import Instruction
from flagos_backend.ir.opcode import Opcode
from flagos_backend.ir.types import ArrayShape, ElementType
from flagos_backend.kernels.reference import registry
from flagos_backend.kernels.reference.registry import Run
from tools.conformance.aten_calls import Call
from tools.conformance.flaggems_worker import flaggems_of, spread

SIMULATED = Target("cpu", "simulated")


def aten_call(name: str, *args: Any, **kwargs: Any) -> tuple[Instruction, list[torch.Tensor]]:
    """The custom call of an ATen operator on tensors, and those tensors."""
    call = Call(name, args, kwargs)
    return call.instruction(call.run()), call.tensors


def dot(
    element: ElementType,
    result: ElementType | None = None,
    dims: Sequence[tuple[int, ...]] = ((24, 17), (17, 9)),
    attributes: DotAttributes | None = None,
) -> Instruction:
    """HLO's own product, of matrices unless ``attributes`` says otherwise."""
    builder = Builder("dot")
    operands = [builder.parameter(ArrayShape(element, d)) for d in dims]
    attributes = attributes or DotAttributes((1,), (0,))
    batch = tuple(dims[0][d] for d in attributes.lhs_batch)
    shape = ArrayShape(result or element, (*batch, dims[0][-2], dims[1][-1]))
    return builder.add(Opcode.DOT, operands, attributes, shape=shape)


def refusal(instruction: Instruction, target: Target = SIMULATED) -> str:
    """Why FlagGems does not compute it, or ""."""
    return flaggems_of(instruction).unsupported(instruction, target)


def check(instruction: Instruction, tensors: Sequence[torch.Tensor], tolerance: float = 2e-5) -> None:
    """FlagGems gives what the reference gives, on operands as they lie and on operands of other strides."""
    implementation = flaggems_of(instruction)
    assert implementation.unsupported(instruction, SIMULATED) == ""
    (variant,) = implementation.variants(instruction, SIMULATED)
    expected = registry.prepare(instruction)(Run(), *tensors)
    for operands in (tensors, [spread(t) for t in tensors]):
        found = variant.kernel(Run(), *operands)
        for ours, theirs in zip(_flat(found), _flat(expected), strict=True):
            assert ours.dtype == theirs.dtype
            if ours.dtype.is_floating_point:
                torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)
            else:
                assert torch.equal(ours, theirs)


def _flat(value: Any) -> tuple[torch.Tensor, ...]:
    return value if isinstance(value, tuple) else (value,)
