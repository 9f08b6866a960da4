"""Normalizations. They compute in float32 at least; float64 stays."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from flagos_backend.frontends.torch.ops.basic.dtypes import compute_dtype, sum_leading, wide
from flagos_backend.frontends.torch.ops.basic.simple import SimpleOperation
from flagos_backend.frontends.torch.ops.operation import OperationContext, Tensors


class _Norm(SimpleOperation):
    """A weight over the last dimensions; with zero_centered_gamma it is the parameter plus one.

    `sm_margin` leaves multiprocessors to others in the kernels of the interface that it is from; here it has no effect.
    """

    def __init__(
        self,
        normalized_shape: int | Iterable[int],
        *,
        eps: float = 1e-5,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        zero_centered_gamma: bool = False,
        sm_margin: int | dict[str, int] = 0,
    ) -> None:
        super().__init__()
        self.eps = eps
        self.zero_centered_gamma = zero_centered_gamma
        shape = (normalized_shape,) if isinstance(normalized_shape, int) else tuple(normalized_shape)
        self._dims = tuple(range(-len(shape), 0))
        make = torch.zeros if zero_centered_gamma else torch.ones
        self.weight = torch.nn.Parameter(make(shape, device=device, dtype=dtype))

    def _gamma(self) -> torch.Tensor:
        weight = wide(self.weight)
        return weight + 1.0 if self.zero_centered_gamma else weight

    def _check(self, x: torch.Tensor) -> None:
        rank = self.weight.dim()
        if tuple(x.shape[x.dim() - rank :]) != tuple(self.weight.shape):
            raise ValueError(
                f"{type(self).__name__} of {tuple(self.weight.shape)} got an input of shape {tuple(x.shape)}"
            )


class LayerNorm(_Norm):
    """(x - mean) / sqrt(variance + eps) * weight + bias."""

    def __init__(
        self,
        normalized_shape: int | Iterable[int],
        *,
        eps: float = 1e-5,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        zero_centered_gamma: bool = False,
        sm_margin: int | dict[str, int] = 0,
    ) -> None:
        super().__init__(normalized_shape, eps=eps, device=device, dtype=dtype, zero_centered_gamma=zero_centered_gamma)
        self.bias = torch.nn.Parameter(torch.zeros_like(self.weight))

    def compute(self, input_: torch.Tensor) -> tuple[torch.Tensor, Tensors]:
        self._check(input_)
        x = wide(input_)
        shape = list(self.weight.shape)
        y, mean, rstd = torch.native_layer_norm(x, shape, self._gamma().to(x.dtype), self.bias.to(x.dtype), self.eps)
        return y.to(compute_dtype(input_, input_.dtype)), (input_, mean, rstd)

    def op_backward(
        self, ctx: OperationContext, grad_output: torch.Tensor
    ) -> tuple[torch.Tensor, tuple[torch.Tensor | None, ...]]:
        saved, mean, rstd = ctx.saved_tensors
        assert saved is not None and mean is not None and rstd is not None
        x = wide(saved)
        grad_input, grad_weight, grad_bias = torch.ops.aten.native_layer_norm_backward(
            grad_output.to(x.dtype).contiguous(),
            x,
            list(self.weight.shape),
            mean,
            rstd,
            self._gamma().to(x.dtype),
            self.bias.to(x.dtype),
            [True, True, True],
        )
        return grad_input.to(saved.dtype), (grad_weight.to(self.weight.dtype), grad_bias.to(self.bias.dtype))


class RMSNorm(_Norm):
    """x / sqrt(mean of squares + eps) * weight."""

    def compute(self, input_: torch.Tensor) -> tuple[torch.Tensor, Tensors]:
        self._check(input_)
        x = wide(input_)
        rstd = torch.rsqrt((x * x).mean(self._dims, keepdim=True) + self.eps)
        y = x * rstd * self._gamma()
        return y.to(compute_dtype(input_, input_.dtype)), (input_, rstd)

    def op_backward(
        self, ctx: OperationContext, grad_output: torch.Tensor
    ) -> tuple[torch.Tensor, tuple[torch.Tensor | None, ...]]:
        return self.gradients(ctx, grad_output, None)

    def gradients(
        self, ctx: OperationContext, grad_output: torch.Tensor, added: torch.Tensor | None
    ) -> tuple[torch.Tensor, tuple[torch.Tensor | None, ...]]:
        """Gradients of the input, with `added` to it, and of the weight."""
        x, rstd = ctx.saved_tensors
        assert x is not None and rstd is not None
        g = wide(grad_output)
        normal = wide(x) * rstd
        scaled = g * self._gamma()
        mean = (scaled * normal).mean(self._dims, keepdim=True)
        grad_input = (scaled - normal * mean) * rstd
        if added is not None:
            grad_input = grad_input + wide(added)
        return grad_input.to(x.dtype), (sum_leading(g * normal, self.weight.dim()).to(self.weight.dtype),)


class L2Normalization(SimpleOperation):
    """x / sqrt(sum of squares along the last dimension + eps).

    `seq_length` and `micro_batch_size` are hints of the interface that it is from; here they have no effect.
    """

    def __init__(
        self, eps: float = 1e-6, *, seq_length: int | None = None, micro_batch_size: int | None = None
    ) -> None:
        super().__init__()
        self.eps = eps

    def compute(self, input_: torch.Tensor) -> tuple[torch.Tensor, Tensors]:
        x = wide(input_)
        rnorm = torch.rsqrt((x * x).sum(-1, keepdim=True) + self.eps)
        return (x * rnorm).to(input_.dtype), (input_, rnorm)

    def op_backward(
        self, ctx: OperationContext, grad_output: torch.Tensor
    ) -> tuple[torch.Tensor, tuple[torch.Tensor | None, ...]]:
        x, rnorm = ctx.saved_tensors
        assert x is not None and rnorm is not None
        g = wide(grad_output)
        normal = wide(x) * rnorm
        return ((g - normal * (g * normal).sum(-1, keepdim=True)) * rnorm).to(x.dtype), ()
