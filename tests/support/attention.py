"""Calls of flagos.attention to test kernels with, and what they must compute: dense einsums in float64, by autograd."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flagos_backend.ir.attributes import CustomCallAttributes
from flagos_backend.ir.builder import Builder
from flagos_backend.ir.custom_calls.attention import (
    BACKWARD,
    FORWARD,
    Attention,
    AttentionBackwardCall,
    AttentionCall,
    Views,
)
from flagos_backend.ir.hlo import Instruction
from flagos_backend.ir.opcode import Opcode
from flagos_backend.ir.types import ArrayShape, ElementType, TupleShape
from flagos_backend.kernels.reference.registry import Kernel, Run
from flagos_backend.kernels.reference.storage import dtype_of

E = ElementType
SIZES = {"b": 2, "c": 3, "h": 2, "g": 2, "t": 40, "s": 56, "d": 16, "e": 24}
_GROUPED: dict[str, Any] = {"query": "bthgd", "key": "bshd", "value": "bshe", "output": "bthge", "scale": 0.25}

#: Every feature alone and the combinations that meet in one place of a kernel.
CASES = {
    "plain": Attention(**_GROUPED),
    "causal": Attention(**_GROUPED, upper=0),
    "shifted diagonal": Attention(**_GROUPED, upper=5, fill=-1e10),
    "window": Attention(**_GROUPED, upper=0, lower=17),
    "lower band": Attention(**_GROUPED, lower=3),
    "bias": Attention(**_GROUPED, bias="hts"),
    "mask": Attention(**_GROUPED, mask="bs"),
    "mask, finite": Attention(**_GROUPED, mask="b1s", fill=-2.3e38),
    "mask, causal": Attention(**_GROUPED, mask="bts", upper=0, fill=-1e9),
    "mask, window": Attention(**_GROUPED, mask="bs", upper=1, lower=6, fill=-1e9),
    "added mask": Attention(**_GROUPED, mask="bs", fill=-1e9, added=True),
    "added mask, window": Attention(**_GROUPED, mask="bts", upper=3, lower=6, fill=-1e9, added=True),
    "bias, mask, causal": Attention(**_GROUPED, bias="hgts", mask="bhgts", upper=0),
    "cap": Attention(**_GROUPED, cap=1.5),
    "cap, causal": Attention(**_GROUPED, cap=0.7, upper=0),
    "cap, bias, mask, window": Attention(**_GROUPED, cap=2.0, bias="hts", mask="bs", upper=1, lower=6, fill=-1e9),
    "sink": Attention(**_GROUPED, sink="hg"),
    "sink, window": Attention(**_GROUPED, sink="bh", upper=0, lower=7),
    "sink, cap, bias, mask": Attention(**_GROUPED, sink="h", cap=1.5, bias="hts", mask="bts", fill=-1e9),
    "sink, mask": Attention(**_GROUPED, sink="ghb", mask="bs"),
    "other layouts": Attention("hbtd", "bhds", "sbhe", "bhet", 0.3, upper=0),
    "two batches": Attention("bchtd", "bchsd", "bchse", "bchte", 0.3, bias="chts"),
    "one key for all heads": Attention("bthd", "bs1d", "bs1e", "bthe", 0.3, mask="bh1s", upper=0),
    "one head": Attention("td", "sd", "se", "te"),
    "one query": Attention("b1hgd", "bshd", "bshe", "bhge", mask="bs"),
}

_BIASED = {**_GROUPED, "bias": "bhgts"}
_TWO_BATCHES = {"query": "bchtgd", "key": "bchsd", "value": "bchse", "output": "bchtge", "scale": 0.3, "bias": "bchgts"}
#: Gradients of biases: over which dimensions, the others of which are summed. One with what meets them in a kernel.
BIAS_GRADIENTS = {
    "of every batch and head": (Attention(**_BIASED), "bhgts"),
    "shared by batches": (Attention(**_BIASED), "1hgts"),
    "shared by heads": (Attention(**_BIASED), "bts"),
    "shared by all": (Attention(**_BIASED), "11ts"),
    "shared by groups": (Attention(**_BIASED), "bhts"),
    "shared by heads of a group": (Attention(**_BIASED), "gts"),
    "shared by heads between": (Attention(**_BIASED), "bgts"),
    "in another order": (Attention(**_BIASED), "sgth"),
    "of no query": (Attention(**_BIASED), "bh1s"),
    "of keys": (Attention(**_BIASED), "s"),
    "of keys, window": (Attention(**_BIASED, upper=2, lower=9), "hs"),
    "of keys, mask": (Attention(**_BIASED, mask="bts", upper=3, lower=6, fill=-1e9, added=True), "hs"),
    "two batches, one shared": (Attention(**_TWO_BATCHES), "bhts"),
    "two batches, the other shared": (Attention(**_TWO_BATCHES), "cgts"),
    "causal": (Attention(**_BIASED, upper=0), "hgts"),
    "window": (Attention(**_BIASED, upper=2, lower=9), "hgts"),
    "lower band": (Attention(**_BIASED, lower=3), "hgts"),
    "mask": (Attention(**_BIASED, mask="bs"), "hgts"),
    "mask, window": (Attention(**_BIASED, mask="bs", upper=1, lower=6, fill=-1e9), "hgts"),
    "added mask, window": (Attention(**_BIASED, mask="bts", upper=3, lower=6, fill=-1e9, added=True), "hgts"),
    "cap": (Attention(**_BIASED, cap=1.5, upper=0), "hgts"),
    "sink": (Attention(**_BIASED, sink="hg", upper=0), "hgts"),
    "without a bias": (Attention(**_GROUPED, upper=0), "hgts"),
    "other layouts": (Attention("hbtd", "bhds", "sbhe", "bhet", 0.3, bias="hst"), "hst"),
    "one head": (Attention("td", "sd", "se", "te", bias="ts"), "ts"),
    "one query": (Attention("b1hgd", "bshd", "bshe", "bhge", bias="hgs"), "hg1s"),
}


@dataclass(frozen=True)
class Problem:
    """``operands`` of the forward call, and the gradient of its output; ``calls``: forward, backward."""

    attention: Attention
    calls: tuple[Instruction, Instruction]
    operands: tuple[Tensor, ...]
    gradient: Tensor

    def forward(self, kernel: Kernel) -> tuple[Tensor, Tensor]:
        return kernel(Run(device=self.gradient.device), *self.operands)

    def backward(self, kernel: Kernel, output: Tensor, statistics: Tensor) -> tuple[Tensor, ...]:
        qkv, rest = self.operands[:3], self.operands[3:]
        return kernel(Run(device=self.gradient.device), *qkv, output, statistics, self.gradient, *rest)


def calls_of(
    attention: Attention,
    element: ElementType,
    sizes: dict[str, int],
    of_bias: str | None = None,
    tells_nan: bool = False,
) -> tuple[Instruction, Instruction]:
    """The forward call with statistics, which tell NaN if asked to, and the backward call that asks for every gradient,
    the sink's of each row and the bias's over the dimensions ``of_bias``, if not its own."""
    builder = Builder("attention")

    def shape(dims: str, of: ElementType = element) -> ArrayShape:
        return ArrayShape(of, tuple(1 if letter == "1" else sizes[letter] for letter in dims))

    qkv = [builder.parameter(shape(dims)) for dims in (attention.query, attention.key, attention.value)]
    rest = [builder.parameter(shape(attention.bias, E.F32))] if attention.bias is not None else []
    rest += [builder.parameter(shape(attention.mask, E.PRED))] if attention.mask is not None else []
    rest += [builder.parameter(shape(attention.sink, E.F32))] if attention.sink is not None else []
    dims = (attention.query, attention.key, attention.value)
    size = Views(attention, {d: p.shape.dims for d, p in zip(dims, qkv, strict=True)}).sizes
    statistics = ArrayShape(E.F64 if element is E.F64 else E.F32, (size.B, size.H, size.T))
    config = AttentionCall(attention, True, tells_nan).config()
    results = TupleShape((shape(attention.output), statistics))
    forward = builder.add(
        Opcode.CUSTOM_CALL, [*qkv, *rest], CustomCallAttributes(FORWARD, config), shape=results, name="forward"
    )
    gradient = builder.parameter(shape(attention.output))
    rows = None if attention.sink is None else "t" + attention.heads_of_query + attention.outer_batch
    of_bias = of_bias or attention.bias
    config = AttentionBackwardCall(attention, attention.output, *dims, rows, of_bias).config()
    arguments = [*qkv, builder.element(forward, 0), builder.element(forward, 1), gradient, *rest]
    others = [] if rows is None else [shape(rows, E.F32)]
    others += [] if of_bias is None else [shape(of_bias)]
    results = TupleShape((*(p.shape for p in qkv), *others))
    backward = builder.add(
        Opcode.CUSTOM_CALL, arguments, CustomCallAttributes(BACKWARD, config), shape=results, name="backward"
    )
    return forward, backward


def problem(
    attention: Attention,
    element: ElementType,
    seed: int,
    device: str = "cpu",
    sizes: dict[str, int] | None = None,
    hide_all: bool = False,
    of_bias: str | None = None,
    tells_nan: bool = False,
) -> Problem:
    """Random operands. ``hide_all``: the first of the mask's outermost dimension sees no key. ``of_bias``: the
    dimensions of the bias's gradient, if not its own. ``tells_nan``: as of the call."""
    generator = torch.Generator().manual_seed(seed)
    calls = calls_of(attention, element, sizes or SIZES, of_bias, tells_nan)

    def draw(shape: ArrayShape) -> Tensor:
        if shape.element_type is E.PRED:
            mask = torch.rand(shape.dims, generator=generator) < 0.7
            mask[..., 0] = True  # with a band of -infinity every row needs a key
            if hide_all:
                mask[0] = False
            return mask.to(device)
        return torch.randn(shape.dims, generator=generator).to(dtype_of(shape.element_type)).to(device)

    operands = tuple(draw(operand.shape) for operand in calls[0].operands)
    gradient = draw(ArrayShape(element, calls[0].shape.elements[0].dims))
    return Problem(attention, calls, operands, gradient)


def oracle(p: Problem) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, ...]]:
    """Output and statistics, then the gradients of query, key, value, sink and bias: float64, on the host."""
    a, of_bias = p.attention, AttentionBackwardCall.of(p.calls[1]).bias_gradient
    qkv = [x.detach().cpu().double().requires_grad_() for x in p.operands[:3]]
    rest = list(p.operands[3:])
    query, key, value = (
        x.squeeze([i for i, letter in enumerate(dims) if letter == "1"])
        for x, dims in zip(qkv, (a.query, a.key, a.value), strict=True)
    )
    q, k, v, out = (dims.replace("1", "") for dims in (a.query, a.key, a.value, a.output))
    whole = a.batch + a.groups + ("t" if "t" in q else "") + "s"
    logits = torch.einsum(f"{q},{k}->{whole}", query, key) * a.scale
    if a.cap is not None:
        logits = a.cap * torch.tanh(logits / a.cap)
    change = torch.zeros_like(logits, requires_grad=True)  # whose gradient is the bias's, before it is summed
    logits = logits + change
    if a.bias is not None:
        logits = logits + _placed(rest.pop(0).cpu().double(), a.bias, whole)
    visible = torch.ones_like(logits, dtype=torch.bool)
    if a.mask is not None:
        visible = visible & _placed(rest.pop(0).cpu(), a.mask, whole)
    s = torch.arange(logits.shape[-1])
    t = torch.arange(logits.shape[-2])[:, None] if "t" in q else torch.zeros((), dtype=torch.int64)
    if a.upper is not None:
        visible = visible & (s <= t + a.upper)
    if a.lower is not None:
        visible = visible & (s >= t - a.lower)
    hidden = torch.where(visible, logits, a.fill)
    # Nothing is left of a logit beside such a fill, though its gradient passes.
    logits = hidden.detach() + logits - logits.detach() if a.added else hidden
    keys, sink = logits.shape[-1], None
    if a.sink is not None:
        sink = _placed(rest.pop(0).cpu().double()[..., None], a.sink + "s", whole)
        sink = sink.expand(*logits.shape[:-1], 1).clone().requires_grad_()
        logits = torch.cat([logits, sink], -1)
    output = torch.einsum(f"{whole},{v}->{out}", torch.softmax(logits, -1)[..., :keys], value)
    output = output.reshape(p.gradient.shape)
    inputs = [*qkv, change] if sink is None else [*qkv, change, sink]
    found = torch.autograd.grad(output, inputs, p.gradient.cpu().double())
    gradients = found[:3]
    if a.sink is not None:
        rows = "t" + a.heads_of_query + a.outer_batch
        gradients = (*gradients, found[4][..., 0].permute([whole.index(letter) for letter in rows]))
    if of_bias is not None:
        summed = torch.einsum(f"{whole}->{of_bias.replace('1', '')}", found[3])
        gradients = (*gradients, summed.reshape(p.calls[1].shape.elements[-1].dims))
    statistics = torch.logsumexp(logits, -1).reshape(p.calls[0].shape.elements[1].dims)
    return (output.detach(), statistics.detach()), gradients


def assert_rows_without_a_key_are_zero(p: Problem, kernels: tuple[Kernel, Kernel], element: ElementType) -> None:
    """A caller that wants weights of zero in rows that see no key (the first batch), where a fill of -infinity leaves
    none, gives zeros as their output, statistics and upstream: nothing comes of them."""
    (output, statistics), gradients = oracle(p)
    ours = p.forward(kernels[0])
    assert output[0].isnan().all() and ours[0][0].isnan().all()
    for array in (*ours, p.gradient):
        array[0] = 0
    assert_close(ours[0][1:], output[1:], element)
    assert_close(ours[1][1:], statistics[1:], E.F64 if element is E.F64 else E.F32)
    for gradient, exact in zip(p.backward(kernels[1], *ours), gradients, strict=True):
        assert gradient[0].eq(0).all()
        assert_close(gradient[1:], exact[1:], element)


def assert_rows_of_infinities_are_zero(p: Problem, kernels: tuple[Kernel, Kernel], element: ElementType) -> None:
    """The same of rows (the first batch's) of which a bias makes every logit -infinity, as their statistics are: with
    zeros as output and statistics they have no gradients, whatever the upstream."""
    p.operands[3][0] = -torch.inf
    (output, statistics), gradients = oracle(p)
    ours = p.forward(kernels[0])
    assert output[0].isnan().all() and ours[0][0].isnan().all()
    assert ours[1][0].isneginf().all()
    for array in ours:
        array[0] = 0
    assert_close(ours[0][1:], output[1:], element)
    assert_close(ours[1][1:], statistics[1:], E.F64 if element is E.F64 else E.F32)
    for gradient, exact in zip(p.backward(kernels[1], *ours), gradients, strict=True):
        assert gradient[0].eq(0).all()
        assert_close(gradient[1:], exact[1:], element)


def _placed(tensor: Tensor, dims: str, whole: str) -> Tensor:
    """``tensor`` with its dimensions where ``whole`` has them, size one elsewhere."""
    tensor = tensor.squeeze([i for i, letter in enumerate(dims) if letter == "1"])
    kept = dims.replace("1", "")
    tensor = tensor.permute([kept.index(letter) for letter in whole if letter in kept])
    return tensor[tuple(slice(None) if letter in kept else None for letter in whole)]


#: What one rounding to the type, and a softmax and two products computed in f32, may differ from float64.
TOLERANCE = {E.F64: 1e-12, E.F32: 1e-5, E.F16: 1e-2, E.BF16: 5e-2}


def assert_close(ours: Tensor, exact: Tensor, element: ElementType, who: str = "") -> None:
    """Relative to the greatest magnitude of ``exact``; ``who`` computed it."""
    assert ours.shape == exact.shape
    exact, found = exact.double(), ours.detach().cpu().double()
    finite = exact[exact.isfinite() & (exact.abs() < 1e30)].abs()
    scale = max(1.0, float(finite.max())) if finite.numel() else 1.0
    atol = TOLERANCE[element] * scale
    torch.testing.assert_close(
        found, exact, rtol=1e-2, atol=atol, equal_nan=True, msg=lambda text: f"{who}: {text}" if who else text
    )


__all__ = [
    "BIAS_GRADIENTS",
    "CASES",
    "SIZES",
    "Problem",
    "assert_close",
    "assert_rows_of_infinities_are_zero",
    "assert_rows_without_a_key_are_zero",
    "calls_of",
    "oracle",
    "problem",
]
