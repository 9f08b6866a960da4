"""What ELF64 writes down, as values: the tags, kinds and entries of which elf.py reads those of one library."""

from __future__ import annotations

import enum
import sys
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple

_STB_LOCAL: Final = 0
STT_FUNC, STT_GNU_IFUNC = 2, 10
_STV_INTERNAL, _STV_HIDDEN = 1, 2
SHN_UNDEF, _SHN_ABS = 0, 0xFFF1


class SegmentType(enum.IntEnum):
    """The program headers that matter here."""

    LOAD = 1
    DYNAMIC = 2
    GNU_STACK = 0x6474E551


#: The rights of a segment.
EXECUTABLE, WRITABLE = 1, 2


class Tag(enum.IntEnum):
    """The dynamic tags that matter here."""

    NULL = 0
    NEEDED = 1
    PLTRELSZ = 2
    HASH = 4
    STRTAB = 5
    SYMTAB = 6
    RELA = 7
    RELASZ = 8
    RELAENT = 9
    STRSZ = 10
    SYMENT = 11
    INIT = 12
    SONAME = 14
    RPATH = 15
    REL = 17
    PLTREL = 20
    TEXTREL = 22
    JMPREL = 23
    INIT_ARRAY = 25
    INIT_ARRAYSZ = 27
    RUNPATH = 29
    FLAGS = 30
    PREINIT_ARRAY = 32
    PREINIT_ARRAYSZ = 33
    GNU_HASH = 0x6FFFFEF5
    DEPAUDIT = 0x6FFFFEFB
    AUDIT = 0x6FFFFEFC
    FLAGS_1 = 0x6FFFFFFB
    VERDEF = 0x6FFFFFFC
    VERDEFNUM = 0x6FFFFFFD
    VERNEED = 0x6FFFFFFE
    VERNEEDNUM = 0x6FFFFFFF
    AUXILIARY = 0x7FFFFFFD
    FILTER = 0x7FFFFFFF


#: e_machine to the name that `uname -m` gives the architecture.
MACHINES: Final[dict[int, str]] = {
    3: "i386",
    8: "mips64",
    20: "ppc",
    21: "ppc64",
    22: "s390x",
    40: "arm",
    62: "x86_64",
    183: "aarch64",
    243: "riscv64",
    258: "loongarch64",
}


def machine_number(name: str) -> int:
    """The e_machine of an architecture by its `uname -m` name; -1 where it is not known."""
    return next((number for number, known in MACHINES.items() if known == name), -1)


class Defect(enum.Enum):
    """The ways in which bytes fail to be a library that can be read."""

    NOT_ELF = "not ELF"
    TRUNCATED = "truncated"
    MALFORMED = "malformed"
    NOT_64_LITTLE = "not 64-bit little-endian"


class ElfError(ValueError):
    """The bytes are not an ELF64 little-endian file that can be read."""

    def __init__(self, defect: Defect, fact: str) -> None:
        super().__init__(fact)
        self.defect = defect


class Symbol(NamedTuple):
    """One entry of a symbol table."""

    name: str
    value: int
    section: int
    binding: int
    kind: int
    visibility: int

    @property
    def is_defined(self) -> bool:
        return self.section != SHN_UNDEF

    @property
    def is_absolute(self) -> bool:
        return self.section == _SHN_ABS

    @property
    def is_resolver(self) -> bool:
        """Whether the value is that of a function that the dynamic linker calls to learn the symbol's address."""
        return self.is_defined and self.kind == STT_GNU_IFUNC

    @property
    def is_exported(self) -> bool:
        """Whether another library could bind to it."""
        return (
            self.is_defined
            and self.binding != _STB_LOCAL
            and self.visibility not in (_STV_INTERNAL, _STV_HIDDEN)
            and self.name != ""
        )


@dataclass(frozen=True)
class Segment:
    """A program header."""

    kind: int
    offset: int
    address: int
    file_size: int
    memory_size: int
    flags: int


@dataclass(frozen=True)
class Section:
    """A section header."""

    name: str
    kind: int
    address: int
    offset: int
    size: int
    link: int


@dataclass(frozen=True)
class VersionNeed:
    """Symbol versions that a library wants from one of its dependencies."""

    library: str
    versions: tuple[str, ...]


class Relocation(NamedTuple):
    """One thing that the dynamic linker writes: at `offset`, what `kind` makes of a dynamic symbol and `addend`."""

    offset: int
    kind: int
    symbol: int
    addend: int


@dataclass(frozen=True)
class Relocations:
    """All that the dynamic linker writes, by columns: a library has thousands, and few questions are about each."""

    offsets: array[int]
    kinds: array[int]
    symbols: array[int]
    addends: array[int]

    @classmethod
    def of(cls, table: bytes) -> Relocations:
        """Those of tables of Elf64_Rela, one after the other."""
        columns = []
        # The words of an entry are its offset, its kind and symbol in halves, and its addend.
        for code, first, words in (("Q", 0, 3), ("I", 2, 6), ("I", 3, 6), ("q", 2, 3)):
            column = array(code, table)
            if sys.byteorder == "big":
                column.byteswap()
            columns.append(column[first::words])
        return cls(*columns)

    def within(self, start: int, end: int) -> Iterator[Relocation]:
        """Those that write to places after `start` and before `end`."""
        return (self._at(index) for index, offset in enumerate(self.offsets) if start < offset < end)

    def of_kind(self, kind: int | None) -> Iterator[Relocation]:
        """Those of one kind."""
        if kind not in self.kinds:
            return iter(())
        return (self._at(index) for index, found in enumerate(self.kinds) if found == kind)

    def _at(self, index: int) -> Relocation:
        return Relocation(self.offsets[index], self.kinds[index], self.symbols[index], self.addends[index])
