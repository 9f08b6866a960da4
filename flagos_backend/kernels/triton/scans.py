"""Cumulative sums, products, minima, maxima and log-sum-exps along any dimension, as HLO's windows or ATen's operators,
as launches of our Triton kernels (scans_kernels.py)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from flagos_backend.devices.target import Target
from flagos_backend.ir.hlo import Instruction
from flagos_backend.ir.opcode import Opcode
from flagos_backend.ir.types import ArrayShape, ElementType, TupleShape
from flagos_backend.kernels.implementation import Variant, operation_of
from flagos_backend.kernels.reference.aten import argument_of, gives_row_major
from flagos_backend.kernels.reference.cumulative import (
    Combine,
    Cumulative,
    cumulative_of,
    identity_of,
    starts_with_identity,
)
from flagos_backend.kernels.reference.registry import Run, Value
from flagos_backend.kernels.reference.storage import dtype_of
from flagos_backend.kernels.triton.launching import launch
from flagos_backend.process.torch_loading import Tensor, torch

E = ElementType
_FLOATS = frozenset({E.F16, E.BF16, E.F32, E.F64})
_SIGNED = frozenset({E.S8, E.S16, E.S32, E.S64})
_UNSIGNED = frozenset({E.U8, E.U16, E.U32, E.U64})
# What states are kept in: of integers, of floats.
_NARROW, _WIDE = (torch.int32, torch.float32), (torch.int64, torch.float64)
# ATen's operators along their argument ``dim``. Results of sums and products may be wider.
ATEN = {
    "aten::cumsum": Combine.ADD,
    "aten::cumprod": Combine.MULTIPLY,
    "aten::logcumsumexp": Combine.LOG_ADD_EXP,
}
# Those that say where it is as well.
PLACED = {"aten::cummax": Combine.MAXIMUM, "aten::cummin": Combine.MINIMUM}
# Kernels count elements in 32 bits, and those that there are not up to the end of the last segment.
_MAX_ELEMENTS = (1 << 31) - (1 << 24)
# Elements of a tile, and of one that is a part of a row, and those of them that a warp has; less of wide states.
_TILE, _LONG_TILE, _WARP = 2048, 4096, 512
# What lanes that are contiguous take of memory, to be read by whole lines.
_LINE = 128
# Programs for each multiprocessor: scans are cut where there are fewer than the first, into the second.
_FEW, _MANY = 4, 8


@dataclass(frozen=True, slots=True)
class _Scans:
    """``outer`` x ``inner`` scans of ``size`` elements each, ``inner`` ones side by side in memory."""

    outer: int
    size: int
    inner: int

    @property
    def axis(self) -> int:
        """The dimension of a tile along which it is scanned; the other one is that of the scans."""
        return 1 if self.inner == 1 else 0


@dataclass(frozen=True, slots=True)
class _Tiles:
    """How scans are shared out: ``lanes`` of them to a tile, with ``block`` elements each; ``blocks`` of these to each
    of ``segments`` segments. ``count``: as many programs to a segment, of ``warps`` each."""

    lanes: int
    block: int
    warps: int
    count: int
    blocks: int
    segments: int


def _array(value: Instruction) -> ArrayShape:
    """Of several, as of minima and maxima and their places, the first."""
    shape = value.shape.elements[0] if isinstance(value.shape, TupleShape) else value.shape
    assert isinstance(shape, ArrayShape)
    return shape


def _cumulative(instruction: Instruction) -> Cumulative | None:
    """None where the kernels do not compute it: it is none, or starts with a value of its own."""
    if instruction.opcode is Opcode.REDUCE_WINDOW:
        return cumulative_of(instruction) if starts_with_identity(instruction) else None
    operation, dimension = operation_of(instruction), argument_of(instruction, "dim")
    combine, results = ({**ATEN, **PLACED}).get(operation), [0, 1] if operation in PLACED else None
    if combine is None or not isinstance(dimension, int) or not gives_row_major(instruction, results):
        return None
    if len(instruction.operands) != 1 or argument_of(instruction, "self") not in (
        {"tensor": 0},
        {"tensor": 0, "strided": True},
    ):
        return None
    rank = _array(instruction).rank
    return Cumulative(combine, dimension % rank, reverse=False) if rank else None


def _is_exact(given: ElementType, result: ElementType) -> bool:
    """Whether numbers of the one type are numbers of the other."""
    if given is result:
        return given in _FLOATS | _SIGNED | _UNSIGNED
    if given.bits >= result.bits:
        return False
    if given in _FLOATS:
        return result in _FLOATS
    return (given in _SIGNED and result in _SIGNED) or (given in _UNSIGNED and result in _SIGNED | _UNSIGNED)


def unsupported(instruction: Instruction, target: Target) -> str:
    """Why not, or "". Cheap: no device is asked."""
    cumulative = _cumulative(instruction)
    if cumulative is None or identity_of(cumulative.combine, _array(instruction).element_type) is None:
        return "it is no cumulative sum, product, minimum, maximum or log-sum-exp"
    shape, given = _array(instruction), instruction.operands[0].shape
    if not isinstance(given, ArrayShape) or not _is_exact(given.element_type, shape.element_type):
        return "our kernels of scans do not convert its type"
    if cumulative.combine is Combine.LOG_ADD_EXP and shape.element_type not in _FLOATS:
        return "it has no exponentials"
    if not 0 < shape.num_elements <= _MAX_ELEMENTS:
        return "it has no elements, or more than 32 bits count"
    return ""


def _power(count: int) -> int:
    """The least power of two that is not less."""
    return 1 << (count - 1).bit_length()


def _tiles(scans: _Scans, itemsize: int, state: int, target: Target) -> _Tiles:
    """``state``: how many registers hold one."""
    if scans.axis == 1:
        block = min(_power(scans.size), _LONG_TILE // state)
        lanes = min(_power(scans.outer), max(1, _TILE // state // block))
        count = -(-scans.outer // lanes)
    else:
        lanes = min(_power(scans.inner), max(2, _LINE // itemsize))
        block = min(_power(scans.size), max(1, _TILE // state // lanes))
        count = scans.outer * -(-scans.inner // lanes)
    warps = min(8, max(1, lanes * block * state // _WARP))
    blocks = -(-scans.size // block)
    wanted = 1 if count >= _FEW * target.multiprocessors else -(-_MANY * target.multiprocessors // count)
    each = -(-blocks // min(blocks, wanted))
    return _Tiles(lanes, block, warps, count, each, -(-blocks // each))


def _flags(combine: Combine, places: bool, given: ElementType, result: ElementType) -> dict[str, Any]:
    """What kernels are compiled for beside sizes. 16-bit floats are computed with as f32, short integers as 32 bits."""
    import triton.language as tl

    seen = {E.U16: tl.uint16, E.U32: tl.uint32, E.U64: tl.uint64}
    if result in _FLOATS:
        accumulated, dtype = (tl.float64, E.F64) if result is E.F64 else (tl.float32, E.F32)
    elif result in _UNSIGNED:
        accumulated, dtype = (tl.uint64, E.U64) if result is E.U64 else (tl.uint32, E.U32)
    else:
        accumulated, dtype = (tl.int64, E.S64) if result is E.S64 else (tl.int32, E.S32)
    return {
        "COMBINE": f"{combine}-place" if places else str(combine),
        "IDENTITY": _identity(combine, dtype),
        "SEEN": seen.get(given),
        "ACC": accumulated,
        "PART": tl.int32 if places else accumulated if combine is Combine.LOG_ADD_EXP else None,
    }


def _identity(combine: Combine, element_type: ElementType) -> float | int:
    identity = identity_of(combine, element_type)
    assert identity is not None
    # That of unsigned numbers is stored as a signed one.
    return identity % (1 << element_type.bits) if element_type in _UNSIGNED else identity


def variants(instruction: Instruction, target: Target) -> tuple[Variant, ...]:
    """An array to one of its sizes, or to two, the second of which says where the minima or maxima are, s64. Segments
    are combined in one order always, so that each run has the same results."""
    from flagos_backend.kernels.triton import scans_kernels as kernels

    cumulative, shape, given = _cumulative(instruction), _array(instruction), _array(instruction.operands[0])
    assert cumulative is not None
    dims, dimension = shape.dims, cumulative.dimension
    scans = _Scans(prod(dims[:dimension]), dims[dimension], prod(dims[dimension + 1 :]))
    places = isinstance(instruction.shape, TupleShape)
    flags = _flags(cumulative.combine, places, given.element_type, shape.element_type)
    wide, pairs = shape.element_type.bits == 64, places or cumulative.combine is Combine.LOG_ADD_EXP
    state = (_WIDE if wide else _NARROW)[shape.element_type in _FLOATS]
    tiles = _tiles(scans, dtype_of(given.element_type).itemsize, (1 + wide) * (1 + pairs), target)
    flags |= {
        "AXIS": scans.axis,
        "LANES": tiles.lanes,
        "BLOCK": tiles.block,
        "REVERSE": cumulative.reverse,
        "num_warps": tiles.warps,
    }
    sizes = (scans.size, scans.inner, scans.outer, tiles.blocks, tiles.segments)
    split = tiles.segments > 1

    def into(run: Run, outputs: Sequence[Tensor | None], *operands: Tensor) -> Value:
        x = operands[0].contiguous()
        dtypes = (dtype_of(shape.element_type), torch.int64)[: len(outputs)]
        results = tuple(
            torch.empty(dims, dtype=dtype, device=x.device) if output is None else output
            for dtype, output in zip(dtypes, outputs, strict=True)
        )
        values = torch.empty((scans.outer, tiles.segments, scans.inner) if split else 1, dtype=state, device=x.device)
        part = torch.int32 if places else state
        parts = torch.empty_like(values, dtype=part) if pairs else values
        if split:  # nobody needs the total of the last one
            launch(kernels.reduce_segments, (tiles.count, tiles.segments - 1), x, values, parts, *sizes, **flags)
        own = {"SPLIT": split, "PLACES": places}
        grid, written = (tiles.count, tiles.segments), (results[0], results[-1])
        launch(kernels.scan_segments, grid, x, *written, values, parts, *sizes, **flags, **own)
        return results if places else results[0]

    def kernel(run: Run, *operands: Tensor) -> Value:
        return into(run, (None, None) if places else (None,), *operands)

    return (Variant("", kernel, into),)
