"""Small products as one launch (dot_kernels.py). Libraries divide the contracted dimension of such a product among
multiprocessors and add up the parts by a second kernel, which takes longer than the product."""

from __future__ import annotations

from collections.abc import Sequence

from flagos_backend.devices.target import Target
from flagos_backend.ir.attributes import DotAttributes
from flagos_backend.ir.hlo import Instruction
from flagos_backend.ir.types import ArrayShape, ElementType
from flagos_backend.kernels.contraction import Contraction, contraction_of, element_types
from flagos_backend.kernels.implementation import Variant
from flagos_backend.kernels.reference.registry import Run, Value
from flagos_backend.kernels.reference.storage import dtype_of
from flagos_backend.kernels.triton.launching import exceeds_32_bits, launch
from flagos_backend.process.torch_loading import Tensor, torch

E = ElementType
_HALF_FLOATS = frozenset({E.F16, E.BF16})
# Multiplications of one matrix and of all: beyond these the library's tiles are the faster ones.
_MAX_MACS, _MAX_ALL_MACS = 1 << 24, 1 << 27
# Sizes of tiles: what matrix units take at least, and what few warps hold.
_LEAST, _MOST_FREE, _MOST_CONTRACTED = 16, 64, 128
_STAGES = 3


def unsupported(instruction: Instruction) -> str:
    """Why the kernel cannot compute this dot, or would not be faster; "" otherwise."""
    lhs, rhs, result = element_types(instruction)
    if lhs is not rhs or not ((lhs in _HALF_FLOATS and result in (lhs, E.F32)) or (lhs is result is E.F32)):
        return "our products are those of f32, f16 and bf16"
    sizes = contraction_of(instruction)
    macs = sizes.rows * sizes.columns * sizes.contracted
    if not macs or not (sizes.batch is None or sizes.batch):
        return "it has no elements"
    if macs > _MAX_MACS or macs * (sizes.batch or 1) > _MAX_ALL_MACS:
        return "it is no small product"
    return ""


def variants(instruction: Instruction, target: Target) -> tuple[Variant, ...]:
    contraction = contraction_of(instruction)
    shape = instruction.shape
    assert isinstance(shape, ArrayShape)
    rounds = instruction.attributes_as(DotAttributes).allows_tensor_float and target.facts.tensor_float
    tile = _tile(contraction, target)
    dtype, precision = dtype_of(shape.element_type), "tf32" if rounds else "ieee"

    def into(run: Run, outputs: Sequence[Tensor | None], lhs: Tensor, rhs: Tensor) -> Value:
        (output,) = outputs
        result = torch.empty(shape.dims, dtype=dtype, device=lhs.device) if output is None else output
        _multiply(contraction, tile, precision, lhs, rhs, result)
        return result

    def kernel(run: Run, lhs: Tensor, rhs: Tensor) -> Value:
        return into(run, (None,), lhs, rhs)

    return (Variant("", kernel, into),)


def _tile(contraction: Contraction, target: Target) -> tuple[int, int, int]:
    """Rows, columns and contracted positions at a time: as few as keep all multiprocessors busy."""

    def power(size: int, most: int) -> int:
        return min(max(1 << (size - 1).bit_length(), _LEAST), most)

    rows, columns = power(contraction.rows, _MOST_FREE), power(contraction.columns, _MOST_FREE)
    while max(rows, columns) > _LEAST and _programs(contraction, rows, columns) < target.multiprocessors:
        rows, columns = (rows // 2, columns) if rows > columns else (rows, columns // 2)
    return rows, columns, power(contraction.contracted, _MOST_CONTRACTED)


def _programs(contraction: Contraction, rows: int, columns: int) -> int:
    return (contraction.batch or 1) * -(-contraction.rows // rows) * -(-contraction.columns // columns)


def _multiply(
    contraction: Contraction, tile: tuple[int, int, int], precision: str, lhs: Tensor, rhs: Tensor, result: Tensor
) -> None:
    from flagos_backend.kernels.triton import dot_kernels  # imports Triton

    left, right = contraction.arrange(lhs, rhs)
    rows, columns, contracted = tile
    sizes = {"M": contraction.rows, "N": contraction.columns, "K": contraction.contracted}
    lead_left, lead_right = (0, 0) if contraction.batch is None else (left.stride(0), right.stride(0))
    strides = {
        "LB": lead_left, "LM": left.stride(-2), "LK": left.stride(-1),
        "RB": lead_right, "RK": right.stride(-2), "RN": right.stride(-1),
    }  # fmt: skip
    launch(
        dot_kernels.multiply,
        (_programs(contraction, rows, columns),),
        left,
        right,
        result,
        **sizes,
        **strides,
        BM=rows,
        BN=columns,
        BK=contracted,
        WIDE=exceeds_32_bits(left, right),
        PRECISION=precision,
        num_warps=max(1, min(4, rows * columns // 512)),
        num_stages=_STAGES,
    )
