"""Convolutions through ATen where no matrix product of integers exists: exact modulo their width."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from flagos_backend.devices.target import HOST, Target
from flagos_backend.ir.attributes import ConvolutionAttributes, WindowDimension
from flagos_backend.ir.builder import Builder
from flagos_backend.ir.hlo import Instruction
from flagos_backend.ir.opcode import Opcode
from flagos_backend.ir.types import ArrayShape, ElementType
from flagos_backend.kernels.reference import registry
from flagos_backend.kernels.reference.registry import Run
from flagos_backend.kernels.reference.storage import from_bytes
from flagos_backend.kernels.vendor import convolution

E = ElementType
SIMULATED = Target("cpu", "simulated")


def instruction(lhs: ElementType, rhs: ElementType, result: ElementType, size: int = 3, groups: int = 1) -> Instruction:
    builder = Builder("convolution")
    operands = [
        builder.parameter(ArrayShape(lhs, (2, 4, size + 5, 9))),
        builder.parameter(ArrayShape(rhs, (6, 4 // groups, size, 3))),
    ]
    attributes = ConvolutionAttributes(
        window=(WindowDimension(size), WindowDimension(3, stride=2, padding_low=1, padding_high=1)),
        input_batch=0,
        input_feature=1,
        input_spatial=(2, 3),
        kernel_output_feature=0,
        kernel_input_feature=1,
        kernel_spatial=(2, 3),
        output_batch=0,
        output_feature=1,
        output_spatial=(2, 3),
        feature_group_count=groups,
    )
    return builder.add(Opcode.CONVOLUTION, operands, attributes, shape=ArrayShape(result, (2, 6, 6, 5)))


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize(
    "types",
    [(E.S32,) * 3, (E.U32,) * 3, (E.S64,) * 3, (E.U64,) * 3, (E.S32, E.S32, E.S64), (E.S64, E.S64, E.S16)],
    ids=lambda types: "-".join(e.name for e in types),
)
def test_integers(
    types: tuple[ElementType, ElementType, ElementType],
    groups: int,
    rng: np.random.Generator,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Random bits, so that every product wraps around; with what an accelerator says to integers."""
    call = instruction(*types, groups=groups)
    operands = [from_bytes(rng.bytes(o.shape.num_bytes), o.shape) for o in call.operands]
    expected = registry.prepare(call)(Run(), *operands)
    (variant,) = convolution.variants(call, SIMULATED)
    multiply = torch.matmul

    def without_integers(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        assert a.is_floating_point()
        assert b.is_floating_point()
        return multiply(a, b)

    monkeypatch.setattr(torch, "matmul", without_integers)
    assert torch.equal(variant.kernel(Run(), *operands), expected)


def test_what_it_lacks() -> None:
    assert "no vendor" in convolution.unsupported(instruction(E.S64, E.S64, E.S64), HOST)
    assert "not exact" in convolution.unsupported(instruction(E.S64, E.S64, E.S64, size=1 << 19), SIMULATED)
    assert convolution.unsupported(instruction(E.F32, E.F32, E.F32, size=1 << 19), SIMULATED) == ""
