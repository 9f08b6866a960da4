"""One product for each group of neighbouring rows.

Eager code multiplies group by group, since it reads the groups' sizes. A graph has no shapes that depend on them:
compiled code multiplies all rows by the matrix of every group, and keeps those of the group.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from flagos_backend.frontends.torch.ops.basic.dtypes import compute_dtype
from flagos_backend.frontends.torch.ops.basic.main_grad import accumulate
from flagos_backend.frontends.torch.ops.operation import BasicOperation, OperationContext, Tensors, outside_graph

OUTPUT_BUFFER_KEY = "output"
GRAD_INPUT_BUFFER_KEY = "grad_input"
_ELSEWHERE = "delay_wgrad_compute", "single_grouped_weight", "single_grouped_bias"


class GroupedLinear(BasicOperation):
    """y_i = x_i @ weight_i.T + bias_i, for groups of neighbouring rows whose sizes are an extra input.

    With `scale_bias` another extra input has a factor of the bias for each row. `accumulate_into_main_grad`: as
    BasicLinear. Keywords of a call: `output` and `grad_input`, memory that eager code leaves the results in.
    Raises ValueError for sizes that are not positive, NotImplementedError for parameters of one tensor for all groups
    and for weight gradients that are computed later.
    """

    num_extra_inputs = 1

    def __init__(
        self,
        num_groups: int,
        in_features: int,
        out_features: int,
        *,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        rng_state_tracker_function: Callable[[], Any] | None = None,
        accumulate_into_main_grad: bool = False,
        single_grouped_weight: bool = False,
        single_grouped_bias: bool = False,
        delay_wgrad_compute: bool = False,
        scale_bias: bool = False,
    ) -> None:
        for name, wanted in zip(
            _ELSEWHERE, (delay_wgrad_compute, single_grouped_weight, single_grouped_bias), strict=True
        ):
            if wanted:
                raise NotImplementedError(f"GroupedLinear has no {name}. Leave it out.")
        for name, size in (
            ("num_groups", num_groups),
            ("in_features", in_features),
            ("out_features", out_features),
        ):
            if size <= 0:
                raise ValueError(f"GroupedLinear needs a positive {name}, got {size}")
        super().__init__()
        self._scale_bias = scale_bias and bias
        if self._scale_bias:
            self.num_extra_inputs = 2
        self.num_groups, self.in_features, self.out_features = num_groups, in_features, out_features
        self.use_bias = bias
        for group in range(num_groups):
            weight = torch.empty(out_features, in_features, device=device, dtype=dtype)
            self.register_parameter(f"weight{group}", torch.nn.Parameter(weight))
        for group in range(num_groups if bias else 0):
            self.register_parameter(
                f"bias{group}", torch.nn.Parameter(torch.empty(out_features, device=device, dtype=dtype))
            )
        self._rng_state_tracker_function = rng_state_tracker_function
        if self._parameters["weight0"].device.type != "meta":  # type: ignore[union-attr]
            self.reset_parameters()
        self._accumulate_into_main_grad = accumulate_into_main_grad
        if accumulate_into_main_grad:
            self.leaves_graph = True
            self.run_outside_graph = outside_graph(
                "GroupedLinear accumulates into main_grad: a compiler traces no backward that changes memory. "
                "Make it without accumulate_into_main_grad to compile it."
            )

    def reset_parameters(self) -> None:
        """Fill weights and biases as torch.nn.Linear does."""
        tracker = self._rng_state_tracker_function
        bound = self.in_features**-0.5
        with contextlib.nullcontext() if tracker is None else tracker().fork():
            for weight in self.weights():
                torch.nn.init.kaiming_uniform_(weight, a=math.sqrt(5))
            for bias in self.biases():
                torch.nn.init.uniform_(bias, -bound, bound)

    def weights(self) -> list[torch.nn.Parameter]:
        """The groups' weights, out_features by in_features each."""
        return [getattr(self, f"weight{group}") for group in range(self.num_groups)]

    def biases(self) -> list[torch.nn.Parameter]:
        """The groups' biases; none without bias."""
        return [getattr(self, f"bias{group}") for group in range(self.num_groups if self.use_bias else 0)]

    def _check(self, x: torch.Tensor, extra: tuple[torch.Tensor, ...], kwargs: dict[str, Any]) -> None:
        if x.dim() == 0 or x.shape[-1] != self.in_features:
            raise ValueError(f"GroupedLinear takes {self.in_features} features, got an input of shape {tuple(x.shape)}")
        splits = extra[0]
        if splits.shape != (self.num_groups,) or splits.dtype not in (torch.int32, torch.int64):
            raise ValueError(
                f"GroupedLinear needs {self.num_groups} sizes of groups, int32 or int64, "
                f"got {splits.dtype} of shape {tuple(splits.shape)}"
            )
        if self._scale_bias and extra[1].numel() != x.numel() // self.in_features:
            raise ValueError(
                f"GroupedLinear needs a factor of the bias for each of {x.numel() // self.in_features} rows, "
                f"got {extra[1].numel()}"
            )
        if unknown := sorted(set(kwargs) - {OUTPUT_BUFFER_KEY, GRAD_INPUT_BUFFER_KEY}):
            raise TypeError(f"GroupedLinear takes the keywords output and grad_input, got {unknown}")
        if kwargs and torch.compiler.is_compiling():
            raise ValueError(
                "GroupedLinear takes no keywords in compiled code, which writes to no buffer of the caller's"
            )
        for name, width in ((OUTPUT_BUFFER_KEY, self.out_features), (GRAD_INPUT_BUFFER_KEY, self.in_features)):
            buffer = kwargs.get(name)
            if buffer is not None and tuple(buffer.shape) != (*x.shape[:-1], width):
                raise ValueError(
                    f"the buffer {name} must be of shape {(*x.shape[:-1], width)}, got {tuple(buffer.shape)}"
                )

    def fuser_forward_compute(
        self,
        input_: torch.Tensor,
        *,
        requires_grad: list[bool],
        basic_op_extra_inputs: list[tuple[torch.Tensor, ...]],
        prev_op_grad_output_quantizer: Any,
        next_op_input_quantizer: Any,
        basic_op_kwargs: list[dict[str, Any]],
    ) -> tuple[torch.Tensor, Sequence[Sequence[torch.Tensor]], Sequence[Tensors | None]]:
        extra, kwargs = basic_op_extra_inputs[0], basic_op_kwargs[0]
        self._check(input_, extra, kwargs)
        dtype = compute_dtype(input_, self.weights()[0].dtype)
        x = input_.reshape(-1, self.in_features).to(dtype)
        weights = [weight.to(dtype) for weight in self.weights()]
        splits = extra[0]
        if torch.compiler.is_compiling():
            y = _rows_by_group(x, [weight.t() for weight in weights], splits)
        else:
            sizes = _sizes(splits, x.shape[0])
            y = _into(kwargs.get(OUTPUT_BUFFER_KEY), x, self.out_features)
            for part, rows, weight in zip(torch.split(y, sizes), torch.split(x, sizes), weights, strict=True):
                torch.mm(rows, weight.t(), out=part)
        if self.use_bias:
            bias = torch.stack([bias.to(dtype) for bias in self.biases()])
            index = _group_of_row(splits, x.shape[0])
            added = bias.index_select(0, index)
            if self._scale_bias:
                added = added * extra[1].reshape(-1, 1).to(dtype)
            y = y + added if torch.compiler.is_compiling() else y.add_(added)
        saved = (input_, *extra, *self.weights(), *self.biases())
        return y.reshape(*input_.shape[:-1], self.out_features), [()], [saved]

    def fuser_forward_save_ctx(
        self,
        basic_op_ctxs: list[OperationContext],
        input_: torch.Tensor,
        tensors_to_save: Sequence[Tensors | None],
        *,
        requires_grad: list[bool],
        basic_op_kwargs: list[dict[str, Any]],
        **others: Any,
    ) -> None:
        if requires_grad[0] and tensors_to_save[0] is not None:
            basic_op_ctxs[0].save_for_backward(*tensors_to_save[0])
        # Eager code alone has a buffer.
        basic_op_ctxs[0].buffer = basic_op_kwargs[0].get(GRAD_INPUT_BUFFER_KEY)  # type: ignore[attr-defined]

    def fuser_backward(
        self,
        basic_op_ctxs: list[OperationContext],
        grad_output: torch.Tensor,
        *,
        basic_op_grad_extra_outputs: list[tuple[torch.Tensor, ...]],
    ) -> tuple[Any, Sequence[Sequence[torch.Tensor | None]], Sequence[Sequence[torch.Tensor | None]]]:
        ctx = basic_op_ctxs[0]
        saved: list[Any] = list(ctx.saved_tensors)
        input_, splits = saved[0], saved[1]
        count = self.num_extra_inputs
        weights, biases = saved[1 + count : 1 + count + self.num_groups], saved[1 + count + self.num_groups :]
        grad = grad_output.reshape(-1, self.out_features)
        x = input_.reshape(-1, self.in_features).to(grad.dtype)
        weights = [weight.to(grad.dtype) for weight in weights]
        wanted = [weight.requires_grad for weight in self.weights()]
        buffer = ctx.buffer  # type: ignore[attr-defined]
        if torch.compiler.is_compiling():
            dx, dw = self._compiled_gradients(grad, x, weights, splits, ctx.input_requires_grad, any(wanted))
        else:
            dx, dw = self._eager_gradients(grad, x, weights, splits, ctx.input_requires_grad, wanted, buffer)
        gradients: list[torch.Tensor | None] = []
        for weight, gradient in zip(self.weights(), dw, strict=True):
            if gradient is not None and self._accumulate_into_main_grad:
                gradients.append(accumulate(weight, gradient, type(self).__name__))
            else:
                gradients.append(None if gradient is None else gradient.to(weight.dtype))
        grad_scales: tuple[torch.Tensor | None, ...] = ()
        if self.use_bias:
            index = _group_of_row(splits, grad.shape[0])
            scaled = grad
            if self._scale_bias:
                scales = saved[2]
                scaled = grad * scales.reshape(-1, 1).to(grad.dtype)
                rows = torch.stack([bias.to(grad.dtype) for bias in biases]).index_select(0, index)
                grad_scales = ((grad.float() * rows.float()).sum(-1).reshape(scales.shape).to(scales.dtype),)
            sums = torch.zeros(self.num_groups, self.out_features, dtype=torch.float32, device=grad.device)
            sums = sums.index_add(0, index, scaled.float())
            gradients += [row.to(bias.dtype) for row, bias in zip(sums.unbind(0), self.biases(), strict=True)]
        if dx is not None:
            dx = dx.reshape(*grad_output.shape[:-1], self.in_features)
        return dx, [gradients], [(None, *grad_scales)]

    def _compiled_gradients(
        self, grad: torch.Tensor, x: torch.Tensor, weights: list[torch.Tensor], splits: torch.Tensor, dx: bool, dw: bool
    ) -> tuple[torch.Tensor | None, Sequence[torch.Tensor | None]]:
        grad_input = _rows_by_group(grad, weights, splits) if dx else None
        if not dw:
            return grad_input, [None] * self.num_groups
        masks = _masks(splits, grad.shape[0])
        return grad_input, [torch.where(mask, grad, 0).t() @ torch.where(mask, x, 0) for mask in masks]

    def _eager_gradients(
        self,
        grad: torch.Tensor,
        x: torch.Tensor,
        weights: list[torch.Tensor],
        splits: torch.Tensor,
        needs_input: bool,
        wanted: list[bool],
        buffer: torch.Tensor | None,
    ) -> tuple[torch.Tensor | None, Sequence[torch.Tensor | None]]:
        sizes = _sizes(splits, x.shape[0])
        parts = torch.split(grad, sizes)
        grad_input: torch.Tensor | None = None
        if needs_input:
            grad_input = _into(buffer, grad, self.in_features)
            for part, rows, weight in zip(torch.split(grad_input, sizes), parts, weights, strict=True):
                torch.mm(rows, weight, out=part)
        return grad_input, [
            part.t() @ rows if needed else None
            for part, rows, needed in zip(parts, torch.split(x, sizes), wanted, strict=True)
        ]


def _sizes(splits: torch.Tensor, rows: int) -> list[int]:
    """The groups' sizes. Raises ValueError where they are not all the rows."""
    sizes: list[int] = splits.tolist()
    if sum(sizes) != rows or min(sizes) < 0:
        raise ValueError(f"groups of {sizes} rows are not the {rows} rows of the input")
    return sizes


def _into(buffer: torch.Tensor | None, like: torch.Tensor, width: int) -> torch.Tensor:
    """Memory for rows of this width: the caller's, where it is of the type, or new. Raises ValueError otherwise."""
    if buffer is None:
        return like.new_empty(like.shape[0], width)
    if buffer.dtype != like.dtype or buffer.device != like.device or not buffer.is_contiguous():
        raise ValueError(
            f"a buffer must be contiguous, {like.dtype} and on {like.device}, got {buffer.dtype} on {buffer.device}"
        )
    return buffer.detach().view(like.shape[0], width)


def _group_of_row(splits: torch.Tensor, rows: int) -> torch.Tensor:
    """The group that each row is of."""
    ends = splits.cumsum(0)
    return torch.searchsorted(ends, torch.arange(rows, device=splits.device, dtype=ends.dtype), right=True)


def _masks(splits: torch.Tensor, rows: int) -> list[torch.Tensor]:
    """For each group which rows are of it, as a column."""
    index = _group_of_row(splits, rows).unsqueeze(-1)
    return [index == group for group in range(splits.shape[0])]


def _rows_by_group(x: torch.Tensor, matrices: list[torch.Tensor], splits: torch.Tensor) -> torch.Tensor:
    """Each row times the matrix of its group."""
    y = x.new_zeros(x.shape[0], matrices[0].shape[1])
    for mask, matrix in zip(_masks(splits, x.shape[0]), matrices, strict=True):
        y = torch.where(mask, x @ matrix, y)
    return y
