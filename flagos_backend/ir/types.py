"""Element types and shapes of the graph IR. First stop of the pipeline: every later stage speaks in these."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod


class ElementType(enum.IntEnum):
    """The numbers of ``xla.PrimitiveType`` (xla_data.proto), so that graph, ABI and IR agree."""

    PRED = 1
    S8 = 2
    S16 = 3
    S32 = 4
    S64 = 5
    U8 = 6
    U16 = 7
    U32 = 8
    U64 = 9
    F16 = 10
    F32 = 11
    F64 = 12
    C64 = 15
    BF16 = 16
    TOKEN = 17
    C128 = 18
    F8E5M2 = 19
    F8E4M3FN = 20
    S4 = 21
    U4 = 22
    F8E4M3B11FNUZ = 23
    F8E5M2FNUZ = 24
    F8E4M3FNUZ = 25
    S2 = 26
    U2 = 27
    F8E4M3 = 28
    F8E3M4 = 29
    S1 = 30
    U1 = 31
    F4E2M1FN = 32
    F8E8M0FNU = 33

    @property
    def bits(self) -> int:
        """Width of the value; sub-byte types still take one byte of memory an element."""
        return _BITS[self]

    @property
    def bytes(self) -> int:
        """Bytes that one element takes in a buffer (0 for a token)."""
        return (self.bits + 7) // 8

    @property
    def is_signed(self) -> bool:
        return self in _SIGNED

    @property
    def is_unsigned(self) -> bool:
        return self in _UNSIGNED

    @property
    def is_integer(self) -> bool:
        """Signed or unsigned integer; PRED is neither."""
        return self in _SIGNED or self in _UNSIGNED

    @property
    def is_float(self) -> bool:
        return self in _FLOAT

    @property
    def is_complex(self) -> bool:
        return self in (ElementType.C64, ElementType.C128)

    @property
    def real(self) -> ElementType:
        """The type of the real part of a complex type; any other type itself."""
        return {ElementType.C64: ElementType.F32, ElementType.C128: ElementType.F64}.get(self, self)


_BITS = {
    ElementType.PRED: 8,
    ElementType.TOKEN: 0,
    **dict.fromkeys((ElementType.S1, ElementType.U1), 1),
    **dict.fromkeys((ElementType.S2, ElementType.U2), 2),
    **dict.fromkeys((ElementType.S4, ElementType.U4, ElementType.F4E2M1FN), 4),
    **{t: 8 for t in ElementType if t.name.startswith("F8")},
    **dict.fromkeys((ElementType.S8, ElementType.U8), 8),
    **dict.fromkeys((ElementType.S16, ElementType.U16, ElementType.F16, ElementType.BF16), 16),
    **dict.fromkeys((ElementType.S32, ElementType.U32, ElementType.F32), 32),
    **dict.fromkeys((ElementType.S64, ElementType.U64, ElementType.F64, ElementType.C64), 64),
    ElementType.C128: 128,
}
_SIGNED = frozenset(t for t in ElementType if t.name[0] == "S")
_UNSIGNED = frozenset(t for t in ElementType if t.name[0] == "U")
_FLOAT = frozenset(t for t in ElementType if t.name[0] == "F" or t is ElementType.BF16)


@dataclass(frozen=True, slots=True)
class ArrayShape:
    """A dense row-major array. A token is an ArrayShape of ElementType.TOKEN without dimensions."""

    element_type: ElementType
    dims: tuple[int, ...] = ()

    @property
    def rank(self) -> int:
        return len(self.dims)

    @property
    def num_elements(self) -> int:
        return prod(self.dims)

    @property
    def num_bytes(self) -> int:
        return self.num_elements * self.element_type.bytes

    def __str__(self) -> str:
        return f"{self.element_type.name.lower()}[{','.join(map(str, self.dims))}]"


@dataclass(frozen=True, slots=True)
class TupleShape:
    elements: tuple[Shape, ...] = ()

    def __str__(self) -> str:
        return f"({', '.join(map(str, self.elements))})"


Shape = ArrayShape | TupleShape


def leaves(shape: Shape) -> Iterator[ArrayShape]:
    """The array shapes inside ``shape``, in order."""
    if isinstance(shape, ArrayShape):
        yield shape
    else:
        for element in shape.elements:
            yield from leaves(element)
