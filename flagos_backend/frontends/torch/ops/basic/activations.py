"""Elementwise activations, the gated ones, and the same with a factor for each row.

A gated activation halves the last dimension: act(first half) * second half. With glu_interleave_size the halves
alternate in blocks.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional as F

from flagos_backend.frontends.torch.ops.basic import formulas
from flagos_backend.frontends.torch.ops.basic.dtypes import compute_dtype, wide
from flagos_backend.frontends.torch.ops.basic.simple import SimpleOperation
from flagos_backend.frontends.torch.ops.operation import BasicOperation, OperationContext, Tensors


class Activation(SimpleOperation):
    """Any activation: its value and the gradient through it.

    `cache_quantized_input`: the input waits for the backward as float8 with one scale.
    """

    def __init__(self, *, cache_quantized_input: bool = False) -> None:
        super().__init__()
        self.cache_quantized_input = cache_quantized_input

    @abc.abstractmethod
    def value(self, x: torch.Tensor) -> torch.Tensor:
        """The activation. Rounded to the type of x at most once."""

    @abc.abstractmethod
    def gradient(self, x: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        """The gradient of the input, of its type."""

    def compute(self, input_: torch.Tensor) -> tuple[torch.Tensor, Tensors]:
        y = self.value(input_).to(compute_dtype(input_, input_.dtype))
        return y, _to_float8(input_) if self.cache_quantized_input else (input_,)

    def op_backward(
        self, ctx: OperationContext, grad_output: torch.Tensor
    ) -> tuple[torch.Tensor, tuple[torch.Tensor | None, ...]]:
        x, *scale = ctx.saved_tensors
        assert x is not None
        if scale:
            assert scale[0] is not None
            x = (x.float() * scale[0]).to(grad_output.dtype)
        return self.gradient(x.to(torch.promote_types(x.dtype, grad_output.dtype)), grad_output), ()


def _to_float8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The numbers as float8 (e4m3) and their scale, which the largest sets."""
    largest = torch.finfo(torch.float8_e4m3fn).max
    scale = (wide(x).abs().amax() if x.numel() else wide(x).new_ones(())) / largest
    scale = torch.where(scale == 0, torch.ones_like(scale), scale).float()
    return (wide(x) / scale).to(torch.float8_e4m3fn), scale


class _Elementwise(Activation):
    """A function without an ATen kernel of its own."""

    @staticmethod
    @abc.abstractmethod
    def function(x: torch.Tensor) -> torch.Tensor:
        """The activation."""

    @staticmethod
    @abc.abstractmethod
    def slope(x: torch.Tensor) -> torch.Tensor:
        """Its derivative."""

    def value(self, x: torch.Tensor) -> torch.Tensor:
        return type(self).function(wide(x)).to(x.dtype)

    def gradient(self, x: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        return (wide(grad) * type(self).slope(wide(x))).to(x.dtype)


class GELU(Activation):
    """GELU by tanh."""

    def value(self, x: torch.Tensor) -> torch.Tensor:
        return F.gelu(x, approximate="tanh")

    def gradient(self, x: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        grad_input: torch.Tensor = torch.ops.aten.gelu_backward(grad.to(x.dtype), x, approximate="tanh")
        return grad_input


class QGELU(_Elementwise):
    """x * sigmoid(1.702 x)."""

    function = staticmethod(formulas.quick_gelu)
    slope = staticmethod(formulas.quick_gelu_slope)


class ReLU(Activation):
    """max(x, 0)."""

    def value(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x)

    def gradient(self, x: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        grad_input: torch.Tensor = torch.ops.aten.threshold_backward(grad.to(x.dtype), x, 0)
        return grad_input


class SReLU(_Elementwise):
    """max(x, 0) squared."""

    function = staticmethod(formulas.squared_relu)
    slope = staticmethod(formulas.squared_relu_slope)


class SiLU(Activation):
    """x * sigmoid(x)."""

    def value(self, x: torch.Tensor) -> torch.Tensor:
        return F.silu(x)

    def gradient(self, x: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        grad_input: torch.Tensor = torch.ops.aten.silu_backward(grad.to(x.dtype), x)
        return grad_input


class GatedActivation(Activation):
    """Combines the two halves of the last dimension."""

    def __init__(self, *, cache_quantized_input: bool = False, glu_interleave_size: int | None = None) -> None:
        super().__init__(cache_quantized_input=cache_quantized_input)
        if glu_interleave_size is not None and glu_interleave_size <= 0:
            raise ValueError(f"glu_interleave_size must be positive, got {glu_interleave_size}")
        self.glu_interleave_size = glu_interleave_size

    @abc.abstractmethod
    def gate(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """The output of the two halves."""

    @abc.abstractmethod
    def gate_gradients(self, a: torch.Tensor, b: torch.Tensor, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The gradients of the two halves."""

    def _halves(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        size = self.glu_interleave_size
        width = x.shape[-1]
        if width % (2 * (size or 1)):
            raise ValueError(
                f"{type(self).__name__} needs a last dimension divisible by {2 * (size or 1)}, got {width}"
            )
        if size is None:
            return x[..., : width // 2], x[..., width // 2 :]
        blocks = x.reshape(*x.shape[:-1], width // (2 * size), 2, size)
        shape = (*x.shape[:-1], width // 2)
        return blocks[..., 0, :].reshape(shape), blocks[..., 1, :].reshape(shape)

    def _joined(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        size = self.glu_interleave_size
        if size is None:
            return torch.cat((a, b), -1)
        blocks = (*a.shape[:-1], a.shape[-1] // size, size)
        return torch.stack((a.reshape(blocks), b.reshape(blocks)), -2).reshape(*a.shape[:-1], 2 * a.shape[-1])

    def value(self, x: torch.Tensor) -> torch.Tensor:
        a, b = self._halves(wide(x))
        return self.gate(a, b).to(x.dtype)

    def gradient(self, x: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        a, b = self._halves(wide(x))
        return self._joined(*self.gate_gradients(a, b, wide(grad))).to(x.dtype)


class _PlainGate(GatedActivation):
    """A function of the first half times the second half."""

    @staticmethod
    @abc.abstractmethod
    def function(x: torch.Tensor) -> torch.Tensor:
        """The gate."""

    @staticmethod
    @abc.abstractmethod
    def slope(x: torch.Tensor) -> torch.Tensor:
        """Its derivative."""

    def gate(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return type(self).function(a) * b

    def gate_gradients(self, a: torch.Tensor, b: torch.Tensor, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return grad * b * type(self).slope(a), grad * type(self).function(a)


class GLU(_PlainGate):
    """sigmoid gate."""

    function = staticmethod(formulas.sigmoid)
    slope = staticmethod(formulas.sigmoid_slope)


class GEGLU(_PlainGate):
    """GELU gate."""

    function = staticmethod(formulas.gelu)
    slope = staticmethod(formulas.gelu_slope)


class QGEGLU(_PlainGate):
    """x * sigmoid(1.702 x) as the gate."""

    function = staticmethod(formulas.quick_gelu)
    slope = staticmethod(formulas.quick_gelu_slope)


class ReGLU(_PlainGate):
    """ReLU gate."""

    function = staticmethod(formulas.relu)
    slope = staticmethod(formulas.relu_slope)


class SReGLU(_PlainGate):
    """Squared ReLU gate."""

    function = staticmethod(formulas.squared_relu)
    slope = staticmethod(formulas.squared_relu_slope)


class SwiGLU(_PlainGate):
    """SiLU gate."""

    function = staticmethod(formulas.silu)
    slope = staticmethod(formulas.silu_slope)


class SiTUGLU(GatedActivation):
    """beta1 tanh(a / beta1) sigmoid(a) * beta2 tanh(b / beta2)."""

    def __init__(
        self,
        *,
        beta1: float = 4.0,
        beta2: float = 25.0,
        cache_quantized_input: bool = False,
        glu_interleave_size: int | None = None,
    ) -> None:
        super().__init__(cache_quantized_input=cache_quantized_input, glu_interleave_size=glu_interleave_size)
        for name, beta in (("beta1", beta1), ("beta2", beta2)):
            if not math.isfinite(beta) or beta <= 0.0:
                raise ValueError(f"{name} must be finite and positive, got {beta}")
        self.beta1, self.beta2 = float(beta1), float(beta2)

    def gate(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return formulas.capped(a, self.beta1) * torch.sigmoid(a) * formulas.capped(b, self.beta2)

    def gate_gradients(self, a: torch.Tensor, b: torch.Tensor, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        cap, s = formulas.capped(a, self.beta1), torch.sigmoid(a)
        slope = formulas.capped_slope(a, self.beta1) * s + cap * s * (1.0 - s)
        return grad * slope * formulas.capped(b, self.beta2), grad * cap * s * formulas.capped_slope(b, self.beta2)


class ClampedSwiGLU(GatedActivation):
    """a * sigmoid(alpha a) * (b + offset), with a cut above limit, and b cut to [-limit, limit]."""

    def __init__(
        self,
        *,
        limit: float = 7.0,
        alpha: float = 1.702,
        glu_linear_offset: float = 1.0,
        cache_quantized_input: bool = False,
        glu_interleave_size: int | None = None,
    ) -> None:
        super().__init__(cache_quantized_input=cache_quantized_input, glu_interleave_size=glu_interleave_size)
        self.limit, self.alpha, self.glu_linear_offset = limit, alpha, glu_linear_offset

    def gate(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        inside = b.clamp(-self.limit, self.limit)
        return formulas.swish(a.clamp(max=self.limit), self.alpha) * (inside + self.glu_linear_offset)

    def gate_gradients(self, a: torch.Tensor, b: torch.Tensor, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, y = a.clamp(max=self.limit), b.clamp(-self.limit, self.limit) + self.glu_linear_offset
        grad_a = grad * y * formulas.swish_slope(x, self.alpha) * (a <= self.limit).to(a.dtype)
        return grad_a, grad * formulas.swish(x, self.alpha) * (b.abs() <= self.limit).to(b.dtype)


class ScaledActivation(BasicOperation):
    """An activation times one factor a row: an extra input of the input's shape without the last dimension."""

    num_extra_inputs = 1

    def __init__(self, activation: Activation, *, activation_recompute_in_mlp: bool = False) -> None:
        super().__init__()
        if activation_recompute_in_mlp and isinstance(activation, GatedActivation):
            raise ValueError(f"{type(self).__name__} does not support activation recomputation in a grouped MLP")
        self.activation = activation
        self.activation_recompute_in_mlp = activation_recompute_in_mlp

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
        scales = basic_op_extra_inputs[0][0]
        if scales.shape != input_.shape[:-1]:
            raise ValueError(
                f"{type(self).__name__} needs factors of shape {tuple(input_.shape[:-1])}, got {tuple(scales.shape)}"
            )
        y = self.activation.value(wide(input_)) * wide(scales).unsqueeze(-1)
        return y.to(compute_dtype(input_, input_.dtype)), [()], [(input_, scales)]

    def fuser_forward_save_ctx(
        self,
        basic_op_ctxs: list[OperationContext],
        input_: torch.Tensor,
        tensors_to_save: Sequence[Tensors | None],
        *,
        requires_grad: list[bool],
        **others: Any,
    ) -> None:
        if requires_grad[0] and tensors_to_save[0] is not None:
            basic_op_ctxs[0].save_for_backward(*tensors_to_save[0])

    def fuser_backward(
        self,
        basic_op_ctxs: list[OperationContext],
        grad_output: torch.Tensor,
        *,
        basic_op_grad_extra_outputs: list[tuple[torch.Tensor, ...]],
    ) -> tuple[torch.Tensor, Sequence[Sequence[torch.Tensor | None]], Sequence[Sequence[torch.Tensor | None]]]:
        x, scales = basic_op_ctxs[0].saved_tensors
        assert x is not None and scales is not None
        g = wide(grad_output)
        grad_x = self.activation.gradient(wide(x), g * wide(scales).unsqueeze(-1))
        grad_scales = (g * self.activation.value(wide(x))).sum(-1)
        return grad_x.to(x.dtype), [()], [(grad_scales.to(scales.dtype),)]


class ScaledSReLU(ScaledActivation):
    """SReLU times one factor a row."""

    def __init__(self, *, activation_recompute_in_mlp: bool = False) -> None:
        super().__init__(SReLU(), activation_recompute_in_mlp=activation_recompute_in_mlp)


class ScaledSwiGLU(ScaledActivation):
    """SwiGLU times one factor a row."""

    def __init__(self, glu_interleave_size: int | None = None, *, activation_recompute_in_mlp: bool = False) -> None:
        activation = SwiGLU(glu_interleave_size=glu_interleave_size)
        super().__init__(activation, activation_recompute_in_mlp=activation_recompute_in_mlp)


class ScaledSiTUGLU(ScaledActivation):
    """SiTUGLU times one factor a row."""

    def __init__(
        self,
        glu_interleave_size: int | None = None,
        *,
        beta1: float = 4.0,
        beta2: float = 25.0,
        activation_recompute_in_mlp: bool = False,
    ) -> None:
        activation = SiTUGLU(beta1=beta1, beta2=beta2, glu_interleave_size=glu_interleave_size)
        super().__init__(activation, activation_recompute_in_mlp=activation_recompute_in_mlp)


class ScaledClampedQGeGLU(ScaledActivation):
    """ClampedSwiGLU times one factor a row."""

    def __init__(
        self,
        glu_interleave_size: int | None = None,
        *,
        limit: float = 7.0,
        alpha: float = 1.702,
        glu_linear_offset: float = 1.0,
        activation_recompute_in_mlp: bool = False,
    ) -> None:
        activation = ClampedSwiGLU(
            limit=limit, alpha=alpha, glu_linear_offset=glu_linear_offset, glu_interleave_size=glu_interleave_size
        )
        super().__init__(activation, activation_recompute_in_mlp=activation_recompute_in_mlp)
