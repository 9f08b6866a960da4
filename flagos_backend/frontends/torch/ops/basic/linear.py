"""Products with a weight."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import Any

import torch

from flagos_backend.frontends.torch.ops.basic.communication import (
    ProcessGroup,
    gathered,
    group_size,
    scattered_sum,
    share,
    summed,
)
from flagos_backend.frontends.torch.ops.basic.dtypes import compute_dtype
from flagos_backend.frontends.torch.ops.basic.main_grad import accumulate
from flagos_backend.frontends.torch.ops.basic.simple import SimpleOperation
from flagos_backend.frontends.torch.ops.operation import OperationContext, Tensors, outside_graph


class BasicLinear(SimpleOperation):
    """x @ weight.T along the last dimension, in autocast's type or the weight's.

    `tensor_parallel_mode`: "column" divides the output features among the processes of a group, "row" the input
    features, whose products are summed. With `sequence_parallel` what is not divided by features is divided along the
    first dimension. `rng_state_tracker_function`: returns an object whose fork() the weight is initialized in.
    `accumulate_into_main_grad`: the weight's gradient goes to `weight.main_grad`; such an operation leaves a compiler's
    graph. Raises ValueError for sizes that cannot be divided, NotImplementedError for Userbuffers.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        tensor_parallel_mode: str | None = None,
        tensor_parallel_group: ProcessGroup | None = None,
        sequence_parallel: bool = False,
        rng_state_tracker_function: Callable[[], Any] | None = None,
        accumulate_into_main_grad: bool = False,
        userbuffers_options: dict[str, Any] | None = None,
    ) -> None:
        super().__init__()
        if userbuffers_options is not None:
            raise NotImplementedError(
                "BasicLinear takes no userbuffers_options: Userbuffers are a transport of NVIDIA's own. "
                "Leave them out: the group's collectives are used."
            )
        if tensor_parallel_mode not in (None, "column", "row"):
            raise ValueError(f"tensor_parallel_mode must be 'column', 'row' or None, got {tensor_parallel_mode!r}")
        self.in_features, self.out_features = in_features, out_features
        self.tensor_parallel_group = tensor_parallel_group
        self.tensor_parallel_size = 1 if tensor_parallel_mode is None else group_size(tensor_parallel_group)
        self.tensor_parallel_mode = tensor_parallel_mode if self.tensor_parallel_size > 1 else None
        self.sequence_parallel = sequence_parallel and self.tensor_parallel_mode is not None
        self.local_in_features, self.local_out_features = in_features, out_features
        if self.tensor_parallel_mode == "column":
            self.local_out_features = share("out_features", out_features, self.tensor_parallel_size)
        elif self.tensor_parallel_mode == "row":
            self.local_in_features = share("in_features", in_features, self.tensor_parallel_size)
        self._rng_state_tracker_function = rng_state_tracker_function
        shape = (self.local_out_features, self.local_in_features)
        self.weight = torch.nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        if self.weight.device.type != "meta":
            self.reset_parameters()
        self._accumulate_into_main_grad = accumulate_into_main_grad
        if accumulate_into_main_grad:
            self.leaves_graph = True
            self.run_outside_graph = outside_graph(
                "BasicLinear accumulates into main_grad: a compiler traces no backward that changes memory. "
                "Make it without accumulate_into_main_grad to compile it."
            )

    def reset_parameters(self) -> None:
        """Fill the weight as torch.nn.Linear does."""
        tracker = self._rng_state_tracker_function
        with contextlib.nullcontext() if tracker is None else tracker().fork():
            torch.nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))

    def check(self, input_: torch.Tensor) -> None:
        """Raise ValueError for an input of another width."""
        if input_.dim() == 0 or input_.shape[-1] != self.local_in_features:
            raise ValueError(
                f"BasicLinear takes {self.local_in_features} features, got an input of shape {tuple(input_.shape)}"
            )

    @property
    def _gathers(self) -> bool:
        return self.sequence_parallel and self.tensor_parallel_mode == "column"

    def whole(self, x: torch.Tensor) -> torch.Tensor:
        """The input along the first dimension, where the processes divide it."""
        return gathered(x, self.tensor_parallel_group, self.tensor_parallel_size) if self._gathers else x

    def reduced(self, y: torch.Tensor) -> torch.Tensor:
        """What this process keeps of the sum of the products, where the processes divide the input features."""
        if self.tensor_parallel_mode != "row":
            return y
        reduce = scattered_sum if self.sequence_parallel else summed
        return reduce(y, self.tensor_parallel_group, self.tensor_parallel_size)

    def compute(self, input_: torch.Tensor) -> tuple[torch.Tensor, Tensors]:
        self.check(input_)
        dtype = compute_dtype(input_, self.weight.dtype)
        y = torch.nn.functional.linear(self.whole(input_.to(dtype)), self.weight.to(dtype))
        return self.reduced(y), self.saved(input_)

    def saved(self, input_: torch.Tensor) -> Tensors:
        """What the backward needs: the input where the weight has a gradient, and the weight."""
        return (input_ if self.weight.requires_grad else None, self.weight)

    def op_forward_save_ctx(
        self,
        ctx: OperationContext,
        input_: torch.Tensor,
        tensors_to_save: Tensors | None,
        *,
        requires_grad: bool,
        **others: Any,
    ) -> None:
        if requires_grad and tensors_to_save is not None:
            ctx.save_for_backward(*tensors_to_save)
        ctx.dtype = compute_dtype(input_, self.weight.dtype)  # type: ignore[attr-defined]

    def op_backward(
        self, ctx: OperationContext, grad_output: torch.Tensor
    ) -> tuple[torch.Tensor, tuple[torch.Tensor | None, ...]]:
        return self.gradients(ctx, grad_output)

    def gradients(
        self,
        ctx: OperationContext,
        grad_output: torch.Tensor,
        *,
        scale: float = 1.0,
        added: torch.Tensor | None = None,
    ) -> tuple[Any, tuple[torch.Tensor | None, ...]]:
        """Gradients of the input and the weight for an output that was scaled, with `added` to that of the input."""
        x, weight = ctx.saved_tensors
        assert weight is not None
        grad_output = self._whole_gradient(grad_output)
        grad = grad_output.reshape(-1, self.local_out_features)
        grad_input: torch.Tensor | None = None
        if ctx.input_requires_grad:
            grad_input = _product(grad, weight.to(grad.dtype), scale, added).reshape(
                *grad_output.shape[:-1], self.local_in_features
            )
            grad_input = self._reduced_gradient(grad_input)
        if x is None or not self.weight.requires_grad:
            return grad_input, (None,)
        rows = self.whole(x).reshape(-1, self.local_in_features).to(grad.dtype)
        grad_weight = _product(grad.t(), rows, scale, None)
        if self._accumulate_into_main_grad:
            return grad_input, (accumulate(self.weight, grad_weight, type(self).__name__),)
        return grad_input, (grad_weight.to(self.weight.dtype),)

    def _whole_gradient(self, grad: torch.Tensor) -> torch.Tensor:
        if self.tensor_parallel_mode == "row" and self.sequence_parallel:
            return gathered(grad, self.tensor_parallel_group, self.tensor_parallel_size)
        return grad

    def _reduced_gradient(self, grad: torch.Tensor) -> torch.Tensor:
        if self.tensor_parallel_mode != "column":
            return grad
        reduce = scattered_sum if self.sequence_parallel else summed
        return reduce(grad, self.tensor_parallel_group, self.tensor_parallel_size)


def _product(a: torch.Tensor, b: torch.Tensor, scale: float, added: torch.Tensor | None) -> torch.Tensor:
    """a @ b * scale + added, as one call."""
    if added is not None:
        return torch.addmm(added.to(a.dtype).reshape(-1, b.shape[-1]), a, b, alpha=scale)
    if scale == 1.0:
        return a @ b
    return torch.addmm(a.new_zeros(()), a, b, beta=0, alpha=scale)
