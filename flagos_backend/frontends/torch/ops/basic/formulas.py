"""Values and derivatives of activations, elementwise on tensors of float32 or wider."""

from __future__ import annotations

import math

import torch


def gelu(x: torch.Tensor) -> torch.Tensor:
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x * x * x)))


def gelu_slope(x: torch.Tensor) -> torch.Tensor:
    c = math.sqrt(2.0 / math.pi)
    t = torch.tanh(c * (x + 0.044715 * x * x * x))
    return 0.5 * (1.0 + t) + 0.5 * x * (1.0 - t * t) * c * (1.0 + 3.0 * 0.044715 * x * x)


def swish(x: torch.Tensor, alpha: float) -> torch.Tensor:
    """x * sigmoid(alpha * x)."""
    return x * torch.sigmoid(alpha * x)


def swish_slope(x: torch.Tensor, alpha: float) -> torch.Tensor:
    s = torch.sigmoid(alpha * x)
    return s + alpha * x * s * (1.0 - s)


def silu(x: torch.Tensor) -> torch.Tensor:
    return swish(x, 1.0)


def silu_slope(x: torch.Tensor) -> torch.Tensor:
    return swish_slope(x, 1.0)


def quick_gelu(x: torch.Tensor) -> torch.Tensor:
    return swish(x, 1.702)


def quick_gelu_slope(x: torch.Tensor) -> torch.Tensor:
    return swish_slope(x, 1.702)


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    return torch.sigmoid(x)


def sigmoid_slope(x: torch.Tensor) -> torch.Tensor:
    s = torch.sigmoid(x)
    return s * (1.0 - s)


def relu(x: torch.Tensor) -> torch.Tensor:
    return torch.relu(x)


def relu_slope(x: torch.Tensor) -> torch.Tensor:
    return (x > 0).to(x.dtype)


def squared_relu(x: torch.Tensor) -> torch.Tensor:
    r = torch.relu(x)
    return r * r


def squared_relu_slope(x: torch.Tensor) -> torch.Tensor:
    return 2.0 * torch.relu(x)


def capped(x: torch.Tensor, beta: float) -> torch.Tensor:
    """beta * tanh(x / beta)."""
    return beta * torch.tanh(x / beta)


def capped_slope(x: torch.Tensor, beta: float) -> torch.Tensor:
    t = torch.tanh(x / beta)
    return 1.0 - t * t
