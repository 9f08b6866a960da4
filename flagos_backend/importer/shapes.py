"""ShapeProto to Shape and back, and the layouts that a program may ask for. Used by importer and exporter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flagos_backend.errors import MalformedProgram, UnsupportedElementType, UnsupportedLayout, UnsupportedShape
from flagos_backend.importer.schema import ShapeProto
from flagos_backend.ir.types import ArrayShape, ElementType, Shape, TupleShape

MAX_RANK = 1024  # far beyond any program; index maps have as many coefficients for each dimension
MAX_ELEMENTS = 2**48  # far beyond any memory, far below what overflows a byte count
_TUPLE = 13
_ELEMENT_TYPES = {int(t): t for t in ElementType}
# What XLA names but the IR does not have, for messages; other numbers are named by their number.
_FOREIGN_TYPES = {0: "PRIMITIVE_TYPE_INVALID", 14: "OPAQUE_TYPE", 34: "BUFFER", 35: "F6E3M2FN", 36: "F6E2M3FN"}


class ShapeReader:
    """Reads shapes; equal messages give the same object, which also makes later comparisons fast."""

    def __init__(self) -> None:
        self._cache: dict[bytes, Shape] = {}

    def read(self, proto: Any, place: object) -> Shape:
        """Raises UnsupportedElementType, UnsupportedShape (dynamic) or MalformedProgram. Layouts are not looked at."""
        key = proto.SerializeToString()
        shape = self._cache.get(key)
        if shape is None:
            shape = self._cache[key] = _read_shape(proto, place)
        return shape


def _read_shape(proto: Any, place: object) -> Shape:
    number = proto.element_type
    if number == _TUPLE:
        if proto.dimensions:
            raise MalformedProgram(fact="a tuple shape has dimensions", place=place)
        return TupleShape(tuple(_read_shape(element, place) for element in proto.tuple_shapes))
    element_type = _ELEMENT_TYPES.get(number)
    if element_type is None:
        raise UnsupportedElementType(element_type=_FOREIGN_TYPES.get(number, f"number {number}"), place=place)
    if any(proto.is_dynamic_dimension):
        raise UnsupportedShape(reason="a dimension is dynamic", place=place)
    if len(proto.dimensions) > MAX_RANK:
        raise UnsupportedShape(reason=f"it has {len(proto.dimensions)} dimensions, more than {MAX_RANK}", place=place)
    shape = ArrayShape(element_type, tuple(proto.dimensions))
    if any(size < 0 for size in shape.dims) or shape.num_elements > MAX_ELEMENTS:
        raise MalformedProgram(fact=f"the dimensions {shape.dims} are impossible", place=place)
    if proto.tuple_shapes or (element_type is ElementType.TOKEN and shape.dims):
        raise MalformedProgram(fact=f"the shape {shape} has parts that its type does not", place=place)
    return shape


def write_shape(shape: Shape, proto: Any = None) -> Any:
    """The ShapeProto of ``shape`` with row-major layouts, written into ``proto`` when given."""
    proto = ShapeProto() if proto is None else proto
    if isinstance(shape, TupleShape):
        proto.element_type = _TUPLE
        for element in shape.elements:
            write_shape(element, proto.tuple_shapes.add())
        return proto
    proto.element_type = int(shape.element_type)
    if shape.dims:
        proto.dimensions.extend(shape.dims)
        proto.is_dynamic_dimension.extend([False] * shape.rank)
    if shape.element_type is not ElementType.TOKEN:
        proto.layout.minor_to_major.extend(range(shape.rank - 1, -1, -1))
    return proto


def row_major(rank: int) -> tuple[int, ...]:
    """minor_to_major of a row-major array."""
    return tuple(range(rank - 1, -1, -1))


def read_layout(proto: Any, place: object) -> tuple[int, ...]:
    """minor_to_major of an array's ShapeProto; row major when it has no layout."""
    rank = len(proto.dimensions)
    if not proto.HasField("layout"):
        return row_major(rank)
    order = tuple(proto.layout.minor_to_major)
    if sorted(order) != list(range(rank)):
        raise MalformedProgram(fact=f"minor_to_major {order} is no order of {rank} dimensions", place=place)
    return order


def moves_data(order: Sequence[int], dims: Sequence[int]) -> bool:
    """Whether a layout places the elements elsewhere than row major: dimensions of size 1 do not matter."""
    if 0 in dims:
        return False
    relevant = [dimension for dimension in order if dims[dimension] != 1]
    return relevant != sorted(relevant, reverse=True)


def require_row_major(proto: Any, place: object) -> None:
    """Raises UnsupportedLayout when any array inside ``proto`` is laid out otherwise, or tiled."""
    for element in proto.tuple_shapes:
        require_row_major(element, place)
    if not proto.HasField("layout"):
        return
    order = read_layout(proto, place)
    if moves_data(order, proto.dimensions) or proto.layout.tiles or proto.layout.split_configs:
        tiles = "".join(f"T({','.join(map(str, tile.dimensions))})" for tile in proto.layout.tiles)
        raise UnsupportedLayout(layout=f"{{{','.join(map(str, order))}{':' if tiles else ''}{tiles}}}", place=place)
