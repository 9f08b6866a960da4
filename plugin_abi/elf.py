"""A reader of ELF64 shared libraries that trusts no offset: what a library is, exports, needs and would run at load.

Third stage of the host side: policy judges what this reads. Never executes, maps or writes anything. What would run is
found as the dynamic linker finds it: program headers, addresses, the last tag. Section headers only serve descriptions.
Format: System V gABI chapters 4 and 5, the GNU symbol versioning and hash extensions.
"""

from __future__ import annotations

import struct
from functools import cached_property
from typing import Final

from plugin_abi.elf_format import (
    MACHINES,
    SHN_UNDEF,
    STT_FUNC,
    STT_GNU_IFUNC,
    Defect,
    ElfError,
    Relocations,
    Section,
    Segment,
    SegmentType,
    Symbol,
    Tag,
    VersionNeed,
)
from plugin_abi.files import OpenFile

#: Bounds of what a library may ask a reader to do, far above those of any that exists.
MAX_SYMBOLS: Final = 4_000_000
MAX_ENTRIES: Final = 65_536
MAX_NAME: Final = 65_536
MAX_TABLE: Final = 256 << 20

_ET_DYN: Final = 3
_SHT_SYMTAB, _SHT_NOBITS = 2, 8
_SYMBOL: Final = struct.Struct("<IBBHQQ")
_RELOCATION_SIZE: Final = 24
_PROGRAM_HEADER: Final = struct.Struct("<IIQQQQQQ")


class _Memory:
    """Bytes that are there already, read as a file is."""

    def __init__(self, data: bytes | memoryview) -> None:
        self._data = memoryview(data)
        self.size = len(self._data)

    def read(self, offset: int, size: int) -> bytes:
        return bytes(self._data[offset : offset + size])


class ElfFile:
    """One ELF64 little-endian file over its bytes, or over an open file.

    Every property raises ElfError when what it needs is not sound, and OSError where the file cannot be read.
    """

    def __init__(self, data: bytes | memoryview | OpenFile) -> None:
        self.file = data if isinstance(data, OpenFile) else _Memory(data)
        self._header = self.file.read(0, 64)
        if self._header[:4] != b"\x7fELF":
            raise ElfError(Defect.NOT_ELF, "the file does not begin with the ELF magic number")
        if len(self._header) < 64:
            raise ElfError(Defect.TRUNCATED, f"the file ends after {len(self._header)} bytes, inside the ELF header")
        # Class and byte order come before all else: they say how the rest is laid out.
        self.is_64_bit = self._header[4] == 2
        self.is_little_endian = self._header[5] == 1
        order = "<" if self.is_little_endian else ">"
        self.type: int
        self.machine_number: int
        self.type, self.machine_number = struct.unpack_from(order + "HH", self._header, 16)
        if not (self.is_64_bit and self.is_little_endian):
            raise ElfError(Defect.NOT_64_LITTLE, f"the file is for {self._describe()}")

    def _describe(self) -> str:
        bits = {1: "32-bit", 2: "64-bit"}.get(self._header[4], "unknown-class")
        order = {1: "little-endian", 2: "big-endian"}.get(self._header[5], "unknown-order")
        return f"{self.machine} ({bits}, {order})"

    # ---- Bounds-checked access ----

    def _within(self, offset: int, size: int, what: str) -> None:
        if offset < 0 or size < 0 or offset + size > self.file.size:
            raise ElfError(
                Defect.TRUNCATED, f"{what} lies at {offset}..{offset + size}, the file ends at {self.file.size}"
            )

    def _bytes(self, offset: int, size: int, what: str) -> bytes:
        self._within(offset, size, what)
        if size > MAX_TABLE:
            raise ElfError(Defect.MALFORMED, f"{what} has {size} bytes")
        data = self.file.read(offset, size)
        if len(data) < size:
            raise ElfError(Defect.TRUNCATED, f"the file was cut off while {what} was read")
        return data

    def _unpack(self, layout: str, offset: int, what: str) -> tuple[int, ...]:
        return struct.unpack(layout, self._bytes(offset, struct.calcsize(layout), what))

    def _string(self, table: bytes, offset: int, what: str) -> str:
        if not 0 <= offset < len(table):
            raise ElfError(Defect.MALFORMED, f"{what} names string {offset} of a table of {len(table)} bytes")
        end = table.find(b"\0", offset, offset + MAX_NAME)
        if end < 0:
            raise ElfError(Defect.MALFORMED, f"{what} is a string without an end")
        return table[offset:end].decode("utf-8", "backslashreplace")

    def file_offset(self, address: int, what: str, size: int = 1) -> int:
        """Where in the file lies what the loader would map at `address`, all `size` bytes of it."""
        for segment in self.segments:
            if segment.kind == SegmentType.LOAD and 0 <= address - segment.address <= segment.file_size - size:
                return segment.offset + address - segment.address
        raise ElfError(Defect.MALFORMED, f"{what} is at address {address:#x}, which no segment maps")

    def _mapped(self, address: int, size: int, what: str) -> bytes:
        """What the loader would map at `address`, before relocation."""
        return self._bytes(self.file_offset(address, what, size), size, what) if size else b""

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
        if count and entry_size != _PROGRAM_HEADER.size:
            raise ElfError(Defect.MALFORMED, f"program headers of {entry_size} bytes")
        segments = []
        table = self._bytes(offset, count * entry_size, "a program header")
        for kind, flags, at, address, _, size, memory_size, _ in _PROGRAM_HEADER.iter_unpack(table):
            segments.append(Segment(kind, at, address, size, memory_size, flags))
            if kind == SegmentType.LOAD:
                self._within(at, size, "a loaded segment")
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
        names = _Names(self, self._bytes(raw[names_index][4], raw[names_index][5], "the section names"))
        return tuple(
            Section(names.at(name, "a section name"), kind, address, at, size, link)
            for name, kind, _, address, at, size, link, _ in raw
        )

    def section_bytes(self, name: str, limit: int) -> bytes:
        """The first `limit` bytes of the first section of that name; b"" where there is none."""
        for section in self.sections:
            if section.name == name and section.kind != _SHT_NOBITS:
                return self._bytes(section.offset, min(section.size, limit), f"section {name}")
        return b""

    # ---- The dynamic section: what the dynamic linker would act on ----

    @cached_property
    def dynamic(self) -> tuple[tuple[int, int], ...]:
        """Tags and values as the linker reads them: where the last PT_DYNAMIC says in memory, up to DT_NULL."""
        segment = next((s for s in reversed(self.segments) if s.kind == SegmentType.DYNAMIC), None)
        if segment is None:
            return ()
        entries: list[tuple[int, int]] = []
        for index in range(MAX_ENTRIES):
            place = self.file_offset(segment.address + index * 16, "the dynamic section", 16)
            tag, value = self._unpack("<qQ", place, "the dynamic section")
            if tag == Tag.NULL:
                return tuple(entries)
            entries.append((tag, value))
        raise ElfError(Defect.MALFORMED, f"the dynamic section has more than {MAX_ENTRIES} entries")

    @cached_property
    def tags(self) -> dict[int, int]:
        """The value of each tag; of one that is there twice the last, as the linker takes it."""
        return dict(self.dynamic)

    def _tag(self, tag: Tag) -> int | None:
        return self.tags.get(tag)

    @cached_property
    def _dynamic_strings(self) -> bytes:
        address, size = self._tag(Tag.STRTAB), self._tag(Tag.STRSZ)
        if address is None or size is None:
            raise ElfError(Defect.MALFORMED, "the dynamic section names no string table")
        return self._mapped(address, size, "the dynamic string table")

    @cached_property
    def _names(self) -> _Names:
        return _Names(self, self._dynamic_strings)

    def _dynamic_names(self, tag: Tag) -> tuple[str, ...]:
        return tuple(self._names.at(value, tag.name) for key, value in self.dynamic if key == tag)

    @property
    def needed(self) -> tuple[str, ...]:
        """The libraries that it names as dependencies, in order."""
        return self._dynamic_names(Tag.NEEDED)

    @property
    def soname(self) -> str | None:
        return next(reversed(self._dynamic_names(Tag.SONAME)), None)

    @property
    def rpath(self) -> tuple[str, ...]:
        """DT_RPATH's folders, unexpanded; () where DT_RUNPATH takes its place."""
        return () if Tag.RUNPATH in self.tags else self._folders(Tag.RPATH)

    @property
    def runpath(self) -> tuple[str, ...]:
        return self._folders(Tag.RUNPATH)

    def _folders(self, tag: Tag) -> tuple[str, ...]:
        """The linker takes an empty entry for the current folder."""
        return tuple(folder or "." for value in self._dynamic_names(tag)[-1:] for folder in value.split(":"))

    # ---- Symbols ----

    def _symbol(self, raw: bytes, index: int) -> Symbol:
        name, info, other, section, value, _ = _SYMBOL.unpack_from(raw, index * _SYMBOL.size)
        return Symbol(self._names.at(name, "a symbol"), value, section, info >> 4, info & 15, other & 3)

    def _symbol_count(self) -> int:
        """How many dynamic symbols there are; only the hash tables know."""
        address = self._tag(Tag.HASH)
        if address is not None:
            _, chains = self._unpack("<II", self.file_offset(address, "DT_HASH"), "DT_HASH")
            return chains
        address = self._tag(Tag.GNU_HASH)
        if address is None:
            raise ElfError(Defect.MALFORMED, "the dynamic section has no symbol hash table")
        start = self.file_offset(address, "DT_GNU_HASH")
        buckets, first, bloom, _ = self._unpack("<IIII", start, "DT_GNU_HASH")
        table = start + 16 + bloom * 8
        if not 0 < buckets <= MAX_SYMBOLS:
            return first
        last = max(self._unpack(f"<{buckets}I", table, "the buckets of DT_GNU_HASH"))
        return first if last < first else last + self._chain_length(table + (buckets + last - first) * 4)

    def _chain_length(self, start: int) -> int:
        """How many words from `start` up to one that is odd, which ends a chain of DT_GNU_HASH."""
        length, size = 0, 1024
        while length <= MAX_SYMBOLS:
            size = min(size, self.file.size - start - length * 4)
            chain = self._bytes(start + length * 4, max(size, 4) & ~3, "the chains of DT_GNU_HASH")
            for (word,) in struct.iter_unpack("<I", chain):
                length += 1
                if word & 1:
                    return length
            size *= 2
        return length

    @cached_property
    def dynamic_symbols(self) -> tuple[Symbol, ...]:
        address = self._tag(Tag.SYMTAB)
        if address is None:
            return ()
        count = self._symbol_count()
        if count > MAX_SYMBOLS:
            raise ElfError(Defect.MALFORMED, f"it claims {count} dynamic symbols")
        raw = self._mapped(address, count * _SYMBOL.size, "the table of dynamic symbols")
        return tuple(self._symbol(raw, index) for index in range(1, count))

    def symbol(self, index: int) -> Symbol:
        """The dynamic symbol that a relocation uses. Not every one of those is known to a hash table."""
        if 0 < index <= len(self.dynamic_symbols):
            return self.dynamic_symbols[index - 1]
        address = self._tag(Tag.SYMTAB)
        if address is None:
            raise ElfError(Defect.MALFORMED, f"a relocation uses symbol {index}, and there is no table of them")
        return self._symbol(self._mapped(address + index * _SYMBOL.size, _SYMBOL.size, f"symbol {index}"), 0)

    @cached_property
    def relocations(self) -> Relocations:
        """What the linker writes when it loads the library, but for words to which it only adds the load address."""
        tables = []
        for table, size in ((Tag.RELA, Tag.RELASZ), (Tag.JMPREL, Tag.PLTRELSZ)):
            address, length = self._tag(table), self._tag(size) or 0
            if address is None or not length:
                continue
            if length // _RELOCATION_SIZE > MAX_SYMBOLS:
                raise ElfError(Defect.MALFORMED, f"DT_{table.name} has {length} bytes")
            tables.append(self._mapped(address, length - length % _RELOCATION_SIZE, f"DT_{table.name}"))
        return Relocations.of(b"".join(tables))

    @cached_property
    def exported(self) -> tuple[str, ...]:
        """The names that other libraries could bind to, without the names of its own symbol versions."""
        versions = set(self.version_definitions)
        return tuple(
            symbol.name
            for symbol in self.dynamic_symbols
            if symbol.is_exported and not (symbol.is_absolute and symbol.name in versions)
        )

    # ---- Symbol versions ----

    @cached_property
    def version_needs(self) -> tuple[VersionNeed, ...]:
        address, count = self._tag(Tag.VERNEED), self._tag(Tag.VERNEEDNUM) or 0
        if address is None:
            return ()
        needs: list[VersionNeed] = []
        place, budget = self.file_offset(address, "DT_VERNEED"), MAX_ENTRIES
        for _ in range(min(count, MAX_ENTRIES)):
            _, versions, file, auxiliary, following = self._unpack("<HHIII", place, "a needed version")
            names, at = [], place + auxiliary
            # Overlapping chains could name the same entries over and over: the budget is for the whole table.
            budget -= versions
            if budget < 0:
                raise ElfError(Defect.MALFORMED, f"it needs more than {MAX_ENTRIES} symbol versions")
            for _ in range(versions):
                _, _, _, name, step = self._unpack("<IHHII", at, "a needed version")
                names.append(self._names.at(name, "a needed version"))
                if step == 0:
                    break
                at += step
            library = self._names.at(file, "a needed version's library")
            needs.append(VersionNeed(library, tuple(names)))
            if following == 0:
                break
            place += following
        return tuple(needs)

    @cached_property
    def version_definitions(self) -> tuple[str, ...]:
        """The symbol versions that it provides."""
        address, count = self._tag(Tag.VERDEF), self._tag(Tag.VERDEFNUM) or 0
        if address is None:
            return ()
        names, place = [], self.file_offset(address, "DT_VERDEF")
        for _ in range(min(count, MAX_ENTRIES)):
            _, _, _, _, _, auxiliary, following = self._unpack("<HHHHIII", place, "a defined version")
            name, _ = self._unpack("<II", place + auxiliary, "a defined version")
            names.append(self._names.at(name, "a defined version"))
            if following == 0:
                break
            place += following
        return tuple(names)

    # ---- What the compiler left, and what would run at load ----

    @property
    def comments(self) -> tuple[str, ...]:
        """The texts that compilers and linkers left in .comment."""
        texts = self.section_bytes(".comment", MAX_NAME).split(b"\0")
        return tuple(dict.fromkeys(text.decode("utf-8", "replace") for text in texts if text))

    def code_at(self, address: int, size: int) -> bytes:
        """Up to `size` bytes of what would be mapped at `address`; b"" where nothing is."""
        for segment in self.segments:
            room = segment.address + segment.file_size - address
            if segment.kind == SegmentType.LOAD and 0 < room <= segment.file_size:
                return self.file.read(segment.offset + address - segment.address, min(size, room))
        return b""

    def pointers(self, table: Tag, size: Tag) -> tuple[tuple[int, int], ...]:
        """The words of an array that two tags describe, before relocation: where each lies, and its value."""
        start, length = self._tag(table), self._tag(size) or 0
        if start is None or not length:
            return ()
        raw = self._mapped(start, length - length % 8, f"DT_{table.name}")
        return tuple((start + index * 8, value) for index, (value,) in enumerate(struct.iter_unpack("<Q", raw)))

    def function_names(self, addresses: frozenset[int]) -> dict[int, str]:
        """The names that .symtab gives to functions at these addresses: for messages, since nothing holds it to the
        truth. {} in a stripped library."""
        try:
            return self._function_names(addresses)
        except ElfError:
            return {}

    def _function_names(self, addresses: frozenset[int]) -> dict[int, str]:
        found: dict[int, str] = {}
        for section in self.sections:
            if section.kind != _SHT_SYMTAB or section.link >= len(self.sections):
                continue
            strings = self.sections[section.link]
            texts = self._bytes(strings.offset, strings.size, ".strtab")
            raw = self._bytes(section.offset, section.size - section.size % _SYMBOL.size, ".symtab")
            for name, info, _, where, value, _ in _SYMBOL.iter_unpack(raw):
                if value in addresses and where != SHN_UNDEF and info & 15 in (STT_FUNC, STT_GNU_IFUNC):
                    found[value] = self._string(texts, name, "a function")
        return found


class _Names:
    """Strings of one table. All may name the same long text, so what they amount to is bounded by the table."""

    def __init__(self, elf: ElfFile, table: bytes) -> None:
        self._elf, self._table = elf, table
        self._budget = (1 << 20) + 16 * len(table)

    def at(self, offset: int, what: str) -> str:
        text = self._elf._string(self._table, offset, what)
        self._budget -= len(text)
        if self._budget < 0:
            raise ElfError(Defect.MALFORMED, f"{what} and those before it name far more text than their table holds")
        return text
