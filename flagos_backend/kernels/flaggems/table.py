"""What FlagGems computes, read by kernels/choice.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flagos_backend.devices.target import Target
from flagos_backend.ir.attributes import ConvolutionAttributes, CustomCallAttributes
from flagos_backend.ir.custom_calls.attention import FORWARD, AttentionCall
from flagos_backend.ir.hlo import Instruction
from flagos_backend.ir.opcode import Opcode
from flagos_backend.ir.types import ArrayShape, ElementType, leaves
from flagos_backend.kernels.contraction import contraction_of
from flagos_backend.kernels.flaggems import guards, loading
from flagos_backend.kernels.implementation import Implementation, Provider, Variant
from flagos_backend.kernels.reference.aten import draws, prepare_operator
from flagos_backend.kernels.reference.attention import shapes_of, views_of
from flagos_backend.kernels.reference.convolution import Engine, prepare_with
from flagos_backend.kernels.reference.registry import Kernel, Run, Value
from flagos_backend.kernels.reference.storage import dtype_of
from flagos_backend.kernels.triton import interpreter
from flagos_backend.process.torch_loading import Tensor, torch

E = ElementType


# ---- ATen's operators, which keep their names and arguments ----


def _aten_name(instruction: Instruction) -> str:
    """FlagGems' key of an operator: without the overload ``default``."""
    name = instruction.attributes_as(CustomCallAttributes).target.removeprefix("aten::")
    return name.removesuffix(".default")


def _unavailable(instruction: Instruction, target: Target) -> str:
    return loading.unavailable(target) or interpreter.refuses(instruction, target)


def _aten_unsupported(instruction: Instruction, target: Target) -> str:
    reason = _unavailable(instruction, target)
    if reason:
        return reason
    name = _aten_name(instruction)
    if instruction.attributes_as(CustomCallAttributes).has_side_effect:
        return "it has a side effect"
    if not loading.has(name):
        return f"FlagGems has no {name}"
    return guards.refuses(name, instruction)


def _aten_variants(instruction: Instruction, target: Target) -> tuple[Variant, ...]:
    name = _aten_name(instruction)
    function = guards.adapted(name, loading.function(name))
    return _variant(_shaped(prepare_operator(instruction, function), instruction))


def _variant(kernel: Kernel) -> tuple[Variant, ...]:
    return (Variant("", kernel, warm_up=loading.load),)


def _shaped(kernel: Kernel, instruction: Instruction) -> Kernel:
    """``kernel`` with results of the sizes that ATen gives: statistics of norms come without their ones."""
    dims = [leaf.dims for leaf in leaves(instruction.shape)]
    if isinstance(instruction.shape, ArrayShape):
        return lambda run, *operands: kernel(run, *operands).reshape(dims[0])
    return lambda run, *operands: tuple(x.reshape(d) for x, d in zip(kernel(run, *operands), dims, strict=True))


# ---- HLO's dot and convolution ----


def _result(instruction: Instruction) -> ArrayShape:
    assert isinstance(instruction.shape, ArrayShape)
    return instruction.shape


def _dot_unsupported(instruction: Instruction, target: Target) -> str:
    shapes = (*shapes_of(instruction), _result(instruction))
    if len({shape.element_type for shape in shapes}) != 1:
        return "FlagGems' products keep the type of their operands"
    name = "mm" if contraction_of(instruction).batch is None else "bmm"
    return _unavailable(instruction, target) or guards.refuses(name, instruction)


def _dot_variants(instruction: Instruction, target: Target) -> tuple[Variant, ...]:
    contraction = contraction_of(instruction)
    product = guards.contiguous(loading.function("mm" if contraction.batch is None else "bmm"))

    def run(_: Run, lhs: Tensor, rhs: Tensor) -> Tensor:
        return contraction.finish(product(*contraction.arrange(lhs, rhs)))

    return _variant(run)


_CONVOLUTIONS = {1: "conv1d", 2: "conv2d", 3: "conv3d"}


def _convolution_unsupported(instruction: Instruction, target: Target) -> str:
    a = instruction.attributes_as(ConvolutionAttributes)
    if len(a.window) not in _CONVOLUTIONS:
        return f"FlagGems convolves over 1 to 3 dimensions, not {len(a.window)}"
    if any(shape.element_type is E.F64 for shape in shapes_of(instruction)):
        return "FlagGems' convolution computes f64 in f32"
    return _unavailable(instruction, target) or guards.refuses("convolution", instruction)


def _convolution_variants(instruction: Instruction, target: Target) -> tuple[Variant, ...]:
    name = _CONVOLUTIONS[len(instruction.attributes_as(ConvolutionAttributes).window)]
    function = guards.contiguous(lambda *args: getattr(loading.load().ops, name)(*args))

    def convolution(
        x: Tensor, weight: Tensor, bias: None, stride: Any, padding: Any, dilation: Any, *rest: Any
    ) -> Tensor:
        _transposed, _output_padding, groups = rest
        result: Tensor = function(x, weight, bias, stride, padding, dilation, groups)
        return result

    return _variant(prepare_with(instruction, Engine(convolution, transposes=False, half_floats=True)))


# ---- attention ----

# On an H100, causal rows of a last block that is not full come out wrong, and so does the variant that splits the keys
# (disable_splitkv below); both at any number of heads.
_CAUSAL_MULTIPLE = 128
_CHANNELS = frozenset({32, 64, 96, 128, 192, 256})


def _attention_unsupported(instruction: Instruction, target: Target) -> str:
    a = AttentionCall.of(instruction).attention
    size = views_of(instruction, a).sizes
    types = {shape.element_type for shape in shapes_of(instruction)[:3]}
    if len(types) != 1 or not types <= {E.F16, E.BF16}:
        return "FlagGems' attention takes f16 or bf16"
    if a.cap is not None:
        return "FlagGems' attention has no soft cap of logits"
    if a.sink is not None:
        return "FlagGems' attention has no sink of logits"
    if a.bias is not None or a.mask is not None or a.lower is not None:
        return "FlagGems' attention has no bias, mask or lower band"
    if a.upper is not None and (a.upper != 0 or size.T != size.S):
        return "FlagGems' causal mask is aligned to the last key"
    if a.upper is not None and size.T % _CAUSAL_MULTIPLE:
        return f"FlagGems' causal attention is wrong for lengths that are no multiple of {_CAUSAL_MULTIPLE}"
    if size.D != size.E or size.D not in _CHANNELS:
        return f"FlagGems' attention has no kernel for {size.D} and {size.E} channels"
    if a.scale == 0:
        return "FlagGems takes a scale of 0 for none"
    return _unavailable(instruction, target) or guards.refuses("_flash_attention_forward", instruction)


def _attention_variants(instruction: Instruction, target: Target) -> tuple[Variant, ...]:
    call = AttentionCall.of(instruction)
    a, views = call.attention, views_of(instruction, call.attention)
    compute: Callable[..., Any] = guards.contiguous(loading.function("_flash_attention_forward"))
    first = instruction.shape if isinstance(instruction.shape, ArrayShape) else instruction.shape.elements[0]
    assert isinstance(first, ArrayShape)
    dtype = dtype_of(first.element_type)

    def run(_: Run, query: Tensor, key: Tensor, value: Tensor) -> Value:
        q, k, v = views.query(query, a.query), views.key(key, a.key), views.key(value, a.value, "e")
        output, statistics, *_rest = compute(
            *(x.transpose(1, 2) for x in (q, k, v)), None, None, q.shape[2], k.shape[2], 0.0,
            a.upper is not None, False, scale=a.scale, disable_splitkv=True,
        )  # fmt: skip
        result = views.like_query(output.transpose(1, 2).to(dtype), a.output, "e")
        return (result, statistics.to(torch.float32)) if call.statistics else result

    return _variant(run)


# Their kernels choose among a dozen configurations and more by measuring each, anew for each shape: a variance of a
# matrix took twelve seconds.
_TUNED = frozenset(
    {
        *("mm", "bmm", "addmm", "baddbmm", "addmv", "mv"),
        *("convolution", "conv1d", "conv2d", "conv3d", "native_layer_norm_backward"),
        *("argmin", "kron", "masked_select", "nonzero", "var", "var_mean", "vstack"),
    }
)


def _aten_tunes_itself(instruction: Instruction) -> bool:
    return _aten_name(instruction).partition(".")[0] in _TUNED


def _aten_is_checked(instruction: Instruction) -> bool:
    return not draws(instruction)


def _always(instruction: Instruction) -> bool:
    return True


_FLAGOS = Provider.FLAGOS
IMPLEMENTATIONS: tuple[tuple[str, Implementation], ...] = (
    (
        "aten::*",
        Implementation(
            "aten",
            _FLAGOS,
            _aten_unsupported,
            _aten_variants,
            tunes_itself=_aten_tunes_itself,
            is_checked=_aten_is_checked,
        ),
    ),
    (str(Opcode.DOT), Implementation("dot", _FLAGOS, _dot_unsupported, _dot_variants, tunes_itself=_always)),
    (
        str(Opcode.CONVOLUTION),
        Implementation("convolution", _FLAGOS, _convolution_unsupported, _convolution_variants, tunes_itself=_always),
    ),
    (
        FORWARD,
        Implementation("attention", _FLAGOS, _attention_unsupported, _attention_variants, tunes_itself=_always),
    ),
)
