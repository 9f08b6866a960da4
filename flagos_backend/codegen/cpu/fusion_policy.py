"""Which loops the host CPU runs for a computation: fusion within the limits of its tiles and caches.

Between fusion and emitter.py.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod

from flagos_backend.codegen.cpu.emit_row_loop import SHORT_ROW, Phases, reduces_rows
from flagos_backend.codegen.cpu.encoding import is_movable
from flagos_backend.codegen.cpu.lower.dot import is_product_operand
from flagos_backend.codegen.cpu.transforms.choose_tile_dimension import tiled
from flagos_backend.codegen.cpu.transforms.collapse_dimensions import simplify
from flagos_backend.codegen.cpu.transforms.transpose_short_reductions import stores_only_reductions
from flagos_backend.codegen.cpu.transforms.unroll_short_rows import LONG, can_lengthen
from flagos_backend.fusion.fuse import fuse
from flagos_backend.fusion.merge import merge
from flagos_backend.fusion.policy import HOST
from flagos_backend.fusion.schedule import Schedule
from flagos_backend.fusion.seams import MAX_BOXES
from flagos_backend.ir.attributes import GatherAttributes
from flagos_backend.ir.elementwise import element_type
from flagos_backend.ir.hlo import Instruction
from flagos_backend.ir.opcode import Opcode
from flagos_backend.ir.types import ArrayShape, ElementType
from flagos_backend.loop_ir.boxes import boxes, has_choices
from flagos_backend.loop_ir.flat import FlatComputation
from flagos_backend.loop_ir.indexing import View, dims_of
from flagos_backend.loop_ir.region import Apply, Region

# More operations than this and the tiles of one loop no longer stay in the first-level cache. A chain needs few of its
# values at a time, and no tiles for numbers; what is merged needs more.
_MAX_CHAINED = 256
_MAX_OPERATIONS = 64
# What is kept of a row has to stay in the second-level cache.
_MAX_KEPT_BYTES = 512 << 10
# Below this many points a loop runs on one thread anyway.
_SMALL = 1 << 14
# Elements of a window of a gather that loops read one by one; four side by side are a vector that is copied.
_MAX_GATHERED = 3
# With fewer rows than this, threads have nothing to share.
_MIN_ROWS = 16


def schedule(computation: FlatComputation) -> Schedule:
    """Regions, each for one loop, and library calls."""
    return merge(computation, fuse(computation, _POLICY), accepts)


def _reads_view(call: Instruction, operand: int, view: View) -> bool:
    """BLAS takes the strides of a matrix, arithmetic of two doubles each one number for all elements."""
    if call.opcode in (Opcode.MULTIPLY, Opcode.DIVIDE):
        return dims_of(view.buffer) == () and element_type(call) is ElementType.C128
    if call.opcode is Opcode.DOT:
        return view.buffer.opcode is not Opcode.CONSTANT and is_product_operand(call, operand, view)
    return HOST.reads_view(call, operand, view)


def _reads_gather(gather: Instruction) -> bool:
    """Whether loops read elements of ``gather`` where they stand. Rows of an array are copied faster than they are read
    element by element, each of which then computes where its row begins."""
    array = gather.operands[0].shape
    indices = [operand.shape for operand in gather.operands[1:]]
    return (
        isinstance(array, ArrayShape)
        and is_movable(array.element_type)
        and array.element_type.bits >= 8
        and all(isinstance(shape, ArrayShape) and shape.element_type.bits >= 8 for shape in indices)
        and prod(gather.attributes_as(GatherAttributes).slice_sizes) <= _MAX_GATHERED
    )


_POLICY = replace(
    HOST,
    max_operations=_MAX_CHAINED,
    reads_view=_reads_view,
    reads_gather=_reads_gather,
    splits=True,
    complex_numbers=True,
)


def accepts(region: Region) -> bool:
    """Whether a merged region is better than the regions it was made of."""
    if has_choices(region):
        found = boxes(region)
        return found is not None and len(found) <= MAX_BOXES and accepts(max(found, key=lambda box: prod(box.dims)))
    if sum(isinstance(e, Apply) for e in region.expressions()) > _MAX_OPERATIONS:
        return False
    nest = simplify(region) if region.reductions else tiled(region)
    if _stores_parts(region) and 1 < prod(simplify(region).dims[-1:]) < LONG:
        return _stores_interleaved(region)  # else each part has a loop along the dimension that is best for it
    points = prod(nest.dims)
    # Short runs of elements cost more in calls of operations than a pass through memory does.
    short = bool(nest.dims) and nest.dims[-1] < LONG
    if not region.reductions:
        return not short or len(nest.dims) == 1 or can_lengthen(region)
    if not reduces_rows(region, nest):
        return (not short or can_lengthen(region)) and stores_only_reductions(region)
    rows = prod(nest.dims[: len(nest.dims) - len(nest.reduced)])
    # What is reduced as short rows but together is no short row would be a call for each of these.
    if short and prod(nest.dims[d] for d in nest.reduced) > SHORT_ROW:
        return False
    if rows < _MIN_ROWS and points > _SMALL:
        return False
    return Phases(region).kept_bytes <= _MAX_KEPT_BYTES


def _stores_parts(region: Region) -> bool:
    """Whether several stores fill one buffer."""
    return len({store.target for store in region.stores}) < len(region.stores)


def _stores_interleaved(region: Region) -> bool:
    """Whether what is stored stands element by element in turn in one buffer."""
    first, *others = region.stores
    offsets = [store.index.offset for store in region.stores]
    steps = [abs(c) for c, n in zip(first.index.coefficients, region.dims, strict=True) if n > 1]
    alike = all(s.target is first.target and s.index.coefficients == first.index.coefficients for s in others)
    return alike and not region.reductions and max(offsets) - min(offsets) < min(steps)
