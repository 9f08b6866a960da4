"""Top-k of rows: a row is read once, and ties go to the lower index without a second look. Where there are few rows,
programs share each, and a second launch chooses from what they found."""

from __future__ import annotations

from math import prod

from flagos_backend.devices.target import Target
from flagos_backend.ir.attributes import TopKAttributes
from flagos_backend.ir.hlo import Instruction
from flagos_backend.ir.types import ArrayShape, ElementType
from flagos_backend.kernels.implementation import Variant
from flagos_backend.kernels.reference.registry import Run
from flagos_backend.kernels.triton.launching import launch
from flagos_backend.process.torch_loading import Tensor, torch

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
# Where there are fewer rows than multiprocessors, a row of more blocks than this is shared out, into segments of no
# fewer blocks than _SEGMENT.
_SHORT_ROW, _SEGMENT = 8, 2


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
    return ""


def _blocks_of_segment(rows: int, size: int, target: Target) -> int:
    """How many blocks of a row a program walks."""
    blocks = -(-size // _BLOCK)
    if rows >= target.multiprocessors or blocks <= _SHORT_ROW:
        return blocks
    return max(_SEGMENT, -(-blocks * rows // target.multiprocessors))


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

    rows, size = prod(shape.dims[:-1]), shape.dims[-1]
    blocks = _blocks_of_segment(rows, size, target)
    segments = -(-size // (blocks * _BLOCK))
    kept = segments * flags["K"]
    # No more keys are loaded at once than there are.
    joined = {"K": flags["K"], "BLOCK": min(_BLOCK, 1 << (kept - 1).bit_length()), "num_warps": _WARPS}

    def run(_: Run, values: Tensor) -> tuple[Tensor, Tensor]:
        row_major = values.contiguous()
        best = torch.empty((*shape.dims[:-1], k), dtype=values.dtype, device=values.device)
        columns = torch.empty((*shape.dims[:-1], k), dtype=torch.int32, device=values.device)
        stored = _STORED.get(element.bits, values.dtype)
        given, chosen = row_major.view(stored), best.view(stored)
        if segments == 1:
            launch(kernels.top_k, (rows,), given, chosen, columns, size, k, **flags)
            return best, columns
        keys = torch.empty((rows, kept), dtype=torch.int64, device=values.device)
        launch(kernels.top_of_segments, (rows, segments), given, keys, size, blocks, **flags)
        launch(kernels.top_of_keys, (rows,), given, keys, chosen, columns, size, kept, k, **joined)
        return best, columns

    return (Variant("", run),)
