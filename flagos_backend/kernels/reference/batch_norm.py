"""Batch normalisation: training, inference and gradient. Statistics run over every dimension but the feature one."""

from __future__ import annotations

from collections.abc import Callable

from flagos_backend.ir.attributes import BatchNormAttributes
from flagos_backend.ir.hlo import Instruction
from flagos_backend.ir.opcode import Opcode
from flagos_backend.ir.types import ArrayShape
from flagos_backend.kernels.reference.registry import Kernel, Run, kernel
from flagos_backend.process.torch_loading import Tensor, torch


class _Layout:
    """How per-feature vectors broadcast against the operand; arithmetic is f32 at least."""

    def __init__(self, instruction: Instruction) -> None:
        attributes = instruction.attributes_as(BatchNormAttributes)
        shape = instruction.operands[0].shape
        assert isinstance(shape, ArrayShape)
        self.epsilon = attributes.epsilon
        self.reduced = [d for d in range(shape.rank) if d != attributes.feature_index]
        self.count = shape.num_elements // max(shape.dims[attributes.feature_index], 1)
        self._vector = [1] * shape.rank
        self._vector[attributes.feature_index] = -1

    def spread(self, vector: Tensor) -> Tensor:
        return widened(vector).reshape(self._vector)

    def total(self, x: Tensor) -> Tensor:
        return x.sum(self.reduced) if self.reduced else x

    def mean(self, x: Tensor) -> Tensor:
        return self.total(x) / self.count


def widened(x: Tensor) -> Tensor:
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


@kernel(Opcode.BATCH_NORM_TRAINING)
def prepare_training(instruction: Instruction) -> Kernel:
    """(operand, scale, offset) -> (normalised, mean, biased variance)."""
    layout = _Layout(instruction)

    def run(_: Run, operand: Tensor, scale: Tensor, offset: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x = widened(operand)
        mean = layout.mean(x)
        centred = x - layout.spread(mean)
        variance = layout.mean(centred * centred)
        normalised = centred * torch.rsqrt(layout.spread(variance) + layout.epsilon)
        result = normalised * layout.spread(scale) + layout.spread(offset)
        return result.to(operand.dtype), mean.to(scale.dtype), variance.to(scale.dtype)

    return run


@kernel(Opcode.BATCH_NORM_INFERENCE)
def prepare_inference(instruction: Instruction) -> Kernel:
    """(operand, scale, offset, mean, variance) -> normalised."""
    layout = _Layout(instruction)

    def run(_: Run, operand: Tensor, scale: Tensor, offset: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
        centred = widened(operand) - layout.spread(mean)
        normalised = centred * torch.rsqrt(layout.spread(variance) + layout.epsilon)
        return (normalised * layout.spread(scale) + layout.spread(offset)).to(operand.dtype)

    return run


@kernel(Opcode.BATCH_NORM_GRAD)
def prepare_gradient(instruction: Instruction) -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
    """(operand, scale, mean, variance, output gradient) -> gradients of (operand, scale, offset)."""
    layout = _Layout(instruction)

    def run(
        _: Run, operand: Tensor, scale: Tensor, mean: Tensor, variance: Tensor, gradient: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        x, g = widened(operand), widened(gradient)
        deviation = torch.rsqrt(layout.spread(variance) + layout.epsilon)
        normalised = (x - layout.spread(mean)) * deviation
        offset_gradient = layout.total(g)
        scale_gradient = layout.total(g * normalised)
        mean_part = layout.spread(offset_gradient / layout.count)
        variance_part = normalised * layout.spread(scale_gradient / layout.count)
        operand_gradient = layout.spread(scale) * deviation * (g - mean_part - variance_part)
        return operand_gradient.to(operand.dtype), scale_gradient.to(scale.dtype), offset_gradient.to(scale.dtype)

    return run
