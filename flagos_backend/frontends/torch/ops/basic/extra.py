"""Operations that take a second input or give a second output."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from flagos_backend.frontends.torch.ops.operation import BasicOperation, OperationContext, Tensors


class AddExtraInput(BasicOperation):
    """The input plus an extra input of the same shape.

    `in_place`: eager code may write the sum into the extra input. A compiler reuses memory by itself, and leaves it.
    """

    num_extra_inputs = 1

    def __init__(self, *, in_place: bool = False) -> None:
        super().__init__()
        self._in_place = in_place

    def fuser_forward_compute(
        self, input_: torch.Tensor, *, basic_op_extra_inputs: list[tuple[torch.Tensor, ...]], **others: Any
    ) -> tuple[torch.Tensor, Sequence[Sequence[torch.Tensor]], Sequence[Tensors | None]]:
        extra = basic_op_extra_inputs[0][0]
        if extra.shape != input_.shape:
            raise ValueError(
                f"AddExtraInput needs two inputs of one shape, got {tuple(input_.shape)} and {tuple(extra.shape)}"
            )
        if self._in_place and not torch.compiler.is_compiling():
            total = extra.detach()
            total += input_
            return total, [()], [()]
        return input_ + extra.to(input_.dtype), [()], [()]

    def fuser_forward_save_ctx(
        self,
        basic_op_ctxs: list[OperationContext],
        input_: torch.Tensor,
        tensors_to_save: Sequence[Tensors | None],
        **others: Any,
    ) -> None:
        return None

    def fuser_backward(
        self,
        basic_op_ctxs: list[OperationContext],
        grad_output: torch.Tensor,
        *,
        basic_op_grad_extra_outputs: list[tuple[torch.Tensor, ...]],
    ) -> tuple[torch.Tensor, Sequence[Sequence[torch.Tensor | None]], Sequence[Sequence[torch.Tensor | None]]]:
        return grad_output, [()], [(grad_output,)]


class MakeExtraOutput(BasicOperation):
    """The input, and a copy of it as an extra output.

    `in_place`: eager code makes no copy, both are the same memory. A compiler copies where it must.
    """

    num_extra_outputs = 1
    returns_input = True

    def __init__(self, *, in_place: bool = False) -> None:
        super().__init__()
        self._in_place = in_place

    def fuser_forward_compute(
        self, input_: torch.Tensor, **others: Any
    ) -> tuple[torch.Tensor, Sequence[Sequence[torch.Tensor]], Sequence[Tensors | None]]:
        if self._in_place and not torch.compiler.is_compiling():
            return input_, [(input_,)], [()]
        return input_, [(input_.clone(),)], [()]

    def fuser_forward_save_ctx(
        self,
        basic_op_ctxs: list[OperationContext],
        input_: torch.Tensor,
        tensors_to_save: Sequence[Tensors | None],
        **others: Any,
    ) -> None:
        return None

    def fuser_backward(
        self,
        basic_op_ctxs: list[OperationContext],
        grad_output: torch.Tensor,
        *,
        basic_op_grad_extra_outputs: list[tuple[torch.Tensor, ...]],
    ) -> tuple[torch.Tensor, Sequence[Sequence[torch.Tensor | None]], Sequence[Sequence[torch.Tensor | None]]]:
        grad_extra: torch.Tensor | None = basic_op_grad_extra_outputs[0][0]
        if grad_extra is None:
            return grad_output, [()], [()]
        return grad_output + grad_extra.to(grad_output.dtype), [()], [()]
