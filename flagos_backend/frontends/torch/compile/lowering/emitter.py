"""What rules emit with: the builder, and the few steps that nearly every operator needs."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from flagos_backend.frontends.torch.compile.dtypes import ELEMENT_TYPE, TORCH_DTYPE
from flagos_backend.frontends.torch.compile.errors import NoLoweringError
from flagos_backend.frontends.torch.compile.placement import computes_on_host
from flagos_backend.ir.attributes import CompareAttributes, DimensionsAttributes
from flagos_backend.ir.builder import Builder
from flagos_backend.ir.hlo import Computation, Instruction
from flagos_backend.ir.opcode import Comparison, Opcode
from flagos_backend.ir.types import ArrayShape, ElementType

# What floats are converted to as the host does.
_WHOLE = (ElementType.S8, ElementType.S16, ElementType.S32, ElementType.S64, ElementType.U8)


def array(instruction: Instruction) -> ArrayShape:
    """The shape of a tensor's instruction."""
    assert isinstance(instruction.shape, ArrayShape)
    return instruction.shape


def element_type(tensor: torch.Tensor) -> ElementType:
    """The element type of a node's tensor. Raises NoLoweringError where the IR has none."""
    kind = ELEMENT_TYPE.get(tensor.dtype)
    if kind is None:
        raise NoLoweringError(f"{tensor.dtype} has no element type")
    return kind


class Emitter:
    """Emits into one computation. Sizes are concrete. ``on_host``: whether it runs there. ``channels``: the process
    group of each collective's channel."""

    def __init__(self, builder: Builder) -> None:
        self.builder = builder
        self.on_host = True
        self.channels: dict[int, str] = {}
        self._combiners: dict[tuple[Opcode, ElementType], Computation] = {}

    def scalar(self, value: complex, kind: ElementType) -> Instruction:
        """Raises NoLoweringError when ``kind`` cannot hold ``value`` as PyTorch would."""
        try:
            if kind is ElementType.PRED:
                value = bool(value)
            return self.builder.scalar(value, kind)
        except (ValueError, OverflowError, KeyError) as error:
            raise NoLoweringError(str(error)) from None

    def refuse_overflow(self, value: complex, kind: ElementType) -> None:
        """Raises NoLoweringError for a number with which ATen refuses to fill 16-bit floats, as they cannot hold it."""
        half = kind in (ElementType.F16, ElementType.BF16) and isinstance(value, int | float)
        if half and torch.finfo(TORCH_DTYPE[kind]).max < abs(value) < float("inf"):
            raise NoLoweringError("ATen refuses a value out of range")

    def cast(self, operand: Instruction, result: torch.Tensor) -> Instruction:
        """``operand`` in the dtype of ``result``, as ATen converts there: 16-bit floats are made of float32, which
        doubles become first."""
        before, kind = array(operand).element_type, element_type(result)
        if before.is_float and kind.is_integer:
            return self._whole(operand, kind, result.device)
        if before is ElementType.F64 and kind in (ElementType.F16, ElementType.BF16):
            operand = self.convert(operand, ElementType.F32)
        return self.convert(operand, kind)

    def _whole(self, operand: Instruction, kind: ElementType, device: torch.device) -> Instruction:
        """Floats as integers. PyTorch leaves open what becomes of NaN and of what is out of range: on the host that is
        what the processor makes of it, the least 32-bit or 64-bit number, whose low bits the narrower types have."""
        if array(operand).element_type.bits < 16 or kind not in _WHOLE:
            raise NoLoweringError("conversions of these types are ATen's")
        if array(operand).element_type in (ElementType.F16, ElementType.BF16):
            operand = self.convert(operand, ElementType.F32)
        wide = ElementType.S64 if kind is ElementType.S64 else ElementType.S32
        whole = self.convert(operand, wide)
        if computes_on_host(device):
            shape, limit = array(operand), 2.0 ** (wide.bits - 1)
            bounds = ((Comparison.GE, -limit), (Comparison.LT, limit))
            tests = [
                self.builder.add(
                    Opcode.COMPARE,
                    [operand, self.operand(bound, shape.element_type, shape.dims)],
                    CompareAttributes(direction),
                )
                for direction, bound in bounds
            ]
            least = self.operand(-(1 << (wide.bits - 1)), wide, shape.dims)
            whole = self.add(Opcode.SELECT, self.add(Opcode.AND, *tests), whole, least)
        return self.convert(whole, kind)

    def convert(self, operand: Instruction, kind: ElementType) -> Instruction:
        return operand if array(operand).element_type is kind else self.builder.convert(operand, kind)

    def reshape(self, operand: Instruction, dims: Sequence[int]) -> Instruction:
        return operand if array(operand).dims == tuple(dims) else self.builder.reshape(operand, dims)

    def transpose(self, operand: Instruction, permutation: Sequence[int]) -> Instruction:
        """Dimension i of the result is dimension ``permutation[i]`` of ``operand``; two in a row become one."""
        if operand.opcode is Opcode.TRANSPOSE:
            inner = operand.attributes_as(DimensionsAttributes).dimensions
            return self.transpose(operand.operands[0], [inner[d] for d in permutation])
        if list(permutation) == list(range(len(permutation))):
            return operand
        return self.builder.add(Opcode.TRANSPOSE, [operand], DimensionsAttributes(tuple(permutation)))

    def expand(self, operand: Instruction, dims: Sequence[int]) -> Instruction:
        """``operand`` broadcast to ``dims`` by PyTorch's rule: aligned at the end, sizes of 1 repeat."""
        dims, own = tuple(dims), array(operand).dims
        if own == dims:
            return operand
        lead = len(dims) - len(own)
        kept = [d for d, size in enumerate(own) if size == dims[lead + d]]
        if len(kept) < len(own):
            operand = self.builder.reshape(operand, [own[d] for d in kept])
        return self.builder.broadcast(operand, dims, [lead + d for d in kept])

    def operand(self, value: Instruction | complex, kind: ElementType, dims: Sequence[int]) -> Instruction:
        """A tensor or number as an array of ``kind`` and ``dims``."""
        if isinstance(value, Instruction):
            return self.expand(self.convert(value, kind), dims)
        return self.expand(self.scalar(value, kind), dims)

    def add(self, opcode: Opcode, *operands: Instruction) -> Instruction:
        """An instruction without attributes."""
        return self.builder.add(opcode, operands)

    def channel(self, group: str) -> int:
        """A channel id of its own for one collective in the process group of this name."""
        self.channels[len(self.channels) + 1] = group
        return len(self.channels)

    def combiner(self, opcode: Opcode, kind: ElementType) -> Computation:
        """The computation of two scalars that a reduction combines with."""
        known = self._combiners.get((opcode, kind))
        if known is None:
            builder = Builder(f"{opcode.value}_{kind.name.lower()}")
            parameters = [builder.parameter(ArrayShape(kind), name) for name in ("lhs", "rhs")]
            known = self._combiners[opcode, kind] = builder.build(builder.add(opcode, parameters))
        return known
