"""Products of signed bytes through ATen's, which matrix units compute: operands are laid out and filled up as those
want them. Used by dot.py and table.py."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from flagos_backend.devices.target import Target
from flagos_backend.ir.hlo import Instruction
from flagos_backend.ir.types import ArrayShape, ElementType, Shape, leaves
from flagos_backend.kernels.contraction import Contraction
from flagos_backend.kernels.implementation import Variant
from flagos_backend.kernels.reference.conversion import converter
from flagos_backend.kernels.reference.registry import Kernel
from flagos_backend.kernels.triton import byte_transposes, launching
from flagos_backend.process.torch_loading import Tensor, torch

E = ElementType
# CUDA's product wants more than 16 rows, and multiples of eight of the other sizes; sixteen are what is loaded at once.
_FEWEST_ROWS, _FILLED_ROWS, _MULTIPLE, _FILLED_MULTIPLE = 17, 32, 8, 16
# As operands lie, cuBLAS 13 takes some products of other sizes and refuses some (48 columns of 80, not 64 of 80).
_AS_THEY_LIE = 64
# Each matrix of a batch is a product of its own.
_MAX_BATCH = 4
# Sums of more products may not fit 32 bits.
_MAX_CONTRACTED = 1 << 16
Product = Callable[[Tensor, Tensor], Tensor]
# Of a matrix, and the sizes it gets.
_LayOut = Callable[[Tensor, int, int], Tensor]


def unsupported(instruction: Instruction, contraction: Contraction, target: Target) -> str:
    """Why a dot cannot be computed so, or ""."""
    operands = [operand.shape for operand in instruction.operands]
    if any(not isinstance(shape, ArrayShape) or shape.element_type is not E.S8 for shape in operands):
        return "its operands are not both s8"
    if contraction.batch is not None and contraction.batch > _MAX_BATCH:
        return f"it is more than {_MAX_BATCH} products"
    if contraction.contracted > _MAX_CONTRACTED:
        return "its sums may not fit 32 bits"
    return _unsupported(operands, target)


def call_unsupported(instruction: Instruction, target: Target) -> str:
    """Why ``aten::_int_mm`` is left to ATen, or ""."""
    return "the host has no vendor" if target.is_host else _unsupported([o.shape for o in instruction.operands], target)


def _unsupported(operands: Sequence[Shape], target: Target) -> str:
    if any(shape.num_elements == 0 for operand in operands for shape in leaves(operand)):
        return "there is nothing to compute"
    return "" if _has_product(target.device_type) else f"ATen has no product of bytes for {target.device_type}"


def _has_product(device_type: str) -> bool:
    try:
        key = torch._C._dispatch_key_for_device(device_type)
    except RuntimeError:  # a device that torch does not know, or not by this name
        return False
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key("aten::_int_mm", key))


def call_variants(instruction: Instruction, target: Target) -> tuple[Variant, ...]:
    ((contracted, columns),) = (shape.dims for shape in leaves(instruction.operands[1].shape))
    return variants(lambda product: lambda run, a, b: product(a, b), None, contracted, columns, E.S32, target)


def variants(
    kernel_of: Callable[[Product], Kernel],
    batch: int | None,
    contracted: int,
    columns: int,
    result: ElementType,
    target: Target,
) -> tuple[Variant, ...]:
    """The best guess first. Matrix units of some devices read bytes only with the contracted dimension last: then
    laying out the second operand so is less than what its product takes as it lies, unless there are few rows."""
    give = converter(E.S32, result) or (lambda x: x)

    def of_matrices(a: Tensor, b: Tensor, lay_out: _LayOut) -> Tensor:
        rows, filled = a.shape[0], (_filled(contracted), _filled(columns))
        a = _padded(a, _FILLED_ROWS if rows < _FEWEST_ROWS else rows, filled[0])
        return torch._int_mm(a.contiguous(), lay_out(b, *filled))[:rows, :columns].contiguous()

    def product(lay_out: _LayOut) -> Product:
        if batch is None:
            return lambda a, b: give(of_matrices(a, b, lay_out))
        return lambda a, b: give(torch.stack([of_matrices(x, y, lay_out) for x, y in zip(a, b, strict=True)]))

    def warm_up() -> None:
        nowhere = torch.empty((contracted, columns), dtype=torch.int8, device="meta")
        byte_transposes.by_columns(nowhere, _filled(contracted), _filled(columns))

    if launching.unavailable(target):
        last = Variant("bytes, contracted last", kernel_of(product(_by_columns)))
    else:
        last = Variant("bytes, contracted last", kernel_of(product(byte_transposes.by_columns)), warm_up=warm_up)
    if contracted % _AS_THEY_LIE or columns % _AS_THEY_LIE:
        return (last,)
    return (last, Variant("bytes", kernel_of(product(_padded))))


def _filled(size: int) -> int:
    """A size that the product takes. Zeros around matrices add nothing to what is kept of it."""
    return -(-size // _FILLED_MULTIPLE) * _FILLED_MULTIPLE if size % _MULTIPLE else size


def _padded(matrix: Tensor, rows: int, columns: int) -> Tensor:
    if matrix.shape == (rows, columns):
        return matrix
    return torch.constant_pad_nd(matrix, (0, columns - matrix.shape[1], 0, rows - matrix.shape[0]))


def _by_columns(matrix: Tensor, rows: int, columns: int) -> Tensor:
    return _padded(matrix, rows, columns).mT.contiguous().mT
