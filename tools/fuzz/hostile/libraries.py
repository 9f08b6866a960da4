"""ELF libraries: real ones, freshly linked, and the same with fields of their headers and tables changed."""

from __future__ import annotations

import functools
import random
import struct
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from plugin_abi.elf import ElfFile
from plugin_abi.elf_format import SegmentType, Tag
from tools.fuzz.hostile.mutations import NUMBERS, changed_bytes

_SOURCE: Final = Path(__file__).parent / "library.c"
_WAYS: Final = (
    (),
    ("-DCONSTRUCTOR", "-DRESOLVER", "-Wl,--default-symver", "-Wl,--hash-style=sysv"),
    ("-DCONSTRUCTOR", "-Wl,-s", "-Wl,-z,execstack", "-Wl,-rpath,$ORIGIN:lib", "-Wl,-F,libm.so.6"),
    ("-DRESOLVER", "-Wl,--hash-style=both", "-Wl,-soname,libhostile.so"),
)


def link(target: Path, *flags: str) -> None:
    """Compiles and links library.c."""
    options = ("-shared", "-fPIC", "-O1", "-Wl,-z,max-page-size=4096", "-Wl,-z,noseparate-code")
    subprocess.run(["gcc", *options, str(_SOURCE), "-o", str(target), *flags], check=True)


@functools.cache
def valid_libraries() -> tuple[bytes, ...]:
    """One for each way to link."""
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "library.so"
        images = []
        for way in _WAYS:
            link(target, *way)
            images.append(target.read_bytes())
    return tuple(images)


@dataclass(frozen=True)
class _Table:
    """Records of one layout in a file: the widths of their fields, and where each record starts."""

    widths: tuple[int, ...]
    records: tuple[int, ...]

    @property
    def size(self) -> int:
        return sum(self.widths)

    def field(self, rng: random.Random) -> tuple[int, int]:
        """Place and width of a field of some record."""
        number = rng.randrange(len(self.widths))
        return rng.choice(self.records) + sum(self.widths[:number]), self.widths[number]


@functools.cache
def _tables(image: bytes) -> tuple[_Table, ...]:
    elf = ElfFile(image)
    (headers,), (sections,) = struct.unpack_from("<Q", image, 32), struct.unpack_from("<Q", image, 40)
    count, section_count = struct.unpack_from("<H", image, 56)[0], struct.unpack_from("<H", image, 60)[0]
    dynamic = next(segment for segment in elf.segments if segment.kind == SegmentType.DYNAMIC)
    entries = tuple(dynamic.offset + 16 * index for index in range(len(elf.dynamic) + 1))
    tables = [
        _Table((4, 1, 1, 1, 1, 8, 2, 2, 4, 8, 8, 8, 4, 2, 2, 2, 2, 2, 2), (0,)),
        _Table((4, 4, 8, 8, 8, 8, 8, 8), tuple(headers + 56 * index for index in range(count))),
        _Table((4, 4, 8, 8, 8, 8, 4, 4, 8, 8), tuple(sections + 64 * index for index in range(section_count))),
        # Twice: what the dynamic linker acts on is worth most.
        *[_Table((8, 8), entries)] * 2,
    ]
    for tag, length, widths in (
        (Tag.RELA, elf.tags.get(Tag.RELASZ, 0), (8, 4, 4, 8)),
        (Tag.JMPREL, elf.tags.get(Tag.PLTRELSZ, 0), (8, 4, 4, 8)),
        (Tag.SYMTAB, 24 * (1 + len(elf.dynamic_symbols)), (4, 1, 1, 2, 8, 8)),
        (Tag.INIT_ARRAY, elf.tags.get(Tag.INIT_ARRAYSZ, 0), (8,)),
        (Tag.HASH, 64, (4,)),
        (Tag.GNU_HASH, 64, (4,)),
        (Tag.VERNEED, 32, (2, 2, 4, 4, 4)),
        (Tag.VERDEF, 56, (2, 2, 2, 2, 4, 4, 4)),
    ):
        if tag in elf.tags and length:
            size = sum(widths)
            start = elf.file_offset(elf.tags[tag], tag.name)
            tables.append(_Table(widths, tuple(start + size * index for index in range(max(length // size, 1)))))
    return tuple(tables)


def changed_library(rng: random.Random) -> bytes:
    """A library with one to four fields or records changed; sometimes bytes anywhere, sometimes cut off."""
    image = rng.choice(valid_libraries())
    changed, tables = bytearray(image), _tables(image)
    for _ in range(1 + rng.randrange(4)):
        table = rng.choice(tables)
        place, width = table.field(rng)
        match rng.randrange(6):
            case 0:
                value = rng.choice((*NUMBERS, len(image), len(image) - 1))
            case 1:
                other, other_width = rng.choice(tables).field(rng)
                value = int.from_bytes(changed[other : other + other_width], "little")
            case 2:
                value = int.from_bytes(changed[place : place + width], "little") + rng.choice(
                    (-4096, -16, -8, -1, 1, 8, 16, 4096)
                )
            case 3:
                value = int.from_bytes(changed[place : place + width], "little") ^ 1 << rng.randrange(8 * width)
            case 4:
                value = rng.choice((*Tag, *SegmentType))
            case _:
                # A record in another's place: tags twice, segments twice, the end elsewhere.
                source, target = rng.choice(table.records), rng.choice(table.records)
                changed[target : target + table.size] = changed[source : source + table.size]
                continue
        changed[place : place + width] = (value % (1 << 8 * width)).to_bytes(width, "little")
    match rng.randrange(12):
        case 0:
            return changed_bytes(rng, bytes(changed))
        case 1:
            return bytes(changed[: rng.randrange(len(changed))])
        case 2:
            return bytes(changed) + rng.choice((b"\0", b"x", b"GCC: (")) * rng.choice((1, 4096, 65_536))
    return bytes(changed)
