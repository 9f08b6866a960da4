"""Backward fusions: a product or a normalization with the addition or the scale beside it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from flagos_backend.frontends.torch.ops.basic.activations import GELU, ReLU
from flagos_backend.frontends.torch.ops.basic.dtypes import sum_leading
from flagos_backend.frontends.torch.ops.basic.elementary import Bias, ConstantScale
from flagos_backend.frontends.torch.ops.basic.extra import MakeExtraOutput
from flagos_backend.frontends.torch.ops.basic.linear import BasicLinear
from flagos_backend.frontends.torch.ops.basic.norms import RMSNorm
from flagos_backend.frontends.torch.ops.fused.patterns import Patterns, replace_runs
from flagos_backend.frontends.torch.ops.operation import FusedOperation, FusibleOperation, OperationContext

Gradients = tuple[Any, Sequence[Sequence[torch.Tensor | None]], Sequence[Sequence[torch.Tensor | None]]]


class BackwardLinearAdd(FusedOperation):
    """MakeExtraOutput, BasicLinear: the extra output's gradient is added in the product's epilogue."""

    def fuser_backward(
        self,
        basic_op_ctxs: list[OperationContext],
        grad_output: torch.Tensor,
        *,
        basic_op_grad_extra_outputs: list[tuple[torch.Tensor, ...]],
    ) -> Gradients:
        linear: Any = self.basic_ops[1]
        grad_input, grads = linear.gradients(basic_op_ctxs[1], grad_output, added=basic_op_grad_extra_outputs[0][0])
        return grad_input, [(), grads], [(), ()]


class BackwardLinearScale(FusedOperation):
    """BasicLinear, ConstantScale: the scale is applied in the products' epilogues."""

    def fuser_backward(
        self,
        basic_op_ctxs: list[OperationContext],
        grad_output: torch.Tensor,
        *,
        basic_op_grad_extra_outputs: list[tuple[torch.Tensor, ...]],
    ) -> Gradients:
        linear, scale = self.basic_ops
        grad_input, grads = linear.gradients(basic_op_ctxs[0], grad_output, scale=scale.scale)  # type: ignore[operator]
        return grad_input, [grads, ()], [(), ()]


class BackwardActivationBias(FusedOperation):
    """Bias, activation: both gradients of the bias's sum at once, quantised for the operation before."""

    def fuser_backward(
        self,
        basic_op_ctxs: list[OperationContext],
        grad_output: torch.Tensor,
        *,
        basic_op_grad_extra_outputs: list[tuple[torch.Tensor, ...]],
    ) -> Gradients:
        bias, activation = self.basic_ops
        grad, _ = activation.op_backward(basic_op_ctxs[1], grad_output)  # type: ignore[operator]
        quantizer = basic_op_ctxs[0].grad_input_quantizer  # type: ignore[attr-defined]
        return quantizer(grad), [(sum_leading(grad, 1).to(bias.bias.dtype),), ()], [(), ()]  # type: ignore[arg-type]


class BackwardAddRMSNorm(FusedOperation):
    """MakeExtraOutput, RMSNorm: the extra output's gradient is added before the normalization's is rounded."""

    def fuser_backward(
        self,
        basic_op_ctxs: list[OperationContext],
        grad_output: torch.Tensor,
        *,
        basic_op_grad_extra_outputs: list[tuple[torch.Tensor, ...]],
    ) -> Gradients:
        norm: Any = self.basic_ops[1]
        grad_input, grads = norm.gradients(basic_op_ctxs[1], grad_output, basic_op_grad_extra_outputs[0][0])
        return grad_input, [(), grads], [(), ()]


_PATTERNS: Patterns = (
    ((MakeExtraOutput, BasicLinear), BackwardLinearAdd),
    ((BasicLinear, ConstantScale), BackwardLinearScale),
    ((MakeExtraOutput, RMSNorm), BackwardAddRMSNorm),
)
_QUANTISED: Patterns = (((Bias, GELU), BackwardActivationBias), ((Bias, ReLU), BackwardActivationBias))


def fuse_backward(ops: list[FusibleOperation], *, recipe: Any) -> list[FusibleOperation]:
    """Replace pairs, but where processes sum the product before it is added to."""

    def allowed(run: Sequence[Any]) -> bool:
        return not (type(run[0]) is MakeExtraOutput and getattr(run[1], "tensor_parallel_mode", None) == "column")

    return replace_runs(ops, _PATTERNS, allowed)


def fuse_activation_bias(ops: list[FusibleOperation], *, recipe: Any) -> list[FusibleOperation]:
    """Replace a bias and its activation where the operation before takes a quantised gradient."""

    def allowed(run: Sequence[Any]) -> bool:
        place = next(index for index, op in enumerate(ops) if op is run[0])
        return place > 0 and ops[place - 1].get_grad_output_quantizer() is not None

    return replace_runs(ops, _QUANTISED, allowed)
