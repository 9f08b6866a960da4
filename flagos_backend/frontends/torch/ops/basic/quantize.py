"""Where a pipeline changes to a quantised type and back."""

from __future__ import annotations

import torch

from flagos_backend.frontends.torch.ops.basic.simple import SimpleOperation
from flagos_backend.frontends.torch.ops.operation import OperationContext, Tensors


class Quantize(SimpleOperation):
    """Quantises the input (`forward`) and the gradient (`backward`) by the recipe; there is none: the identity."""

    returns_input = True

    def __init__(self, forward: bool = True, backward: bool = False) -> None:
        super().__init__()
        self._quantize_forward = forward
        self._quantize_backward = backward

    def compute(self, input_: torch.Tensor) -> tuple[torch.Tensor, Tensors]:
        return input_, ()

    def op_backward(
        self, ctx: OperationContext, grad_output: torch.Tensor
    ) -> tuple[torch.Tensor, tuple[torch.Tensor | None, ...]]:
        return grad_output, ()
