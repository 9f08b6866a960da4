"""A reader of ELF64 shared libraries that trusts no offset: what a library is, exports, needs and would run at load.

Third stage of the host side: policy judges what this reads. Never executes, maps executable, or writes anything.
Format: System V gABI chapters 4 and 5, the GNU symbol versioning and hash extensions.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Final

MAX_SYMBOLS: Final = 4_000_000
MAX_ENTRIES: Final = 65_536
MAX_NAME: Final = 65_536

_ET_DYN: Final = 3
_PT_LOAD, _PT_DYNAMIC = 1, 2
_SHT_SYMTAB, _SHT_NOBITS = 2, 8
_STB_LOCAL: Final = 0
_STT_FUNC, _STT_FILE = 2, 4
_STV_INTERNAL, _STV_HIDDEN = 1, 2
_SHN_UNDEF, _SHN_ABS = 0, 0xFFF1


class _Tag(enum.IntEnum):
    """The dynamic tags that matter here."""

    NULL = 0
    NEEDED = 1
    HASH = 4
    STRTAB = 5
    SYMTAB = 6
    RELA = 7
    RELASZ = 8
    STRSZ = 10
    INIT = 12
    SONAME = 14
    RPATH = 15
    INIT_ARRAY = 25
    INIT_ARRAYSZ = 27
    RUNPATH = 29
    GNU_HASH = 0x6FFFFEF5
    VERDEF = 0x6FFFFFFC
    VERDEFNUM = 0x6FFFFFFD
    VERNEED = 0x6FFFFFFE
    VERNEEDNUM = 0x6FFFFFFF


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


@dataclass(frozen=True)
class Symbol:
    """One entry of a symbol table."""

    name: str
    value: int
    section: int
    binding: int
    kind: int
    visibility: int

    @property
    def is_defined(self) -> bool:
        return self.section != _SHN_UNDEF

    @property
    def is_absolute(self) -> bool:
        return self.section == _SHN_ABS

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


class ElfFile:
    """One ELF64 little-endian file over its bytes. Every property raises ElfError when what it needs is not sound."""

    def __init__(self, data: bytes | memoryview) -> None:
        self._data = memoryview(data)
        if bytes(self._data[:4]) != b"\x7fELF":
            raise ElfError(Defect.NOT_ELF, "the file does not begin with the ELF magic number")
        if len(self._data) < 64:
            raise ElfError(Defect.TRUNCATED, f"the file ends after {len(self._data)} bytes, inside the ELF header")
        # Class and byte order come before all else: they say how the rest is laid out.
        self.is_64_bit = self._data[4] == 2
        self.is_little_endian = self._data[5] == 1
        order = "<" if self.is_little_endian else ">"
        self.type: int
        self.machine_number: int
        self.type, self.machine_number = struct.unpack_from(order + "HH", self._data, 16)
        if not (self.is_64_bit and self.is_little_endian):
            raise ElfError(Defect.NOT_64_LITTLE, f"the file is for {self._describe()}")

    def _describe(self) -> str:
        bits = {1: "32-bit", 2: "64-bit"}.get(self._data[4], "unknown-class")
        order = {1: "little-endian", 2: "big-endian"}.get(self._data[5], "unknown-order")
        return f"{self.machine} ({bits}, {order})"

    # ---- Bounds-checked access ----

    def _bytes(self, offset: int, size: int, what: str) -> memoryview:
        if offset < 0 or size < 0 or offset + size > len(self._data):
            raise ElfError(
                Defect.TRUNCATED, f"{what} lies at {offset}..{offset + size}, the file ends at {len(self._data)}"
            )
        return self._data[offset : offset + size]

    def _unpack(self, layout: str, offset: int, what: str) -> tuple[int, ...]:
        return struct.unpack(layout, self._bytes(offset, struct.calcsize(layout), what))

    def _string(self, table: bytes, offset: int, what: str) -> str:
        if not 0 <= offset < len(table):
            raise ElfError(Defect.MALFORMED, f"{what} names string {offset} of a table of {len(table)} bytes")
        end = table.find(b"\0", offset, offset + MAX_NAME)
        if end < 0:
            raise ElfError(Defect.MALFORMED, f"{what} is a string without an end")
        return table[offset:end].decode("utf-8", "backslashreplace")

    def _file_offset(self, address: int, what: str) -> int:
        """Where in the file lies what the loader would map at `address`."""
        for segment in self.segments:
            if segment.kind == _PT_LOAD and segment.address <= address < segment.address + segment.file_size:
                return segment.offset + address - segment.address
        raise ElfError(Defect.MALFORMED, f"{what} is at address {address:#x}, which no segment maps")

    # ---- Headers ----

    @property
    def machine(self) -> str:
        """The architecture as `uname -m` names it."""
        return MACHINES.get(self.machine_number, f"machine number {self.machine_number}")

    @property
    def is_shared_library(self) -> bool:
        return self.type == _ET_DYN

    @cached_property
    def segments(self) -> tuple[Segment, ...]:
        (offset,) = self._unpack("<Q", 32, "e_phoff")
        entry_size, count = self._unpack("<HH", 54, "e_phentsize")
        if count and entry_size < 56:
            raise ElfError(Defect.MALFORMED, f"program headers of {entry_size} bytes")
        segments = []
        for index in range(count):
            place = offset + index * entry_size
            kind, _, at, address, _, size = self._unpack("<IIQQQQ", place, "a program header")
            segment = Segment(kind, at, address, size)
            if kind == _PT_LOAD:
                self._bytes(at, size, "a loaded segment")
            segments.append(segment)
        return tuple(segments)

    @cached_property
    def sections(self) -> tuple[Section, ...]:
        """The section headers; () where the file has none."""
        (offset,) = self._unpack("<Q", 40, "e_shoff")
        entry_size, count, names_index = self._unpack("<HHH", 58, "e_shentsize")
        if offset == 0 or count == 0:
            return ()
        if entry_size < 64:
            raise ElfError(Defect.MALFORMED, f"section headers of {entry_size} bytes")
        raw = [
            self._unpack("<IIQQQQII", offset + index * entry_size, "the section header table") for index in range(count)
        ]
        if names_index >= count:
            raise ElfError(Defect.MALFORMED, f"the section names are in section {names_index} of {count}")
        names = bytes(self._bytes(raw[names_index][4], raw[names_index][5], "the section names"))
        return tuple(
            Section(self._string(names, name, "a section name"), kind, address, at, size, link)
            for name, kind, _, address, at, size, link, _ in raw
        )

    def section_bytes(self, name: str) -> bytes:
        """The contents of the first section of that name; b"" where there is none."""
        for section in self.sections:
            if section.name == name and section.kind != _SHT_NOBITS:
                return bytes(self._bytes(section.offset, section.size, f"section {name}"))
        return b""

    # ---- The dynamic section: what the dynamic linker would act on ----

    @cached_property
    def _dynamic(self) -> tuple[tuple[int, int], ...]:
        for segment in self.segments:
            if segment.kind == _PT_DYNAMIC:
                entries = []
                for index in range(min(segment.file_size // 16, MAX_ENTRIES)):
                    tag, value = self._unpack("<QQ", segment.offset + index * 16, "the dynamic section")
                    if tag == _Tag.NULL:
                        break
                    entries.append((tag, value))
                return tuple(entries)
        return ()

    def _tag(self, tag: _Tag) -> int | None:
        return next((value for key, value in self._dynamic if key == tag), None)

    @cached_property
    def _dynamic_strings(self) -> bytes:
        address, size = self._tag(_Tag.STRTAB), self._tag(_Tag.STRSZ)
        if address is None or size is None:
            raise ElfError(Defect.MALFORMED, "the dynamic section names no string table")
        what = "the dynamic string table"
        return bytes(self._bytes(self._file_offset(address, what), size, what))

    def _dynamic_names(self, tag: _Tag) -> tuple[str, ...]:
        return tuple(self._string(self._dynamic_strings, value, tag.name) for key, value in self._dynamic if key == tag)

    @property
    def needed(self) -> tuple[str, ...]:
        """The libraries that it names as dependencies, in order."""
        return self._dynamic_names(_Tag.NEEDED)

    @property
    def soname(self) -> str | None:
        return next(iter(self._dynamic_names(_Tag.SONAME)), None)

    @property
    def rpath(self) -> tuple[str, ...]:
        """DT_RPATH's folders, unexpanded; () where DT_RUNPATH takes its place."""
        return () if self.runpath else self._folders(_Tag.RPATH)

    @property
    def runpath(self) -> tuple[str, ...]:
        return self._folders(_Tag.RUNPATH)

    def _folders(self, tag: _Tag) -> tuple[str, ...]:
        return tuple(folder for value in self._dynamic_names(tag) for folder in value.split(":") if folder)

    # ---- Symbols ----

    def _symbol(self, raw: memoryview, index: int, strings: bytes) -> Symbol:
        name, info, other, section, value = struct.unpack_from("<IBBHQ", raw, index * 24)
        text = self._string(strings, name, f"symbol {index}")
        return Symbol(text, value, section, info >> 4, info & 15, other & 3)

    def _symbol_count(self) -> int:
        """How many dynamic symbols there are; only the hash tables know."""
        address = self._tag(_Tag.HASH)
        if address is not None:
            _, chains = self._unpack("<II", self._file_offset(address, "DT_HASH"), "DT_HASH")
            return chains
        address = self._tag(_Tag.GNU_HASH)
        if address is None:
            raise ElfError(Defect.MALFORMED, "the dynamic section has no symbol hash table")
        start = self._file_offset(address, "DT_GNU_HASH")
        buckets, first, bloom, _ = self._unpack("<IIII", start, "DT_GNU_HASH")
        table = start + 16 + bloom * 8
        last = max(self._unpack(f"<{buckets}I", table, "the buckets of DT_GNU_HASH")) if 0 < buckets < 2**28 else 0
        if last < first:
            return first
        chains_at = table + buckets * 4
        while not self._unpack("<I", chains_at + (last - first) * 4, "the chains of DT_GNU_HASH")[0] & 1:
            last += 1
        return last + 1

    @cached_property
    def dynamic_symbols(self) -> tuple[Symbol, ...]:
        address = self._tag(_Tag.SYMTAB)
        if address is None:
            return ()
        count = self._symbol_count()
        if count > MAX_SYMBOLS:
            raise ElfError(Defect.MALFORMED, f"it claims {count} dynamic symbols")
        raw = self._bytes(self._file_offset(address, "DT_SYMTAB"), count * 24, "the dynamic symbols")
        return tuple(self._symbol(raw, index, self._dynamic_strings) for index in range(1, count))

    @cached_property
    def exported(self) -> tuple[str, ...]:
        """The names that other libraries could bind to, without the names of its own symbol versions."""
        versions = set(self.version_definitions)
        return tuple(
            symbol.name
            for symbol in self.dynamic_symbols
            if symbol.is_exported and not (symbol.is_absolute and symbol.name in versions)
        )

    @cached_property
    def static_symbols(self) -> tuple[Symbol, ...]:
        """The full symbol table; () in a stripped library."""
        for section in self.sections:
            if section.kind == _SHT_SYMTAB:
                if section.link >= len(self.sections):
                    raise ElfError(Defect.MALFORMED, f".symtab's strings are in section {section.link}")
                count = section.size // 24
                if count > MAX_SYMBOLS:
                    raise ElfError(Defect.MALFORMED, f"it claims {count} symbols")
                raw = self._bytes(section.offset, count * 24, ".symtab")
                table = self.sections[section.link]
                strings = bytes(self._bytes(table.offset, table.size, ".strtab"))
                return tuple(self._symbol(raw, index, strings) for index in range(1, count))
        return ()

    # ---- Symbol versions ----

    @cached_property
    def version_needs(self) -> tuple[VersionNeed, ...]:
        address, count = self._tag(_Tag.VERNEED), self._tag(_Tag.VERNEEDNUM) or 0
        if address is None:
            return ()
        needs: list[VersionNeed] = []
        place, budget = self._file_offset(address, "DT_VERNEED"), MAX_ENTRIES
        for _ in range(min(count, MAX_ENTRIES)):
            _, versions, file, auxiliary, following = self._unpack("<HHIII", place, "a needed version")
            names, at = [], place + auxiliary
            # Overlapping chains could name the same entries over and over: the budget is for the whole table.
            budget -= versions
            if budget < 0:
                raise ElfError(Defect.MALFORMED, f"it needs more than {MAX_ENTRIES} symbol versions")
            for _ in range(versions):
                _, _, _, name, step = self._unpack("<IHHII", at, "a needed version")
                names.append(self._string(self._dynamic_strings, name, "a needed version"))
                if step == 0:
                    break
                at += step
            library = self._string(self._dynamic_strings, file, "a needed version's library")
            needs.append(VersionNeed(library, tuple(names)))
            if following == 0:
                break
            place += following
        return tuple(needs)

    @cached_property
    def version_definitions(self) -> tuple[str, ...]:
        """The symbol versions that it provides."""
        address, count = self._tag(_Tag.VERDEF), self._tag(_Tag.VERDEFNUM) or 0
        if address is None:
            return ()
        names, place = [], self._file_offset(address, "DT_VERDEF")
        for _ in range(min(count, MAX_ENTRIES)):
            _, _, _, _, _, auxiliary, following = self._unpack("<HHHHIII", place, "a defined version")
            name, _ = self._unpack("<II", place + auxiliary, "a defined version")
            names.append(self._string(self._dynamic_strings, name, "a defined version"))
            if following == 0:
                break
            place += following
        return tuple(names)

    # ---- What the compiler left, and what would run at load ----

    @property
    def comments(self) -> tuple[str, ...]:
        """The texts that compilers and linkers left in .comment."""
        texts = self.section_bytes(".comment")[:MAX_NAME].split(b"\0")
        return tuple(dict.fromkeys(text.decode("utf-8", "replace") for text in texts if text))

    def code_at(self, address: int, size: int) -> bytes:
        """Up to `size` bytes of what would be mapped at `address`; b"" where nothing is."""
        try:
            offset = self._file_offset(address, "code")
        except ElfError:
            return b""
        return bytes(self._data[offset : offset + size])

    def _relocated(self, start: int, end: int) -> dict[int, int | None]:
        """What RELA writes into [start, end): address to value; None where the value needs a symbol."""
        address, size = self._tag(_Tag.RELA), self._tag(_Tag.RELASZ) or 0
        if address is None:
            return {}
        raw = self._bytes(self._file_offset(address, "DT_RELA"), size - size % 24, "the relocations")
        return {
            at: (None if info >> 32 else addend & 0xFFFF_FFFF_FFFF_FFFF)
            for at, info, addend in struct.iter_unpack("<QQq", raw)
            if start <= at < end
        }

    def initializers(self) -> Iterator[int | None]:
        """The addresses of the functions that dlopen would call; None where only the dynamic linker could tell.

        DT_INIT counts unless it is the start of `.init`, which holds nothing but the C runtime's own prologue.
        """
        address = self._tag(_Tag.INIT)
        if address is not None and not any(s.name == ".init" and s.address == address for s in self.sections):
            yield address
        start, size = self._tag(_Tag.INIT_ARRAY), self._tag(_Tag.INIT_ARRAYSZ) or 0
        if start is not None and size:
            yield from self._pointers(start, size, "DT_INIT_ARRAY")
        for section in self.sections:
            if section.name == ".ctors" or section.name.startswith(".ctors."):
                # The first and the last word only mark the ends.
                ends = (0, 0xFFFF_FFFF_FFFF_FFFF)
                pointers = self._pointers(section.address, section.size, section.name) if section.size >= 8 else ()
                yield from (pointer for pointer in pointers if pointer not in ends)

    def _pointers(self, start: int, size: int, what: str) -> Iterator[int | None]:
        relocated = self._relocated(start, start + size)
        raw = self._bytes(self._file_offset(start, what), size - size % 8, what)
        for index, (value,) in enumerate(struct.iter_unpack("<Q", raw)):
            yield relocated.get(start + index * 8, value)

    def function_names(self, addresses: frozenset[int]) -> dict[int, str]:
        """The names that the symbol table gives to functions at these addresses."""
        return {
            symbol.value: symbol.name
            for symbol in self.static_symbols
            if symbol.kind == _STT_FUNC and symbol.is_defined and symbol.value in addresses
        }
