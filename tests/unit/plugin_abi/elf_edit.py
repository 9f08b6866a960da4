"""Changes to the bytes of a library that no linker makes: its program headers, its dynamic section."""

from __future__ import annotations

import struct
import subprocess
from pathlib import Path

from plugin_abi.elf import ElfFile
from plugin_abi.elf_format import SegmentType, Tag


def header_place(data: bytes, kind: int) -> int:
    """Where the first program header of a kind lies."""
    elf = ElfFile(data)
    (start,) = struct.unpack_from("<Q", data, 32)
    return start + 56 * [segment.kind for segment in elf.segments].index(kind)


def set_word(data: bytes, place: int, value: int, layout: str = "<Q") -> bytes:
    changed = bytearray(data)
    struct.pack_into(layout, changed, place, value)
    return bytes(changed)


def add_tags(data: bytes, *tags: tuple[int, int]) -> bytes:
    """More entries at the end of the dynamic section, where linkers leave room."""
    elf = ElfFile(data)
    segment = next(segment for segment in elf.segments if segment.kind == SegmentType.DYNAMIC)
    place = segment.offset + 16 * len(elf.dynamic)
    assert place + 16 * (len(tags) + 1) <= segment.offset + segment.file_size, "the linker left no room"
    return data[:place] + b"".join(struct.pack("<QQ", *tag) for tag in tags) + data[place + 16 * len(tags) :]


def replace_tag(data: bytes, old: Tag, tag: int, value: int) -> bytes:
    """Another tag in an entry's place."""
    elf = ElfFile(data)
    segment = next(segment for segment in elf.segments if segment.kind == SegmentType.DYNAMIC)
    place = segment.offset + 16 * [key for key, _ in elf.dynamic].index(old)
    return data[:place] + struct.pack("<QQ", tag, value) + data[place + 16 :]


def address_of(library: Path, function: str) -> int:
    """The address of a function, by the symbol table that the linker left."""
    lines = subprocess.run(["nm", str(library)], capture_output=True, text=True, check=True).stdout.splitlines()
    return next(
        int(address, 16) for address, _, name in (line.split() for line in lines if line[0] != " ") if name == function
    )


def rename_in_dynamic_strings(data: bytes, old: bytes, new: bytes) -> bytes:
    """Another name of the same length in the dynamic string table."""
    assert len(old) == len(new) and data.count(b"\0" + old + b"\0") >= 1
    return data.replace(b"\0" + old + b"\0", b"\0" + new + b"\0")
