"""What the dynamic linker would do with a library that no check can vouch for: each is a fact, and a refusal.

Serves policy, for a backend's library and the dependencies that are its own. The rules are glibc's (elf/dl-load.c,
elf/dl-deps.c, elf/get-dynamic-info.h): where two readings are possible, one could be checked and the other loaded.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from plugin_abi.elf import ElfFile
from plugin_abi.elf_format import EXECUTABLE, WRITABLE, SegmentType, Tag
from plugin_abi.errors import RefusalCode

_PAGE: Final = 4096
_DF_TEXTREL: Final = 4
_DF_1_PIE: Final = 0x08000000
_REBUILD: Final = "install a complete build of the library, as a linker wrote it"
_LOADS: Final = (Tag.FILTER, Tag.AUXILIARY, Tag.AUDIT, Tag.DEPAUDIT)
#: Tags that a linker repeats.
_LISTS: Final = frozenset({Tag.NEEDED, Tag.FILTER, Tag.AUXILIARY})
#: What a table's entries must be, so that both sides read the same ones.
_SIZES: Final = ((Tag.SYMENT, 24), (Tag.RELAENT, 24), (Tag.PLTREL, Tag.RELA))


@dataclass(frozen=True)
class Fault:
    """One such thing: its code, what is so, what to do."""

    code: RefusalCode
    fact: str
    cure: str


def faults(library: ElfFile) -> Iterator[Fault]:
    """What speaks against loading a library, by its headers and its dynamic section. Raises ElfError."""
    for rule in _RULES:
        yield from rule(library)


def _malformed(fact: str) -> Fault:
    return Fault(RefusalCode.LIBRARY_MALFORMED, fact, _REBUILD)


def _segments(library: ElfFile) -> Iterator[Fault]:
    """Each address must have one meaning: that of the only segment which maps its page."""
    end = 0
    for segment in library.segments:
        if segment.kind != SegmentType.LOAD:
            continue
        place = f"the segment at address {segment.address:#x}"
        if segment.address // _PAGE * _PAGE < end:
            yield _malformed(f"{place} shares a page with the one before it, or precedes it")
        if segment.offset % _PAGE != segment.address % _PAGE:
            yield _malformed(f"{place} lies at {segment.offset:#x} in the file, at another place in its page")
        if segment.file_size > segment.memory_size:
            yield _malformed(f"{place} has more bytes in the file than in memory")
        end = -(-(segment.address + segment.memory_size) // _PAGE) * _PAGE


def _dynamic(library: ElfFile) -> Iterator[Fault]:
    found = [segment for segment in library.segments if segment.kind == SegmentType.DYNAMIC]
    if len(found) != 1:
        yield _malformed(f"it has {len(found)} dynamic segments")
        return
    (segment,) = found
    mapped = library.file_offset(segment.address, "the dynamic section", 16)
    if mapped != segment.offset:
        fact = f"its dynamic section is at {segment.offset:#x} in the file and mapped from {mapped:#x}"
        yield _malformed(fact)
    end = segment.address + 16 * (len(library.dynamic) + 1)
    if any(library.relocations.within(segment.address - 8, end)):
        yield _malformed("its relocations change its dynamic section while it is loaded")


def _tags(library: ElfFile) -> Iterator[Fault]:
    counts = Counter(tag for tag, _ in library.dynamic)
    twice = sorted(tag for tag, count in counts.items() if count > 1 and tag not in _LISTS)
    if twice:
        yield _malformed(f"its dynamic section has {', '.join(map(_name, twice))} more than once")
    if Tag.REL in counts:
        yield _malformed("it has relocations of a form that its architecture does not use (DT_REL)")
    for tag, expected in _SIZES:
        if library.tags.get(tag, expected) != expected:
            yield _malformed(f"{_name(tag)} is {library.tags[tag]}, not {int(expected)}")
    if library.tags.get(Tag.FLAGS_1, 0) & _DF_1_PIE:
        fact = "it is a position-independent executable, not a shared library"
        yield Fault(RefusalCode.LIBRARY_NOT_SHARED, fact, "link it with -shared")


def _name(tag: int) -> str:
    return f"DT_{Tag(tag).name}" if tag in Tag.__members__.values() else f"the tag {tag:#x}"


def _rights(library: ElfFile) -> Iterator[Fault]:
    stacks = [segment.flags for segment in library.segments if segment.kind == SegmentType.GNU_STACK]
    if not stacks or stacks[-1] & EXECUTABLE:
        why = "its PT_GNU_STACK is executable" if stacks else "it has no PT_GNU_STACK"
        yield Fault(
            RefusalCode.EXECUTABLE_STACK,
            f"loading it would make the stacks of this process executable: {why}",
            "link it with -Wl,-z,noexecstack, and give its assembly sources a section .note.GNU-stack",
        )
    if Tag.TEXTREL in library.tags or library.tags.get(Tag.FLAGS, 0) & _DF_TEXTREL:
        fact = "it has relocations in its code, which loading would make writable (DT_TEXTREL)"
        yield Fault(RefusalCode.WRITABLE_CODE, fact, "compile all of it with -fPIC and link it with -Wl,-z,text")
    if any(s.kind == SegmentType.LOAD and s.flags & WRITABLE and s.flags & EXECUTABLE for s in library.segments):
        fact = "it has a segment that is writable and executable"
        yield Fault(RefusalCode.WRITABLE_CODE, fact, "link it without -Wl,-N and without sections of that kind")


def _unchecked_loads(library: ElfFile) -> Iterator[Fault]:
    for tag in _LOADS:
        if tag in library.tags:
            fact = f"it has {_name(tag)}, which loads a library that is none of its dependencies"
            cure = "link it without filters and auditors: -f, -F, --audit, --depaudit"
            yield Fault(RefusalCode.UNCHECKED_LOAD, fact, cure)
    for folder in (*library.rpath, *library.runpath):
        if not folder.startswith(("/", "$ORIGIN", "${ORIGIN}")):
            fact = f"it has dependencies looked for in {folder!r}, below whatever folder is the current one"
            cure = "let each entry of its run path begin with / or $ORIGIN"
            yield Fault(RefusalCode.UNCHECKED_LOAD, fact, cure)
    for name in library.needed:
        if "/" in name and not name.startswith("/"):
            fact = f"it needs {name!r}, a path that depends on where something is"
            yield Fault(RefusalCode.UNCHECKED_LOAD, fact, "give that library an soname without a slash, and link again")


_RULES: Final[tuple[Callable[[ElfFile], Iterator[Fault]], ...]] = (
    _segments,
    _dynamic,
    _tags,
    _rights,
    _unchecked_loads,
)
