"""Top-k of many rows: the row is read once, and ties go to the lower index without a second look."""

from __future__ import annotations

from math import prod

from flagos_backend.devices.target import Target
from flagos_backend.ir.attributes import TopKAttributes
from flagos_backend.ir.hlo import Instruction
from flagos_backend.ir.types import ArrayShape, ElementType
from flagos_backend.kernels.implementation import Variant
from flagos_backend.kernels.reference.registry import Run
from flagos_backend.kernels.triton.launching import launch
from flagos_backend.torch_loading import Tensor, torch

E = ElementType
_FLOATS = frozenset({E.F32, E.F16, E.BF16})
_UNSIGNED = frozenset({E.U16, E.U32})
_SIGNED = frozenset({E.S8, E.S16, E.S32, E.U8})
_STORED = {16: torch.int16, 32: torch.int32}
# Beyond this the network that chooses from a block is most of a sort.
_MAX_K = 64
_BLOCK = 1024
# Kernels count columns in 32 bits, up to where a block after the last one would begin.
_LONGEST_ROW = (1 << 31) - _BLOCK
_WARPS = 4
# A program walks a row alone: fewer rows than there are multiprocessors, of more blocks than this, leave them idle.
_SHORT_ROW = 8


def _operand(instruction: Instruction) -> ArrayShape:
    shape = instruction.operands[0].shape
    assert isinstance(shape, ArrayShape)
    return shape


def unsupported(instruction: Instruction, target: Target) -> str:
    """Why not, or "". Cheap: no device is asked."""
    shape, k = _operand(instruction), instruction.attributes_as(TopKAttributes).k
    if shape.element_type not in _FLOATS | _UNSIGNED | _SIGNED:
        return f"it does not order {shape.element_type.name.lower()}"
    if not 0 < k <= _MAX_K:
        return f"it keeps up to {_MAX_K}"
    if shape.num_elements == 0 or shape.dims[-1] > _LONGEST_ROW:
        return f"it walks rows of 1 to {_LONGEST_ROW} elements"
    if prod(shape.dims[:-1]) < target.multiprocessors and shape.dims[-1] > _SHORT_ROW * _BLOCK:
        return "there are too few rows"
    return ""


def variants(instruction: Instruction, target: Target) -> tuple[Variant, ...]:
    """values [..., n] to the k best [..., k] in total order, and where they are, s32."""
    from flagos_backend.kernels.triton import top_k_kernels as kernels

    shape, attributes = _operand(instruction), instruction.attributes_as(TopKAttributes)
    element, k = shape.element_type, attributes.k
    flags = {
        "K": 1 << max(k - 1, 1).bit_length(),
        "BLOCK": _BLOCK,
        "BITS": element.bits,
        "IS_FLOAT": element in _FLOATS,
        "IS_UNSIGNED": element in _UNSIGNED,
        "LARGEST": attributes.largest,
        "num_warps": _WARPS,
    }

    def run(_: Run, values: Tensor) -> tuple[Tensor, Tensor]:
        row_major = values.contiguous()
        best = torch.empty((*shape.dims[:-1], k), dtype=values.dtype, device=values.device)
        columns = torch.empty((*shape.dims[:-1], k), dtype=torch.int32, device=values.device)
        stored = _STORED.get(element.bits, values.dtype)
        rows = prod(shape.dims[:-1])
        arrays = (row_major.view(stored), best.view(stored), columns)
        launch(kernels.top_k, (rows,), *arrays, shape.dims[-1], k, **flags)
        return best, columns

    return (Variant("", run),)
