"""A basic operation without keyword arguments and quantizers: three plain methods."""

from __future__ import annotations

import abc
from typing import Any

import torch

from flagos_backend.frontends.torch.ops.operation import BasicOperation, OperationContext, Tensors


class SimpleOperation(BasicOperation):
    """Saves what its forward names, and nothing else."""

    @abc.abstractmethod
    def compute(self, input_: torch.Tensor) -> tuple[torch.Tensor, Tensors]:
        """The output and the tensors to save."""

    def op_forward_compute(
        self,
        input_: torch.Tensor,
        *,
        requires_grad: bool,
        prev_op_grad_output_quantizer: Any,
        next_op_input_quantizer: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, Tensors | None]:
        if kwargs:
            raise TypeError(f"{type(self).__name__} takes no keyword arguments, got {sorted(kwargs)}")
        return self.compute(input_)

    def op_forward_save_ctx(
        self,
        ctx: OperationContext,
        input_: torch.Tensor,
        tensors_to_save: Tensors | None,
        *,
        requires_grad: bool,
        prev_op_grad_output_quantizer: Any,
        next_op_input_quantizer: Any,
        **kwargs: Any,
    ) -> None:
        if requires_grad and tensors_to_save is not None:
            ctx.save_for_backward(*tensors_to_save)

    @abc.abstractmethod
    def op_backward(
        self, ctx: OperationContext, grad_output: torch.Tensor
    ) -> tuple[torch.Tensor, tuple[torch.Tensor | None, ...]]:
        """Gradients of the input and of each parameter."""
