"""flagos.attention and flagos.attention_backward as launches of our Triton kernels (attention_kernels.py,
attention_gradient_kernels.py)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flagos_backend.devices.simulated import SIMULATED
from flagos_backend.devices.target import Target
from flagos_backend.ir.custom_calls.attention import Attention, AttentionBackwardCall, AttentionCall, Views
from flagos_backend.ir.hlo import Instruction
from flagos_backend.ir.types import ElementType, leaves
from flagos_backend.kernels.implementation import Variant
from flagos_backend.kernels.reference.attention import shapes_of, views_of
from flagos_backend.kernels.reference.registry import Kernel, Run, Value
from flagos_backend.kernels.reference.storage import dtype_of
from flagos_backend.kernels.triton import launching
from flagos_backend.process.torch_loading import Tensor, torch

E = ElementType
_TYPES = frozenset({E.F16, E.BF16, E.F32})
_MAX_CHANNELS = 256
# Kernels tell rows that see no key by their statistics, so the fill must lie far below every visible logit; and a fill
# near the least float would overflow in units of log2.
_HIGHEST_FILL, _LOWEST_FILL = -1e4, -1e30
_LOG2E = 1.0 / math.log(2.0)


@dataclass(frozen=True, slots=True)
class Blocks:
    """Sizes of the blocks that one program works on, and how the compiler pipelines it."""

    queries: int
    keys: int
    warps: int
    stages: int

    def __str__(self) -> str:
        return f"{self.queries}x{self.keys}, {self.warps} warps, {self.stages} stages"


# By the greatest number of channels; the first of each row is what runs where nothing is measured (an H100's best).
_FORWARD: dict[int, tuple[Blocks, ...]] = {
    64: (Blocks(64, 64, 4, 3), Blocks(128, 64, 4, 4), Blocks(128, 64, 8, 3)),
    128: (Blocks(64, 64, 4, 3), Blocks(128, 64, 8, 3), Blocks(128, 64, 8, 2)),
    256: (Blocks(128, 64, 8, 2), Blocks(64, 64, 8, 2), Blocks(64, 32, 4, 2)),
}
_BACKWARD: dict[int, tuple[Blocks, ...]] = {
    64: (Blocks(64, 64, 4, 2), Blocks(64, 64, 4, 3), Blocks(32, 64, 4, 3)),
    128: (Blocks(64, 64, 4, 2), Blocks(64, 64, 8, 2), Blocks(32, 64, 4, 3)),
    256: (Blocks(32, 64, 8, 1), Blocks(64, 32, 8, 1), Blocks(32, 32, 4, 1)),
}
# f32 takes twice the room.
_WIDE_FORWARD = (Blocks(64, 32, 4, 2), Blocks(128, 32, 8, 2), Blocks(64, 64, 8, 2))
_WIDE_BACKWARD = (Blocks(32, 32, 4, 1), Blocks(64, 32, 8, 1))
_TINY = (Blocks(16, 16, 4, 1),)
# Of all batches: what CUDA's grids have along their second axis.
_MAX_HEADS = (1 << 16) - 1
# Programs for each multiprocessor that the gradient of a bias is divided among: many batches may share a small one.
_BIAS_PROGRAMS = 4


def unsupported(instruction: Instruction, attention: Attention) -> str:
    """Why the kernels cannot compute this call; "" when they can."""
    shapes = shapes_of(instruction)
    types = {shape.element_type for shape in shapes[:3]}
    if len(types) != 1 or not types <= _TYPES:
        names = ", ".join(sorted(element.name.lower() for element in types))
        return f"query, key and value must all be f16, bf16 or f32, not {names}"
    size = views_of(instruction, attention).sizes
    if max(size.D, size.E) > _MAX_CHANNELS:
        return f"{max(size.D, size.E)} channels are more than {_MAX_CHANNELS}"
    if 0 in (size.B, size.H, size.T, size.S):
        return "there is nothing to compute"
    if size.B * size.H > _MAX_HEADS:
        return f"{size.B * size.H} heads of all batches are more than {_MAX_HEADS}"
    if attention.mask is not None and attention.fill > _HIGHEST_FILL:
        return f"hidden logits are {attention.fill:g}, above {_HIGHEST_FILL:g}"
    if attention.mask is None and attention.hides() and not _rows_see_keys(attention, size.T, size.S):
        return "the band leaves a query no key"
    return ""


def unsupported_backward(instruction: Instruction, call: AttentionBackwardCall) -> str:
    """As ``unsupported``, of a backward call."""
    reason = unsupported(instruction, call.attention)
    if reason or call.bias_gradient is None:
        return reason
    if "s" not in call.bias_gradient:
        return "the gradient of the bias is summed over keys"
    if len(views_of(instruction, call.attention).shared(call.bias_gradient)) > 5:
        return f"the gradient of the bias is summed over every other dimension of {call.attention}"
    return ""


def _rows_see_keys(a: Attention, queries: int, keys: int) -> bool:
    upper = math.inf if a.upper is None else a.upper
    lower = math.inf if a.lower is None else a.lower
    return upper >= 0 and queries - 1 - lower <= keys - 1 and upper + lower >= 0


class _Launcher:
    """What both directions need: strides, sizes and the flags that the kernels are compiled for."""

    def __init__(self, instruction: Instruction, attention: Attention, blocks: Blocks, target: Target) -> None:
        self.attention, self.blocks = attention, blocks
        self.views: Views = views_of(instruction, attention)
        self.sizes = self.views.sizes
        has_mask = attention.mask is not None
        self.finite = math.isfinite(attention.fill) or not has_mask
        # Beside a bias of -infinity what a band hides may be no more than that, if it is what the program hides with.
        wholly = not math.isfinite(attention.fill) and (has_mask or attention.bias is not None)
        fill = -math.inf if wholly else max(attention.fill, _LOWEST_FILL)
        channels, value_channels = _power_of_two(self.sizes.D), _power_of_two(self.sizes.E)
        wide = shapes_of(instruction)[0].element_type is E.F32
        # The interpreter multiplies all of a float32.
        cut = attention.tensor_float and target.vendor != SIMULATED
        self.scale = attention.scale
        # Kernels take tanh of what they scale, or add logits in units of log2.
        cap = attention.cap
        scale = attention.scale * _LOG2E if cap is None else attention.scale / cap
        self.scalars = (scale, fill * _LOG2E, attention.upper or 0, attention.lower or 0)
        self.flags: dict[str, Any] = {
            "BLOCK_M": blocks.queries,
            "BLOCK_N": blocks.keys,
            "BLOCK_D": channels,
            "BLOCK_E": value_channels,
            "CAP": 0.0 if cap is None else cap * _LOG2E,
            "HAS_BIAS": attention.bias is not None,
            "HAS_MASK": has_mask,
            "HAS_UPPER": attention.upper is not None,
            "HAS_LOWER": attention.lower is not None,
            "FINITE_FILL": self.finite,
            "EVEN": (channels, value_channels) == (self.sizes.D, self.sizes.E),
            "PRECISION": "ieee" if wide and not cut else "tf32",
            "num_warps": blocks.warps,
            "num_stages": blocks.stages,
        }

    @property
    def counts(self) -> tuple[int, ...]:
        """The kernels' arguments H, G, T, S, D, E."""
        size = self.sizes
        return (size.H, size.group, size.T, size.S, size.D, size.E)

    def operands(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        a, views = self.attention, self.views
        return views.query(query, a.query), views.key(key, a.key), views.key(value, a.value, "e")

    def optional(self, rest: Sequence[Tensor], stand_in: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Bias and mask over [B, H, T, S] and sink over [B, H], broadcast dimensions at stride 0; ``stand_in`` for what
        is not there."""
        a, size, given = self.attention, self.sizes, iter(rest)
        nothing = stand_in.as_strided((1, 1, 1, 1), (0, 0, 0, 0))
        whole = (size.B, size.H, size.T, size.S)
        bias = self.views.logits(next(given), a.bias).expand(whole) if a.bias is not None else nothing
        mask = self.views.logits(next(given).view(torch.uint8), a.mask).expand(whole) if a.mask is not None else nothing
        sink = self.views.sink(next(given), a.sink) if a.sink is not None else stand_in.as_strided((1, 1), (0, 0))
        return bias, mask, sink


def _is_wide(*arrays: Tensor) -> bool:
    """Whether places within one batch and head of an array [B, H, ...] take more than 32 bits: the flag WIDE."""
    return launching.exceeds_32_bits(*arrays, since=2)


def _placed(result: Tensor, wanted: Tensor) -> Tensor:
    """``result`` where it is wanted."""
    return result if result is wanted else wanted.copy_(result)


def _power_of_two(size: int) -> int:
    return max(16, 1 << (size - 1).bit_length())


def _blocks(
    instruction: Instruction, attention: Attention, table: dict[int, tuple[Blocks, ...]], wide: tuple[Blocks, ...]
) -> tuple[Blocks, ...]:
    size = views_of(instruction, attention).sizes
    if max(size.T, size.S) <= 32:
        return _TINY
    if shapes_of(instruction)[0].element_type is E.F32:
        return wide
    return next(blocks for channels, blocks in table.items() if max(size.D, size.E) <= channels)


def forward_variants(instruction: Instruction, target: Target) -> tuple[Variant, ...]:
    call = AttentionCall.of(instruction)
    found = _blocks(instruction, call.attention, _FORWARD, _WIDE_FORWARD)
    return tuple(_variant(blocks, _forward(instruction, call, blocks, target), instruction) for blocks in found)


def _variant(blocks: Blocks, into: Kernel, instruction: Instruction) -> Variant:
    nowhere = [None for _ in leaves(instruction.shape)]
    return Variant(str(blocks), lambda run, *operands: into(run, nowhere, *operands), into)


def _forward(instruction: Instruction, call: AttentionCall, blocks: Blocks, target: Target) -> Kernel:
    from flagos_backend.kernels.triton import attention_kernels as kernels

    a = call.attention
    launch = _Launcher(instruction, a, blocks, target)
    size, views = launch.sizes, launch.views
    dtype = dtype_of(next(leaves(instruction.shape)).element_type)
    empty_rows = not launch.finite or a.bias is not None or a.sink is not None
    grid = (-(-size.T // blocks.queries), size.B * size.H)

    def run(
        _: Run, outputs: Sequence[Tensor | None], query: Tensor, key: Tensor, value: Tensor, *rest: Tensor
    ) -> Value:
        q, k, v = launch.operands(query, key, value)
        bias, mask, sink = launch.optional(rest, q)
        output = outputs[0] if outputs[0] is not None else views.new(a.output, dtype, q.device)
        written = views.query(output, a.output, "e")
        statistics = outputs[1] if call.statistics else None
        if statistics is None:
            statistics = torch.empty((size.B, size.H, size.T), dtype=torch.float32, device=q.device)
        launching.launch(
            kernels.attention_forward, grid,
            q, k, v, bias, mask, sink, written, statistics,
            *q.stride(), *k.stride(), *v.stride(), *bias.stride(), *mask.stride(), *sink.stride(),
            *written.stride(), *launch.counts, *launch.scalars, HAS_SINK=a.sink is not None, EMPTY_ROWS=empty_rows,
            WIDE=_is_wide(q, k, v, bias, mask, written), **launch.flags,
        )  # fmt: skip
        result = _placed(views.finish_query(output, written, a.output, "e"), output)
        return (result, statistics) if call.statistics else result

    return run


@dataclass(frozen=True, slots=True)
class _Division:
    """How programs divide the gradient of a bias: ``kept`` and ``summed`` are sizes of dimensions of batches and heads,
    as the kernel takes them."""

    grid: tuple[int, int, int]
    kept: tuple[int, int]
    summed: tuple[int, int, int]
    sums_queries: bool

    @property
    def parts(self) -> int:
        """Of each sum, which are added after the kernel."""
        return self.grid[2]


def _divided(views: Views, dims: str, flags: Mapping[str, Any], target: Target) -> _Division:
    size = views.sizes
    r0, k0, r1, k1, r2 = (*views.shared(dims), 1, 1, 1, 1)[:5]
    sums_queries = size.T > 1 and "t" not in dims
    of_queries, of_keys = -(-size.T // flags["BLOCK_M"]), -(-size.S // flags["BLOCK_N"])
    programs, terms = (of_keys, of_queries) if sums_queries else (of_queries * of_keys, 1)
    parts = min(r0 * r1 * r2 * terms, -(-_BIAS_PROGRAMS * target.multiprocessors // (programs * k0 * k1)))
    return _Division((programs, k0 * k1, parts), (k0, k1), (r0, r1, r2), sums_queries)


def backward_variants(instruction: Instruction, target: Target) -> tuple[Variant, ...]:
    call = AttentionBackwardCall.of(instruction)
    found = _blocks(instruction, call.attention, _BACKWARD, _WIDE_BACKWARD)
    return tuple(_variant(blocks, _backward(instruction, call, blocks, target), instruction) for blocks in found)


def _backward(instruction: Instruction, call: AttentionBackwardCall, blocks: Blocks, target: Target) -> Kernel:
    from flagos_backend.kernels.triton import attention_gradient_kernels as kernels

    a = call.attention
    launch = _Launcher(instruction, a, blocks, target)
    # The gradient of the query holds queries still and walks along the keys: its blocks are the others swapped.
    flags = {**launch.flags, "ADDED": a.added and launch.flags["HAS_MASK"]}
    swapped = {**flags, "BLOCK_M": blocks.keys, "BLOCK_N": blocks.queries}
    # That of a bias holds both still. Matrix units of NVIDIA's chips take 64 rows at once, if there are as many.
    upright = flags if blocks.queries >= blocks.keys else swapped
    size, views, wanted = launch.sizes, launch.views, call.wanted()
    types = {name: dtype_of(leaf.element_type) for name, leaf in zip(wanted, leaves(instruction.shape), strict=True)}
    heads = size.B * size.H

    def run(
        _: Run, outputs: Sequence[Tensor | None], query: Tensor, key: Tensor, value: Tensor, output: Tensor,
        statistics: Tensor, gradient: Tensor, *rest: Tensor,
    ) -> Value:  # fmt: skip
        given = dict(zip(wanted, outputs, strict=True))

        def place(name: str, other: str, like: Tensor) -> tuple[Tensor, str]:
            """One that nobody asked for comes out of the same kernel all the same, laid out as its operand."""
            dims, found = wanted.get(name, other), given.get(name)
            return (views.new(dims, types.get(name, like.dtype), like.device) if found is None else found), dims

        q, k, v = launch.operands(query, key, value)
        o, g = views.query(output, a.output, "e"), views.query(gradient, call.output_gradient, "e")
        g = g if g.dtype == v.dtype else g.to(v.dtype)
        bias, mask, sink = launch.optional(rest, q)
        delta = torch.empty((size.B, size.H, size.T), dtype=torch.float32, device=q.device)
        results: dict[str, Tensor] = {}
        dsink = delta
        if "sink" in wanted:
            of_sink, dims = place("sink", wanted["sink"], q)
            dsink = views.rows(of_sink, dims)
        launching.launch(
            kernels.attention_delta, (-(-size.T // 64), heads),
            o, g, statistics, sink, delta, dsink, *o.stride(), *g.stride(), *sink.stride(), *dsink.stride(),
            size.H, size.T, size.E, BLOCK_M=64, BLOCK_E=launch.flags["BLOCK_E"], HAS_SINK="sink" in wanted,
            WIDE=_is_wide(o, g, dsink), PRECISION=launch.flags["PRECISION"],
        )  # fmt: skip
        if "sink" in wanted:
            results["sink"] = _placed(views.finish_rows(of_sink, dsink, dims), of_sink)
        arrays = (q, k, v, bias, mask, g, statistics, delta)
        strides = (*q.stride(), *k.stride(), *v.stride(), *bias.stride(), *mask.stride(), *g.stride())
        wide = _is_wide(q, k, v, bias, mask, g)
        if "query" in wanted:
            whole, dims = place("query", a.query, q)
            dq = views.query(whole, dims)
            launching.launch(
                kernels.attention_query_gradient, (-(-size.T // blocks.keys), heads),
                *arrays, dq, *strides, *dq.stride(), *launch.counts, *launch.scalars, launch.scale,
                WIDE=wide or _is_wide(dq), **swapped,
            )  # fmt: skip
            results["query"] = _placed(views.finish_query(whole, dq, dims, "d"), whole)
        if "key" in wanted or "value" in wanted:
            dk_whole, dk_dims = place("key", a.key, k)
            dv_whole, dv_dims = place("value", a.value, v)
            dk, dv = views.key(dk_whole, dk_dims), views.key(dv_whole, dv_dims, "e")
            launching.launch(
                kernels.attention_key_gradient, (-(-size.S // blocks.keys), size.B * size.K),
                *arrays, dk, dv, *strides, *dk.stride(), *dv.stride(), *launch.counts, *launch.scalars, launch.scale,
                WIDE=wide or _is_wide(dk, dv), **flags,
            )  # fmt: skip
            results["key"] = _placed(views.finish_key(dk_whole, dk, dk_dims, "d"), dk_whole)
            results["value"] = _placed(views.finish_key(dv_whole, dv, dv_dims, "e"), dv_whole)
        if "bias" in wanted:
            whole, dims = place("bias", wanted["bias"], q)
            dbias, division = views.bias(whole, dims), _divided(views, dims, upright, target)
            partial = dbias[None]
            if division.parts > 1:
                partial = torch.empty((division.parts, *dbias.shape), dtype=torch.float32, device=q.device)
            launching.launch(
                kernels.attention_bias_gradient, division.grid,
                *arrays, partial, *strides, *partial.stride(), *launch.counts, *launch.scalars, *division.kept,
                *division.summed, SUMS_QUERIES=division.sums_queries, WIDE=wide, **upright,
            )  # fmt: skip
            if division.parts > 1:
                dbias.copy_(partial.sum(0))
            results["bias"] = _placed(views.finish_bias(whole, dbias, dims), whole)
        return tuple(results[name] for name in wanted)

    return run
