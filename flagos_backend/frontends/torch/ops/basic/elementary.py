"""Operations of shape, scale, bias and noise."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from flagos_backend.frontends.torch.ops.basic.communication import ProcessGroup, group_size, share
from flagos_backend.frontends.torch.ops.basic.dtypes import sum_leading
from flagos_backend.frontends.torch.ops.basic.simple import SimpleOperation
from flagos_backend.frontends.torch.ops.operation import OperationContext, Tensors


class Identity(SimpleOperation):
    """The input."""

    returns_input = True

    def compute(self, input_: torch.Tensor) -> tuple[torch.Tensor, Tensors]:
        return input_, ()

    def op_backward(
        self, ctx: OperationContext, grad_output: torch.Tensor
    ) -> tuple[torch.Tensor, tuple[torch.Tensor | None, ...]]:
        return grad_output, ()


class Reshape(SimpleOperation):
    """The input in another shape; one size may be -1."""

    returns_input = True

    def __init__(self, shape: Iterable[int]) -> None:
        super().__init__()
        self._shape = tuple(shape)

    def compute(self, input_: torch.Tensor) -> tuple[torch.Tensor, Tensors]:
        # The input is saved for its sizes alone.
        return input_.reshape(self._shape), (input_,)

    def op_backward(
        self, ctx: OperationContext, grad_output: torch.Tensor
    ) -> tuple[torch.Tensor, tuple[torch.Tensor | None, ...]]:
        (x,) = ctx.saved_tensors
        assert x is not None
        return grad_output.reshape(x.shape), ()


class ConstantScale(SimpleOperation):
    """The input times a number."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = scale

    def compute(self, input_: torch.Tensor) -> tuple[torch.Tensor, Tensors]:
        return input_ * self.scale, ()

    def op_backward(
        self, ctx: OperationContext, grad_output: torch.Tensor
    ) -> tuple[torch.Tensor, tuple[torch.Tensor | None, ...]]:
        return grad_output * self.scale, ()


class Bias(SimpleOperation):
    """The input plus a vector along the last dimension.

    With `tensor_parallel` each process of the group holds its part of the `size` numbers.
    """

    def __init__(
        self,
        size: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        tensor_parallel: bool = False,
        tensor_parallel_group: ProcessGroup | None = None,
    ) -> None:
        super().__init__()
        if tensor_parallel:
            size = share("size", size, group_size(tensor_parallel_group))
        self.bias = torch.nn.Parameter(torch.zeros(size, device=device, dtype=dtype))

    def compute(self, input_: torch.Tensor) -> tuple[torch.Tensor, Tensors]:
        if input_.shape[-1:] != self.bias.shape:
            raise ValueError(f"Bias of {self.bias.shape[0]} numbers got an input of shape {tuple(input_.shape)}")
        return input_ + self.bias.to(input_.dtype), ()

    def op_forward_save_ctx(
        self, ctx: OperationContext, input_: torch.Tensor, tensors_to_save: Tensors | None, **others: Any
    ) -> None:
        ctx.grad_input_quantizer = others["prev_op_grad_output_quantizer"]  # type: ignore[attr-defined]

    def op_backward(
        self, ctx: OperationContext, grad_output: torch.Tensor
    ) -> tuple[torch.Tensor, tuple[torch.Tensor | None, ...]]:
        return grad_output, (sum_leading(grad_output, 1).to(self.bias.dtype),)


class Dropout(SimpleOperation):
    """Zeroes elements with probability p in training, and scales the others by 1 / (1 - p)."""

    returns_input = True

    def __init__(self, p: float) -> None:
        super().__init__()
        if not 0.0 <= p <= 1.0:
            raise ValueError(f"the probability of dropout must be from 0 to 1, got {p}")
        self.dropout_probability = p

    @property
    def _drops(self) -> bool:
        return self.training and self.dropout_probability > 0.0

    def compute(self, input_: torch.Tensor) -> tuple[torch.Tensor, Tensors]:
        p = self.dropout_probability
        if not self._drops:
            return input_, ()
        kept = torch.rand_like(input_, dtype=torch.float32) >= p
        factor = kept.to(input_.dtype) * (1.0 / (1.0 - p) if p < 1.0 else 0.0)
        return input_ * factor, (factor,)

    def op_backward(
        self, ctx: OperationContext, grad_output: torch.Tensor
    ) -> tuple[torch.Tensor, tuple[torch.Tensor | None, ...]]:
        if not ctx.saved_tensors:
            return grad_output, ()
        (factor,) = ctx.saved_tensors
        assert factor is not None
        return grad_output * factor, ()
