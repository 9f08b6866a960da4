"""flagos.attention and flagos.attention_backward in plain torch: exact, a block of query positions at a time.

The provider of last resort for every device, and what the other providers are tested against.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from flagos_backend.ir.custom_calls.attention import (
    BACKWARD,
    FORWARD,
    Attention,
    AttentionBackwardCall,
    AttentionCall,
    Sizes,
    Views,
)
from flagos_backend.ir.hlo import Instruction
from flagos_backend.ir.types import ArrayShape, ElementType, leaves
from flagos_backend.kernels.reference.custom_calls import Config, custom_call
from flagos_backend.kernels.reference.registry import Kernel, Run, Storage, Value
from flagos_backend.kernels.reference.storage import dtype_of
from flagos_backend.process.torch_loading import Tensor, torch

# Logits that exist at once.
_BLOCK_ELEMENTS = 1 << 22


def shapes_of(instruction: Instruction) -> tuple[ArrayShape, ...]:
    return tuple(leaf for operand in instruction.operands for leaf in leaves(operand.shape))


def views_of(instruction: Instruction, attention: Attention) -> Views:
    query, key, value = (shape.dims for shape in shapes_of(instruction)[:3])
    return Views(attention, {attention.query: query, attention.key: key, attention.value: value})


def compute_dtype(instruction: Instruction) -> torch.dtype:
    """f64 where an operand is, else f32."""
    wide = any(shape.element_type is ElementType.F64 for shape in shapes_of(instruction)[:3])
    return torch.float64 if wide else torch.float32


@dataclass(frozen=True, slots=True)
class _Rows:
    """Logits of a block of query positions, [B, K, G, rows, S], which of them are hidden, the sink beside them, and
    the derivative of their soft cap."""

    block: slice
    logits: Tensor
    hidden: Tensor | None
    sink: Tensor | None
    slope: Tensor | None

    def softmax(self) -> Tensor:
        """Of the keys."""
        return torch.softmax(self._whole(), -1)[..., : self.logits.shape[-1]]

    def statistics(self) -> Tensor:
        return torch.logsumexp(self._whole(), -1)

    def _whole(self) -> Tensor:
        if self.sink is None:
            return self.logits
        return torch.cat([self.logits, self.sink.expand(*self.logits.shape[:-1], 1)], -1)


class _Logits:
    """The logits of one call, block by block."""

    def __init__(self, attention: Attention, views: Views, dtype: torch.dtype) -> None:
        self._attention, self._views, self._dtype = attention, views, dtype

    def blocks(self, query: Tensor, key: Tensor, rest: tuple[Tensor, ...]) -> Iterator[_Rows]:
        """``query`` [B,K,G,T,D], ``key`` [B,K,1,S,D], in the type to compute in; ``rest``: the optional operands."""
        a, size = self._attention, self._views.sizes
        bias, mask, sink = _optional(a, rest)
        if sink is not None:
            sink = _grouped(self._views.sink(sink, a.sink or ""), size).to(self._dtype)[..., None, None]
        rows = max(1, _BLOCK_ELEMENTS // max(1, size.B * size.H * size.S))
        bias = None if bias is None else self._broadcast(bias, a.bias or "").to(self._dtype)
        mask = None if mask is None else self._broadcast(mask, a.mask or "")
        for start in range(0, size.T, rows):
            block = slice(start, min(start + rows, size.T))
            logits = torch.matmul(query[..., block, :], key.transpose(-1, -2)) * a.scale
            slope = None
            if a.cap is not None:
                capped = torch.tanh(logits / a.cap)
                logits, slope = capped * a.cap, 1 - capped * capped
            if bias is not None:
                logits += _rows_of(bias, block)
            hidden = self._hidden(block, mask, query.device)
            if hidden is not None:
                logits = logits.masked_fill(hidden, a.fill)
            yield _Rows(block, logits, hidden, sink, slope)

    def _broadcast(self, tensor: Tensor, dims: str) -> Tensor:
        """Over [B, K, G, T, S]."""
        seen = self._views.logits(tensor, dims)
        if seen.shape[1] == 1:
            return seen.unsqueeze(2)
        return _grouped(seen, self._views.sizes)

    def _hidden(self, block: slice, mask: Tensor | None, device: torch.device) -> Tensor | None:
        a = self._attention
        hidden = None if mask is None else ~_rows_of(mask, block)
        if a.upper is not None or a.lower is not None:
            t = torch.arange(block.start, block.stop, device=device)[:, None]
            s = torch.arange(self._views.sizes.S, device=device)
            for outside in (
                None if a.upper is None else s > t + a.upper,
                None if a.lower is None else s < t - a.lower,
            ):
                if outside is not None:
                    hidden = outside if hidden is None else hidden | outside
        return hidden


def _grouped(tensor: Tensor, size: Sizes) -> Tensor:
    """[B, H, ...] as [B, K, G, ...]."""
    return tensor.reshape(tensor.shape[0], size.K, size.group, *tensor.shape[2:])


def _rows_of(tensor: Tensor, block: slice) -> Tensor:
    return tensor if tensor.shape[-2] == 1 else tensor[..., block, :]


def _optional(a: Attention, rest: tuple[Tensor, ...]) -> tuple[Tensor | None, ...]:
    """Bias, mask and sink."""
    given = iter(rest)
    return tuple(None if dims is None else next(given) for dims in (a.bias, a.mask, a.sink))


class _BiasGradient:
    """The gradient of logits, summed over the dimensions that ``dims`` lacks, in the type to compute in."""

    def __init__(self, views: Views, dims: str, like: Tensor) -> None:
        size = views.sizes
        shared = views.shared(dims)
        self._sizes, self._summed = shared, tuple(range(0, len(shared), 2))
        self._over_queries, self._over_keys = "t" not in dims, "s" not in dims
        rows, keys = 1 if self._over_queries else size.T, 1 if self._over_keys else size.S
        self.total = like.new_zeros((*shared[1::2], rows, keys))

    def add(self, of_logits: Tensor, block: slice) -> None:
        """``of_logits`` [B, K, G, rows, S]"""
        found = of_logits.reshape(*self._sizes, *of_logits.shape[-2:]).sum(self._summed)
        if self._over_keys:
            found = found.sum(-1, keepdim=True)
        if self._over_queries:
            self.total += found.sum(-2, keepdim=True)
        else:
            self.total[..., block, :] += found


@custom_call(FORWARD, reads_config=False, storage=Storage.FRESH)
def prepare_attention(instruction: Instruction, config: Config) -> Kernel:
    call = AttentionCall.of(instruction)
    a, views = call.attention, views_of(instruction, call.attention)
    size, dtype = views.sizes, compute_dtype(instruction)
    results = [dtype_of(leaf.element_type) for leaf in leaves(instruction.shape)]
    logits_of = _Logits(a, views, dtype)

    def run(launch: Run, query: Tensor, key: Tensor, value: Tensor, *rest: Tensor) -> Value:
        q = _grouped(views.query(query, a.query).to(dtype), size)
        k = views.key(key, a.key).to(dtype).unsqueeze(2)
        v = views.key(value, a.value, "e").to(dtype).unsqueeze(2)
        output = q.new_empty((size.B, size.K, size.group, size.T, size.E))
        statistics = q.new_empty((size.B, size.K, size.group, size.T))
        for rows in logits_of.blocks(q, k, rest):
            weights = rows.softmax()
            output[..., rows.block, :] = torch.matmul(weights, v)
            if call.statistics:
                statistics[..., rows.block] = rows.statistics()
        laid_out = views.like_query(output.to(results[0]), a.output, "e")
        return (laid_out, statistics.flatten(1, 2).to(results[1])) if call.statistics else laid_out

    return run


@custom_call(BACKWARD, reads_config=False, storage=Storage.FRESH)
def prepare_attention_backward(instruction: Instruction, config: Config) -> Kernel:
    call = AttentionBackwardCall.of(instruction)
    a, views = call.attention, views_of(instruction, call.attention)
    size, dtype = views.sizes, compute_dtype(instruction)
    results = [dtype_of(leaf.element_type) for leaf in leaves(instruction.shape)]
    logits_of = _Logits(a, views, dtype)

    def run(
        launch: Run, query: Tensor, key: Tensor, value: Tensor, out: Tensor, stats: Tensor, grad: Tensor, *rest: Tensor
    ) -> Value:
        q = _grouped(views.query(query, a.query).to(dtype), size)
        k = views.key(key, a.key).to(dtype).unsqueeze(2)
        v = views.key(value, a.value, "e").to(dtype).unsqueeze(2)
        do = _grouped(views.query(grad, call.output_gradient, "e").to(dtype), size)
        dq = torch.empty_like(q, memory_format=torch.contiguous_format)
        dk = k.new_zeros((size.B, size.K, size.S, size.D))
        dv = v.new_zeros((size.B, size.K, size.S, size.E))
        dsink = q.new_empty((size.B, size.K, size.group, size.T))
        dbias = None if call.bias_gradient is None else _BiasGradient(views, call.bias_gradient, q)
        for rows in logits_of.blocks(q, k, rest):
            weights = rows.softmax()
            # Of logits of -infinity alone there is no softmax; given a number as their statistics, it is zero.
            known = _grouped(stats, size)[..., rows.block, None].isfinite()
            weights = weights.masked_fill(known & (rows.logits == -math.inf), 0.0)
            do_rows = do[..., rows.block, :]
            dv += torch.matmul(weights.transpose(-1, -2), do_rows).sum(2)
            dp = torch.matmul(do_rows, v.transpose(-1, -2))
            row_dot = (weights * dp).sum(-1, keepdim=True)
            ds = weights * (dp - row_dot)
            if rows.sink is not None:
                dsink[..., rows.block] = -(torch.exp(rows.sink - rows.statistics()[..., None]) * row_dot)[..., 0]
            if rows.hidden is not None and not a.added:
                ds = ds.masked_fill(rows.hidden, 0.0)
            if dbias is not None:
                dbias.add(ds, rows.block)
            if rows.slope is not None:
                ds = ds * rows.slope
            dq[..., rows.block, :] = torch.matmul(ds, k) * a.scale
            dk += torch.matmul(ds.transpose(-1, -2), q[..., rows.block, :]).sum(2) * a.scale
        laid_out: list[Tensor] = []
        if call.query_gradient is not None:
            laid_out.append(views.like_query(dq.to(results[len(laid_out)]), call.query_gradient, "d"))
        if call.key_gradient is not None:
            laid_out.append(views.like_key(dk.to(results[len(laid_out)]), call.key_gradient, "d"))
        if call.value_gradient is not None:
            laid_out.append(views.like_key(dv.to(results[len(laid_out)]), call.value_gradient, "e"))
        if call.sink_gradient is not None:
            laid_out.append(views.like_rows(dsink.to(results[len(laid_out)]), call.sink_gradient))
        if dbias is not None and call.bias_gradient is not None:
            laid_out.append(views.like_bias(dbias.total.to(results[len(laid_out)]), call.bias_gradient))
        return tuple(laid_out)

    return run
