"""One transformer block of WAN with random weights: the operations of LightX2V's stock operators, and of the keys of
flagos_backend.frontends.lightx2v, through the functions behind them. LightX2V need not be there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from flagos_backend.frontends.lightx2v import functions

_EPSILON = 1e-6
_PROJECTIONS = ("q", "k", "v", "o", "cross_q", "cross_k", "cross_v", "cross_o")
#: What a scheme quantizes to; None computes in bfloat16.
SCHEMES: dict[str, torch.dtype | None] = {"bf16": None, "fp8": torch.float8_e4m3fn, "int8": torch.int8}


@dataclass(frozen=True)
class Sizes:
    """Those of WAN 1.3B, for 81 frames of 832 by 480."""

    tokens: int = 32_760
    width: int = 1536
    heads: int = 12
    inner: int = 8960
    context: int = 512

    @property
    def flops(self) -> float:
        """Of the products and of attention."""
        square = self.width**2
        linear = 2 * (self.tokens * (6 * square + 2 * self.width * self.inner) + self.context * 2 * square)
        return linear + 4.0 * self.tokens * (self.tokens + self.context) * self.width


class Weights:
    """Random weights in bfloat16, matrices kept as [in, out] over [out, in], as LightX2V keeps them."""

    def __init__(self, sizes: Sizes, device: torch.device, scheme: str = "bf16") -> None:
        generator = torch.Generator().manual_seed(0)

        def draw(*dims: int, scale: float) -> Tensor:
            return (torch.randn(dims, generator=generator) * scale).bfloat16().to(device)

        self.sizes = sizes
        shapes = dict.fromkeys(_PROJECTIONS, (sizes.width, sizes.width))
        shapes |= {"ffn_0": (sizes.inner, sizes.width), "ffn_2": (sizes.width, sizes.inner)}
        self.matrices = {name: draw(*dims, scale=dims[1] ** -0.5) for name, dims in shapes.items()}
        self.biases = {name: draw(dims[0], scale=0.1) for name, dims in shapes.items()}
        self.norms = {name: 1 + draw(sizes.width, scale=0.1) for name in ("q", "k", "cross_q", "cross_k", "norm3")}
        self.norm3_bias = draw(sizes.width, scale=0.1)
        self.modulation = draw(1, 6, sizes.width, scale=sizes.width**-0.5)
        self.scales: dict[str, Tensor] = {}
        dtype = SCHEMES[scheme]
        if dtype is not None:
            for name, matrix in self.matrices.items():
                quantized, scale = functions.quantize_rows(matrix, dtype)
                self.matrices[name], self.scales[name] = quantized, scale.reshape(1, -1)
        self.matrices = {name: matrix.t() for name, matrix in self.matrices.items()}


@dataclass(frozen=True)
class Operators:
    """What a block is made of. ``linear``: x, weights, name of the layer. ``rope``: x and frequencies."""

    linear: Callable[[Tensor, Weights, str], Tensor]
    rms_norm: Callable[[Tensor, Tensor], Tensor]
    layer_norm: Callable[[Tensor, Tensor | None, Tensor | None], Tensor]
    rope: Callable[[Tensor, Tensor], Tensor]
    attention: Callable[[Tensor, Tensor, Tensor], Tensor]


def _plain_linear(x: Tensor, weights: Weights, name: str) -> Tensor:
    return torch.addmm(weights.biases[name], x, weights.matrices[name])


def _stock_rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(dim=-1, keepdim=True) + _EPSILON)).type_as(x) * weight


def _stock_rope(x: Tensor, frequencies: Tensor) -> Tensor:
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2).contiguous())
    return torch.view_as_real(pairs * frequencies).flatten(-2).to(x.dtype)


def _attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return functions.attention(q[None], k[None], v[None]).reshape(q.shape[0], -1)


STOCK = Operators(
    _plain_linear,
    _stock_rms_norm,
    lambda x, weight, bias: F.layer_norm(x, (x.shape[-1],), weight, bias, _EPSILON),
    _stock_rope,
    _attention,  # LightX2V's torch_sdpa makes the same call
)


def _our_linear(x: Tensor, weights: Weights, name: str) -> Tensor:
    matrix, bias, scale = weights.matrices[name], weights.biases[name], weights.scales.get(name)
    if scale is None:
        return torch.addmm(bias, x, matrix)
    quantized, x_scale = functions.quantize_rows(x, matrix.dtype)
    return functions.quantized_product(quantized, x_scale, matrix, scale, bias, x.dtype)


def _our_rope(x: Tensor, cache: Tensor) -> Tensor:
    cos, sin = cache.chunk(2, dim=-1)
    return functions.rotate(x, (cos, cos), (sin, sin), "interleaved")


OURS = Operators(
    _our_linear,
    lambda x, weight: functions.rms_norm(x, weight, _EPSILON),
    lambda x, weight, bias: functions.layer_norm(x, weight, bias, _EPSILON),
    _our_rope,
    _attention,
)


@dataclass(frozen=True)
class Inputs:
    """``frequencies``: complex [tokens, 1, head / 2]; ``cache``: the same as cos and sin, as flagos_rope takes it."""

    x: Tensor
    embedding: Tensor
    context: Tensor
    frequencies: Tensor
    cache: Tensor

    @classmethod
    def of(cls, sizes: Sizes, device: torch.device) -> Inputs:
        generator = torch.Generator().manual_seed(1)
        angles = torch.rand(sizes.tokens, 1, sizes.width // sizes.heads // 2, generator=generator) * 6
        drawn = [
            torch.randn(dims, generator=generator).bfloat16().to(device)
            for dims in ((sizes.tokens, sizes.width), (1, 6, sizes.width), (sizes.context, sizes.width))
        ]
        frequencies = torch.polar(torch.ones_like(angles), angles).to(device)
        cache = torch.cat((angles.cos(), angles.sin()), dim=-1).to(device)
        return cls(drawn[0], drawn[1] * 0.3, drawn[2], frequencies, cache)


def block(operators: Operators, weights: Weights) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """``block(x, embedding, context, frequencies)``: WAN's self attention, cross attention and feed forward, with the
    modulation of the time step. Writes in x, as LightX2V does."""
    heads, linear, rms_norm = weights.sizes.heads, operators.linear, operators.rms_norm
    norms = weights.norms

    def split(x: Tensor) -> Tensor:
        return x.view(x.shape[0], heads, -1)

    def run(x: Tensor, embedding: Tensor, context: Tensor, frequencies: Tensor) -> Tensor:
        modulation = (weights.modulation + embedding).chunk(6, dim=1)
        shift, scale, gate, ffn_shift, ffn_scale, ffn_gate = (part.squeeze() for part in modulation)
        normal = operators.layer_norm(x, None, None) * (1 + scale) + shift
        q = split(rms_norm(linear(normal, weights, "q"), norms["q"]))
        k = split(rms_norm(linear(normal, weights, "k"), norms["k"]))
        v = split(linear(normal, weights, "v"))
        attended = operators.attention(operators.rope(q, frequencies), operators.rope(k, frequencies), v)
        x.add_(linear(attended, weights, "o") * gate)
        normal = operators.layer_norm(x, norms["norm3"], weights.norm3_bias)
        q = split(rms_norm(linear(normal, weights, "cross_q"), norms["cross_q"]))
        k = split(rms_norm(linear(context, weights, "cross_k"), norms["cross_k"]))
        v = split(linear(context, weights, "cross_v"))
        x.add_(linear(operators.attention(q, k, v), weights, "cross_o"))
        normal = operators.layer_norm(x, None, None) * (1 + ffn_scale) + ffn_shift
        inner = F.gelu(linear(normal, weights, "ffn_0"), approximate="tanh")
        x.add_(linear(inner, weights, "ffn_2") * ffn_gate)
        return x

    return run
