"""Collectives as operations. The gradient of each is the one whose sum over the processes is that of the whole."""

from __future__ import annotations

import torch

from flagos_backend.frontends.torch.ops.basic.communication import (
    ProcessGroup,
    gathered,
    group_size,
    scattered_sum,
    summed,
)
from flagos_backend.frontends.torch.ops.basic.simple import SimpleOperation
from flagos_backend.frontends.torch.ops.operation import OperationContext, Tensors


class _Collective(SimpleOperation):
    """`process_group`: None is the world. Raises RuntimeError where torch.distributed is not initialized."""

    returns_input = True

    def __init__(self, process_group: ProcessGroup | None = None) -> None:
        super().__init__()
        self.process_group = process_group
        self.process_group_size = group_size(process_group)


class AllGather(_Collective):
    """The inputs of all processes, one behind the other along the first dimension."""

    def compute(self, input_: torch.Tensor) -> tuple[torch.Tensor, Tensors]:
        return gathered(input_, self.process_group, self.process_group_size), ()

    def op_backward(
        self, ctx: OperationContext, grad_output: torch.Tensor
    ) -> tuple[torch.Tensor, tuple[torch.Tensor | None, ...]]:
        return scattered_sum(grad_output, self.process_group, self.process_group_size), ()


class ReduceScatter(_Collective):
    """This process's part, along the first dimension, of the sum of all inputs."""

    def compute(self, input_: torch.Tensor) -> tuple[torch.Tensor, Tensors]:
        return scattered_sum(input_, self.process_group, self.process_group_size), ()

    def op_backward(
        self, ctx: OperationContext, grad_output: torch.Tensor
    ) -> tuple[torch.Tensor, tuple[torch.Tensor | None, ...]]:
        return gathered(grad_output, self.process_group, self.process_group_size), ()


class AllReduce(_Collective):
    """The sum of all inputs.

    What follows is computed alike on all processes, so the gradients of the sum are alike, and are the input's.
    `reduce_in_backward` has no effect, as in the interface that it is from.
    """

    def __init__(self, process_group: ProcessGroup | None = None, reduce_in_backward: bool = True) -> None:
        super().__init__(process_group)
        self._reduce_in_backward = reduce_in_backward

    def compute(self, input_: torch.Tensor) -> tuple[torch.Tensor, Tensors]:
        return summed(input_, self.process_group, self.process_group_size), ()

    def op_backward(
        self, ctx: OperationContext, grad_output: torch.Tensor
    ) -> tuple[torch.Tensor, tuple[torch.Tensor | None, ...]]:
        return grad_output, ()
