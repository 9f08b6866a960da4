"""Complex numbers as pairs of floats: rotary embeddings become real instructions, which fuse on every device."""

from __future__ import annotations

import torch

from flagos_backend.frontends.torch.compile.errors import NoLoweringError
from flagos_backend.frontends.torch.compile.lowering.emitter import Emitter, array, element_type
from flagos_backend.frontends.torch.compile.lowering.table import lowering
from flagos_backend.ir.attributes import DimensionAttributes, SliceAttributes
from flagos_backend.ir.hlo import Instruction
from flagos_backend.ir.opcode import Opcode
from flagos_backend.ir.types import ElementType

aten = torch.ops.aten

#: The element types of complex numbers that the IR has, by that of their parts.
_COMPLEX_OF = {ElementType.F32: ElementType.C64, ElementType.F64: ElementType.C128}


def parts(emitter: Emitter, x: Instruction) -> tuple[Instruction, Instruction]:
    """The real and the imaginary part; those that ``x`` is made of where it is made of two."""
    if x.opcode is Opcode.COMPLEX:
        real, imaginary = x.operands
        return real, imaginary
    return emitter.add(Opcode.REAL, x), emitter.add(Opcode.IMAG, x)


@lowering(aten.complex.default)
def _complex(emitter: Emitter, result: torch.Tensor, real: Instruction, imaginary: Instruction) -> Instruction:
    kind = array(real).element_type
    if array(imaginary).element_type is not kind or kind not in _COMPLEX_OF:
        raise NoLoweringError("complex numbers of 16-bit floats are ATen's")
    return emitter.add(Opcode.COMPLEX, *(emitter.expand(part, tuple(result.shape)) for part in (real, imaginary)))


@lowering(aten.view_as_complex.default)
def _view_as_complex(emitter: Emitter, result: torch.Tensor, x: Instruction) -> Instruction:
    if array(x).element_type not in _COMPLEX_OF:
        raise NoLoweringError("complex numbers of 16-bit floats are ATen's")
    dims = array(x).dims
    lead = len(dims) - 1

    def part(number: int) -> Instruction:
        cut = SliceAttributes((0,) * lead + (number,), (*dims[:-1], number + 1), (1,) * len(dims))
        return emitter.reshape(emitter.builder.add(Opcode.SLICE, [x], cut), dims[:-1])

    return emitter.add(Opcode.COMPLEX, part(0), part(1))


@lowering(aten.view_as_real.default)
def _view_as_real(emitter: Emitter, result: torch.Tensor, x: Instruction) -> Instruction:
    element_type(result)
    dims = array(x).dims
    pair = [emitter.reshape(part, (*dims, 1)) for part in parts(emitter, x)]
    return emitter.builder.add(Opcode.CONCATENATE, pair, DimensionAttributes(len(dims)))


def multiply(emitter: Emitter, result: torch.Tensor, x: Instruction, y: Instruction) -> Instruction:
    """The product of two tensors of complex numbers, rounded as ATen's: each of four products, and two sums."""
    kind, dims = element_type(result), tuple(result.shape)
    if any(array(operand).element_type is not kind for operand in (x, y)):
        raise NoLoweringError("products of real and complex numbers are ATen's")
    (a, b), (c, d) = ([emitter.expand(part, dims) for part in parts(emitter, operand)] for operand in (x, y))

    def product(left: Instruction, right: Instruction) -> Instruction:
        return emitter.add(Opcode.MULTIPLY, left, right)

    real = emitter.add(Opcode.SUBTRACT, product(a, c), product(b, d))
    return emitter.add(Opcode.COMPLEX, real, emitter.add(Opcode.ADD, product(a, d), product(b, c)))
