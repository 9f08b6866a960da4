"""Convolution of every rank, type and window. Operands come into torch's layout (batch, feature, spatial...); what
torch.convolution cannot say (padding, reversal, groups over the batch) is done to the operands first."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod

from flagos_backend.ir.attributes import ConvolutionAttributes, WindowDimension
from flagos_backend.ir.custom_calls.weight_gradient import is_weight_gradient
from flagos_backend.ir.hlo import Instruction
from flagos_backend.ir.opcode import Opcode
from flagos_backend.ir.types import ArrayShape, ElementType
from flagos_backend.kernels.reference import integers, storage
from flagos_backend.kernels.reference.registry import Kernel, Run, Storage, kernel
from flagos_backend.kernels.reference.small_floats import decode, encode
from flagos_backend.process.torch_loading import Tensor, torch

# convolve(input [n, c, spatial...], weight [o, c / groups, spatial...]) -> [n, o, spatial...]
Convolve = Callable[[Tensor, Tensor], Tensor]
_HALF_FLOATS = frozenset({ElementType.F16, ElementType.BF16})

_TORCH_RANK_LIMIT = 3
_CHANNELS_LAST = {4: (torch.channels_last,), 5: (torch.channels_last_3d,)}


@dataclass(frozen=True, slots=True)
class Engine:
    """What convolves: a function of torch.convolution's arguments. ``transposes``: it knows transposed convolutions.
    ``half_floats``: it accumulates f16 and bf16 in f32 itself. ``backward``: as aten::convolution_backward, if it has
    that. ``multiply_integers``: as torch.matmul, of int64, right in the bits that the result has.
    """

    convolution: Callable[..., Tensor] = torch.convolution
    transposes: bool = True
    half_floats: bool = False
    backward: Callable[..., tuple[Tensor, ...]] | None = None
    multiply_integers: Callable[[Tensor, Tensor], Tensor] = torch.matmul

    def convolve(self, x: Tensor, weight: Tensor, *window: object) -> Tensor:
        """``window``: torch.convolution's arguments from the strides on."""
        return self.convolution(_in_format(x), _in_format(weight), None, *window)


@dataclass(frozen=True, slots=True)
class _Geometry:
    """The window in each spatial dimension, batch groups already taken out of it; ``counts``: the result's sizes."""

    window: tuple[WindowDimension, ...]
    groups: int
    counts: tuple[int, ...]

    @property
    def rank(self) -> int:
        return len(self.window)

    def field(self, name: str) -> list[int]:
        return [getattr(w, name) for w in self.window]

    def with_reversal(self, weight: Tensor, *, reversal: bool = True) -> Tensor:
        """The weight with the dimensions in reverse order in which the window has that ``reversal``."""
        dims = [d for d, w in enumerate(self.window, start=2) if w.window_reversal is reversal and w.size > 1]
        return weight.flip(dims) if dims else weight


def _in_format(x: Tensor) -> Tensor:
    """``x`` with the strides that its memory format gives also to dimensions of one element.

    PyTorch ignores those strides when it asks whether a tensor has a format, oneDNN computes with them: a grouped
    convolution of channels-last tensors is wrong where a kernel's came from a view (torch 2.13).
    """
    if 1 not in x.shape:
        return x
    for memory_format in (torch.contiguous_format, *_CHANNELS_LAST.get(x.dim(), ())):
        if x.is_contiguous(memory_format=memory_format):
            strides = torch.empty(x.shape, device="meta", memory_format=memory_format).stride()
            return x if strides == x.stride() else x.as_strided(x.shape, strides)
    return x  # the library brings it into a format


def _pad_spatial(x: Tensor, amounts: list[tuple[int, int]]) -> Tensor:
    """Zero-pads (crops, where negative) the trailing dimensions."""
    if not any(low or high for low, high in amounts):
        return x
    flat = [amount for pair in reversed(amounts) for amount in pair]
    return torch.constant_pad_nd(x, flat, 0)


def _dilate(x: Tensor, geometry: _Geometry) -> Tensor:
    """Puts zeros between elements by the base dilation."""
    dilations = geometry.field("base_dilation")
    if all(d == 1 for d in dilations):
        return x
    dims = [max((size - 1) * d + 1, 0) for size, d in zip(x.shape[2:], dilations, strict=True)]
    dilated = x.new_zeros((*x.shape[:2], *dims))
    dilated[(slice(None), slice(None), *(slice(None, None, d) for d in dilations))] = x
    return dilated


def _padded(x: Tensor, geometry: _Geometry) -> Tensor:
    return _pad_spatial(_dilate(x, geometry), [(w.padding_low, w.padding_high) for w in geometry.window])


def _by_torch(geometry: _Geometry, engine: Engine) -> Convolve:
    """floats, up to three spatial dimensions."""
    strides, dilations = geometry.field("stride"), geometry.field("window_dilation")
    zeros = [0] * geometry.rank
    symmetric = all(w.padding_low == w.padding_high >= 0 and w.base_dilation == 1 for w in geometry.window)

    def convolve(x: Tensor, weight: Tensor) -> Tensor:
        weight = geometry.with_reversal(weight)
        if symmetric:
            paddings = geometry.field("padding_low")
            return engine.convolve(x, weight, strides, paddings, dilations, False, zeros, geometry.groups)
        padded = _padded(x, geometry)
        return engine.convolve(padded, weight, strides, zeros, dilations, False, zeros, geometry.groups)

    return convolve


def _by_transposed_torch(geometry: _Geometry, engine: Engine) -> Convolve:
    """A dilated base under a window of stride 1 is torch's transposed convolution, which goes through the window in
    reverse; padded or cropped afterwards where that is not what its own padding says."""
    dilations, bases = geometry.field("window_dilation"), geometry.field("base_dilation")
    groups, zeros = geometry.groups, [0] * geometry.rank
    around = [
        (w.padding_low - (w.size - 1) * w.window_dilation, w.padding_high - (w.size - 1) * w.window_dilation)
        for w in geometry.window
    ]
    crops = [-low for low, _ in around]
    more = [high - low for low, high in around]
    own = all(
        crop >= 0 and 0 <= extra < max(base, dilation)
        for crop, extra, base, dilation in zip(crops, more, bases, dilations, strict=True)
    )

    def convolve(x: Tensor, weight: Tensor) -> Tensor:
        per_group = weight.reshape(groups, -1, *weight.shape[1:]).transpose(1, 2)
        with_reversal = geometry.with_reversal(per_group.reshape(x.shape[1], -1, *weight.shape[2:]), reversal=False)
        if own:
            return engine.convolve(x, with_reversal, bases, crops, dilations, True, more, groups)
        return _pad_spatial(engine.convolve(x, with_reversal, bases, zeros, dilations, True, zeros, groups), around)

    return convolve


def _by_weight_gradient(geometry: _Geometry, engine: Engine) -> Convolve:
    """The batch is what is summed over, and features of the input and of the result are those of the weight."""
    backward = engine.backward
    assert backward is not None
    strides, dilations = geometry.field("window_dilation"), geometry.field("stride")
    paddings, zeros = geometry.field("padding_low"), [0] * geometry.rank
    # Of a kernel of one point only every so many inputs count. Those are picked here: with strides, on one thread,
    # oneDNN writes outside of its memory (torch 2.13; AVX2, channels last).
    picks = paddings == zeros and all(count == 1 for count in geometry.counts) and strides != [1] * geometry.rank
    steps = [1] * geometry.rank if picks else strides

    def convolve(x: Tensor, weight: Tensor) -> Tensor:
        inputs, gradient = x.transpose(0, 1), geometry.with_reversal(weight).transpose(0, 1)
        if picks:
            spatial = zip(gradient.shape[2:], strides, strict=True)
            everything: list[slice] = [slice(None), slice(None)]
            inputs = inputs[tuple(everything + [slice(0, (size - 1) * step + 1, step) for size, step in spatial])]
        like = x.new_empty((gradient.shape[1], inputs.shape[1], *geometry.counts))
        wanted = (False, True, False)
        gradient, inputs = _in_format(gradient), _in_format(inputs)
        _, result, _ = backward(gradient, inputs, like, None, steps, paddings, dilations, False, zeros, 1, wanted)
        return result.transpose(0, 1)

    return convolve


def _by_patches(geometry: _Geometry, multiply: Callable[[Tensor, Tensor], Tensor]) -> Convolve:
    """Any rank and type: windows as one strided view, contracted by ``multiply``."""
    groups = geometry.groups

    def convolve(x: Tensor, weight: Tensor) -> Tensor:
        padded, weight = _padded(x, geometry).contiguous(), geometry.with_reversal(weight)
        counts, window_strides, element_strides = [], [], []
        for d, w in enumerate(geometry.window, start=2):
            extent = (w.size - 1) * w.window_dilation + 1
            counts.append((padded.shape[d] - extent) // w.stride + 1)
            window_strides.append(padded.stride(d) * w.stride)
            element_strides.append(padded.stride(d) * w.window_dilation)
        batch, features = padded.shape[:2]
        patches = padded.as_strided(
            (batch, *counts, features, *geometry.field("size")),
            (padded.stride(0), *window_strides, padded.stride(1), *element_strides),
        ).reshape(batch, prod(counts), groups, -1)
        columns = weight.reshape(groups, weight.shape[0] // groups, -1)
        products = multiply(columns, patches.permute(0, 2, 3, 1))  # [n, g, o / g, windows]
        return products.reshape(batch, weight.shape[0], *counts)

    return convolve


def _choose(geometry: _Geometry, spatial: Sequence[int], floating: bool, engine: Engine) -> Convolve:
    if not floating:
        return _by_patches(geometry, engine.multiply_integers)
    if geometry.rank > _TORCH_RANK_LIMIT:
        return _by_patches(geometry, torch.matmul)
    if engine.backward is not None and is_weight_gradient(geometry.window, geometry.counts, spatial, geometry.groups):
        return _by_weight_gradient(geometry, engine)
    spread = any(w.base_dilation > 1 for w in geometry.window) and all(w.stride == 1 for w in geometry.window)
    if spread and engine.transposes:
        return _by_transposed_torch(geometry, engine)
    return _by_torch(geometry, engine)


def _prepare_arithmetic(
    convolve: Callable[[bool], Convolve], lhs: ElementType, rhs: ElementType, result: ElementType, engine: Engine
) -> Convolve:
    """Wraps a convolution of torch numbers into one of storage values, in ``result``'s type."""
    dtype = storage.dtype_of(result)
    if result.is_complex:
        real = convolve(True)

        def complex_convolve(x: Tensor, weight: Tensor) -> Tensor:
            x, weight = x.to(dtype), weight.to(dtype)
            a, b, c, d = x.real.contiguous(), x.imag.contiguous(), weight.real.contiguous(), weight.imag.contiguous()
            return torch.complex(real(a, c) - real(b, d), real(a, d) + real(b, c))

        return complex_convolve
    if result.is_float:
        floating = convolve(True)
        if engine.half_floats and lhs is rhs is result and result in _HALF_FLOATS:
            return floating
        # Narrow types accumulate in f32 and round once.
        wide = torch.float64 if result is ElementType.F64 else torch.float32
        return lambda x, w: _rounded(floating(_decoded(x, lhs).to(wide), _decoded(w, rhs).to(wide)), result)
    if lhs.bits <= 16 and rhs.bits <= 16:
        exact = convolve(True)  # products under 2^32: f64 sums them exactly
        return lambda x, w: integers.narrowed(
            exact(integers.widened(x, lhs).double(), integers.widened(w, rhs).double()).to(torch.int64), result
        )
    wrapping = convolve(False)
    return lambda x, w: integers.narrowed(wrapping(integers.widened(x, lhs), integers.widened(w, rhs)), result)


def _decoded(x: Tensor, element_type: ElementType) -> Tensor:
    return decode(x, element_type) if element_type.is_float and element_type.bits <= 8 else x


def _rounded(x: Tensor, element_type: ElementType) -> Tensor:
    if element_type.bits <= 8:
        return encode(x, element_type)
    return x.to(storage.dtype_of(element_type))


@kernel(Opcode.CONVOLUTION, storage=Storage.FRESH)
def prepare_convolution(instruction: Instruction) -> Kernel:
    return prepare_with(instruction, Engine(backward=torch.ops.aten.convolution_backward))


def prepare_with(instruction: Instruction, engine: Engine) -> Kernel:
    """The kernel of a convolution whose products ``engine`` computes."""
    attributes = instruction.attributes_as(ConvolutionAttributes)
    lhs, rhs = (operand.shape for operand in instruction.operands)
    result = instruction.shape
    assert isinstance(lhs, ArrayShape)
    assert isinstance(rhs, ArrayShape)
    assert isinstance(result, ArrayShape)
    dtype = storage.dtype_of(result.element_type)
    if 0 in (result.num_elements, lhs.num_elements, rhs.num_elements):
        return lambda run, x, weight: torch.zeros(result.dims, dtype=dtype, device=x.device)
    # Without spatial dimensions: one of size 1.
    window = attributes.window or (WindowDimension(1),)
    batch_groups = attributes.batch_group_count
    groups = attributes.feature_group_count * batch_groups
    geometry = _Geometry(window, groups, tuple(result.dims[d] for d in attributes.output_spatial) or (1,))
    spatial = [lhs.dims[d] for d in attributes.input_spatial] or [1]
    convolve = _prepare_arithmetic(
        lambda floating: _choose(geometry, spatial, floating, engine),
        lhs.element_type,
        rhs.element_type,
        result.element_type,
        engine,
    )
    to_input = (attributes.input_batch, attributes.input_feature, *attributes.input_spatial)
    to_weight = (attributes.kernel_output_feature, attributes.kernel_input_feature, *attributes.kernel_spatial)
    produced = (attributes.output_batch, attributes.output_feature, *attributes.output_spatial)
    to_result = tuple(produced.index(d) for d in range(result.rank))
    flat = not attributes.window

    def run_convolution(_: Run, x: Tensor, weight: Tensor) -> Tensor:
        x, weight = x.permute(to_input), weight.permute(to_weight)
        if flat:
            x, weight = x.unsqueeze(2), weight.unsqueeze(2)
        if batch_groups > 1:  # a group of the batch becomes a group of features
            x = x.reshape(batch_groups, -1, *x.shape[1:]).transpose(0, 1).flatten(1, 2)
        y = convolve(x, weight)
        return (y.squeeze(2) if flat else y).permute(to_result)

    return run_convolution
