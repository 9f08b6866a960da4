"""A product with what follows it, as one call: bias, scale and addition in the product's epilogue."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from flagos_backend.frontends.torch.ops.basic.dtypes import compute_dtype
from flagos_backend.frontends.torch.ops.basic.elementary import Bias, ConstantScale
from flagos_backend.frontends.torch.ops.basic.extra import AddExtraInput
from flagos_backend.frontends.torch.ops.basic.linear import BasicLinear
from flagos_backend.frontends.torch.ops.fused.patterns import Patterns, replace_runs
from flagos_backend.frontends.torch.ops.operation import (
    FusedOperation,
    FusibleOperation,
    OperationContext,
    Tensors,
)


class _ForwardLinear(FusedOperation):
    """BasicLinear, then Bias or ConstantScale or neither, then AddExtraInput or not."""

    def fuser_forward_compute(
        self,
        input_: torch.Tensor,
        *,
        basic_op_extra_inputs: list[tuple[torch.Tensor, ...]],
        **others: Any,
    ) -> tuple[torch.Tensor, Sequence[Sequence[torch.Tensor]], Sequence[Tensors | None]]:
        linear: Any = self.basic_ops[0]
        linear.check(input_)
        dtype = compute_dtype(input_, linear.weight.dtype)
        x, weight = linear.whole(input_.to(dtype)), linear.weight.to(dtype)
        bias, scale = None, 1.0
        for op in self.basic_ops:
            if isinstance(op, Bias):
                bias = op.bias.to(dtype)
            elif isinstance(op, ConstantScale):
                scale = op.scale
        extra = [tensor for row in basic_op_extra_inputs for tensor in row]
        if not extra:
            y = torch.nn.functional.linear(x, weight, bias)
        else:
            shape = (*x.shape[:-1], linear.local_out_features)
            if extra[0].shape != shape:
                raise ValueError(
                    f"AddExtraInput needs two inputs of one shape, got {shape} and {tuple(extra[0].shape)}"
                )
            added = extra[0].to(dtype).reshape(-1, linear.local_out_features)
            rows = torch.addmm(added, x.reshape(-1, linear.local_in_features), weight.t(), alpha=scale)
            y = (rows if bias is None else rows + bias).reshape(shape)
        return y, [() for _ in self.basic_ops], [linear.saved(input_), *[() for _ in basic_op_extra_inputs[1:]]]

    def fuser_forward_save_ctx(
        self,
        basic_op_ctxs: list[OperationContext],
        input_: torch.Tensor,
        tensors_to_save: Sequence[Tensors | None],
        *,
        requires_grad: list[bool],
        **others: Any,
    ) -> None:
        linear: Any = self.basic_ops[0]
        linear.op_forward_save_ctx(basic_op_ctxs[0], input_, tensors_to_save[0], requires_grad=requires_grad[0])


class ForwardLinearBiasActivation(_ForwardLinear):
    """BasicLinear and Bias."""


class ForwardLinearBiasAdd(_ForwardLinear):
    """BasicLinear, Bias where there is one, AddExtraInput."""


class ForwardLinearScaleAdd(_ForwardLinear):
    """BasicLinear, ConstantScale, AddExtraInput."""


_PATTERNS: Patterns = (
    ((BasicLinear, Bias, AddExtraInput), ForwardLinearBiasAdd),
    ((BasicLinear, ConstantScale, AddExtraInput), ForwardLinearScaleAdd),
    ((BasicLinear, AddExtraInput), ForwardLinearBiasAdd),
    ((BasicLinear, Bias), ForwardLinearBiasActivation),
)


def fuse_forward_linear(ops: list[FusibleOperation], *, recipe: Any) -> list[FusibleOperation]:
    """Replace each run that a pattern matches, the longest first, but where processes sum the products."""
    return replace_runs(
        ops, _PATTERNS, lambda run: all(getattr(op, "tensor_parallel_mode", None) != "row" for op in run)
    )
