"""Inputs that once did what none may, or were made to: each with what is to come of it. A test replays all of them."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from flagos_backend.importer import schema
from plugin_abi.elf import ElfFile
from plugin_abi.elf_format import SegmentType, Tag
from tools.fuzz.hostile.compiling import TARGETS as COMPILING
from tools.fuzz.hostile.libraries import valid_libraries
from tools.fuzz.hostile.loading import TARGETS as LOADING
from tools.fuzz.hostile.loading import file_input
from tools.fuzz.hostile.programs import ADD, call_of, from_text, valid_programs
from tools.fuzz.hostile.target import ACCEPTED

_DEEP: Final = b'{"a":' * 40_000
_VALID: Final = {target.name: target.valid for target in (*LOADING, *COMPILING)}


@dataclass(frozen=True)
class Entry:
    """`outcome`: what the target says of the input."""

    target: str
    name: str
    make: Callable[[], bytes]
    outcome: str


# ---- Manifests and other JSON ----


def _manifest(**fields: Any) -> Callable[[], bytes]:
    return lambda: json.dumps(json.loads(_VALID["manifest"]()[0]) | fields).encode()


def _said(target: str, old: bytes, new: bytes) -> Callable[[], bytes]:
    """A valid input of a target with a part of its text replaced."""

    def make() -> bytes:
        (data, *_) = _VALID[target]()
        assert old in data
        return data.replace(old, new, 1)

    return make


def _infinite_code() -> bytes:
    kept = json.loads(_VALID["torch answer"]()[0])
    return json.dumps(kept | {"warnings": [["a manifest", float("inf"), "a line"]]}).encode()


_MANIFESTS: Final = (
    Entry("manifest", "nests deep", lambda: _DEEP, "MANIFEST_TOO_DEEP"),
    Entry("manifest", "nests deep in lists", lambda: b"[" * 100_000, "MANIFEST_TOO_DEEP"),
    Entry("manifest", "an integer of 5000 digits", _said("manifest", b"100", b"1" * 5000), "MANIFEST_NOT_JSON"),
    Entry("manifest", "a number beyond every float", _said("manifest", b"100", b"1e999"), "MANIFEST_NOT_JSON"),
    Entry("manifest", "no number", _said("manifest", b"100", b"NaN"), "MANIFEST_NOT_JSON"),
    Entry("manifest", "a key twice", _said("manifest", b"{", b'{"name": "a",'), "MANIFEST_DUPLICATE_KEY"),
    Entry("manifest", "half a character", _manifest(library_path="\ud800.so"), "MANIFEST_INVALID_FIELD"),
    Entry("manifest", "a zero byte in a path", _manifest(library_path="a\0b.so"), "MANIFEST_INVALID_FIELD"),
    Entry("manifest", "a mistyped field", _manifest(static_initialisers=0), ACCEPTED),
    Entry("manifest", "too long", lambda: b" " * 300_000, "MANIFEST_TOO_LARGE"),
)
_KEPT: Final = (
    Entry("verdict", "nests deep", lambda: _DEEP, "no verdict"),
    Entry("verdict", "of no time", lambda: b'{"good": false, "time": Infinity}', "no verdict"),
    Entry(
        "verdict", "of a time of 5000 digits", lambda: b'{"good": false, "time": ' + b"1" * 5000 + b"}", "no verdict"
    ),
    Entry("answer", "nests deep", lambda: _DEEP, "damaged: RecursionError"),
    Entry(
        "answer", "an infinite status", _said("answer", b'"status": 0', b'"status": 1e999'), "damaged: OverflowError"
    ),
    Entry("times", "nest deep", lambda: _DEEP, "none"),
    Entry("times", "that are infinite", lambda: b'{"a kernel": Infinity}', "none"),
    Entry("torch answer", "nests deep", lambda: _DEEP, "none"),
    Entry("torch answer", "an infinite code", _infinite_code, "none"),
    Entry("source", "no text", lambda: b"\xff\xfe", ACCEPTED),
    Entry("source", "other code", lambda: b"raise SystemExit\n", ACCEPTED),
)

# ---- Files that are none ----

_FILES: Final = (
    *(
        Entry("file", f"{thing} as {role}", lambda t=thing, r=role: file_input(t, "plain", r), outcome)  # type: ignore[misc]
        for role, outcome in (
            ("manifest", "MANIFEST_UNREADABLE"),
            ("library", "LIBRARY_UNREADABLE"),
            ("dependency", "missing"),
            ("verdict", "no verdict"),
        )
        for thing in ("pipe", "folder", "socket", "link to zeros")
    ),
    Entry("file", "a sparse manifest", lambda: file_input("sparse JSON", "plain", "manifest"), "MANIFEST_TOO_LARGE"),
    Entry("file", "a sparse library", lambda: file_input("sparse library", "plain", "library"), "LIBRARY_MALFORMED"),
    Entry("file", "a sparse dependency", lambda: file_input("sparse library", "plain", "dependency"), ACCEPTED),
    Entry("file", "a sparse verdict", lambda: file_input("sparse JSON", "plain", "verdict"), "no verdict"),
    *(
        Entry("file", f"{role} with {path} in its path", lambda r=role, p=path: file_input("text", p, r), outcome)  # type: ignore[misc]
        for role, outcome in (("manifest", "MANIFEST_UNREADABLE"), ("library", "LIBRARY_UNREADABLE"))
        for path in ("300 bytes", "5000 bytes", "a zero byte")
    ),
)

# ---- Libraries ----

_DT_FINI: Final = 13


def _edited(change: Callable[[bytearray, ElfFile], object], number: int = 0) -> Callable[[], bytes]:
    """A valid library with its bytes changed in place."""

    def make() -> bytes:
        image = valid_libraries()[number]
        changed = bytearray(image)
        change(changed, ElfFile(image))
        return bytes(changed)

    return make


def _entry_of(elf: ElfFile, tag: int) -> int:
    """Where in the file the dynamic section has a tag."""
    segment = next(segment for segment in elf.segments if segment.kind == SegmentType.DYNAMIC)
    return segment.offset + 16 * [key for key, _ in elf.dynamic].index(tag)


def _tag_twice(changed: bytearray, elf: ElfFile) -> None:
    struct.pack_into("<QQ", changed, _entry_of(elf, _DT_FINI), Tag.INIT, elf.tags[Tag.INIT] + 1)


def _decoy(changed: bytearray, elf: ElfFile) -> None:
    """The file offset of PT_DYNAMIC leads to another dynamic section than its address."""
    (headers,) = struct.unpack_from("<Q", changed, 32)
    index = [segment.kind for segment in elf.segments].index(SegmentType.DYNAMIC)
    changed += bytes(-len(changed) % 16)
    struct.pack_into("<Q", changed, headers + 56 * index + 8, len(changed))
    changed += struct.pack("<QQ", 0, 0)


def _comment(changed: bytearray, elf: ElfFile) -> None:
    """64 KiB in .comment that a pattern with two stars reads again and again."""
    _redirect(changed, elf, ".comment", b"GCC: (" * (65_536 // 6))


def _redirect(changed: bytearray, elf: ElfFile, name: str, data: bytes) -> None:
    (sections,) = struct.unpack_from("<Q", changed, 40)
    place = sections + 64 * [section.name for section in elf.sections].index(name)
    struct.pack_into("<QQ", changed, place + 24, len(changed), len(data))
    changed += data


def _needs_again(changed: bytearray, elf: ElfFile) -> None:
    """A list of needed versions that leads to itself, with all counts at their most."""
    place = elf.file_offset(elf.tags[Tag.VERNEED], "DT_VERNEED")
    struct.pack_into("<Q", changed, _entry_of(elf, Tag.VERNEEDNUM) + 8, (1 << 64) - 1)
    struct.pack_into("<H", changed, place + 2, 0xFFFF)
    struct.pack_into("<I", changed, place + 12, 1 << 32 >> 31)


def _set(tag: Tag, value: int) -> Callable[[bytearray, ElfFile], None]:
    return lambda changed, elf: struct.pack_into("<Q", changed, _entry_of(elf, tag) + 8, value)


def _chain_without_end(changed: bytearray, elf: ElfFile) -> None:
    """DT_GNU_HASH in the middle of zeros, none of which ends a chain."""
    place = elf.file_offset(elf.tags[Tag.GNU_HASH], "DT_GNU_HASH")
    struct.pack_into("<IIII", changed, place, 1, 0, 0, 0)
    struct.pack_into("<I", changed, place + 16, 1)
    changed[place + 20 :] = bytes(1 << 20)


_LIBRARIES: Final = (
    Entry("library", "indirect functions and constructors", lambda: valid_libraries()[1], ACCEPTED),
    Entry("library", "a tag twice", _edited(_tag_twice), ACCEPTED),
    Entry("library", "a decoy of a dynamic section", _edited(_decoy), ACCEPTED),
    Entry("library", "quadratic comments", _edited(_comment), ACCEPTED),
    Entry("library", "needed versions in a circle", _edited(_needs_again), "malformed"),
    Entry("library", "2^64 bytes of relocations", _edited(_set(Tag.RELASZ, (1 << 64) - 1)), "malformed"),
    Entry("library", "2^60 initializers", _edited(_set(Tag.INIT_ARRAYSZ, 1 << 63), 1), "malformed"),
    Entry("library", "a hash chain without end", _edited(_chain_without_end), "malformed"),
    Entry("library", "no more than its magic", lambda: b"\x7fELF", "truncated"),
)

# ---- Programs ----


def _without_operands(opcode: str, text: str) -> Callable[[], bytes]:
    def make() -> bytes:
        program = schema.Program.FromString(from_text(text))
        for computation in program.module.computations:
            for instruction in computation.instructions:
                if instruction.opcode == opcode:
                    del instruction.operand_ids[:]
        return bytes(program.SerializeToString())

    return make


_GATHER: Final = (
    "ENTRY e { x = f32[4,5] parameter(0) i = s32[3] parameter(1) ROOT y = f32[3,5] gather(x, i), offset_dims={1}, "
    "collapsed_slice_dims={0}, start_index_map={0}, index_vector_dim=1, slice_sizes={1,5} }"
)
_DILATED: Final = (
    ADD + "ENTRY e { x = f32[5] parameter(0) z = f32[] constant(0) "
    "ROOT y = f32[4000000000] reduce-window(x, z), window={size=2 lhs_dilate=1000000000}, to_apply=add }"
)


def _gather_of_slices(sizes: list[int], text: str) -> Callable[[], bytes]:
    """The gather with other slice sizes, which XLA's reader of text may not take."""

    def make() -> bytes:
        program = schema.Program.FromString(from_text(text))
        for computation in program.module.computations:
            for instruction in computation.instructions:
                if instruction.opcode == "gather":
                    instruction.gather_slice_sizes[:] = sizes
        return bytes(program.SerializeToString())

    return make


def _attention_of(**fields: Any) -> bytes:
    config = {"query": "td", "key": "sd", "value": "se", "output": "te"} | fields
    return call_of("flagos.attention", ("f32[4,8]", "f32[6,8]", "f32[6,5]"), ("f32[4,5]",), json.dumps(config))


def _deep_config(target: str) -> bytes:
    call = f'custom-call(x), custom_call_target="{target}", backend_config="{"[" * 50_000}"'
    return from_text(f"ENTRY e {{ x = f32[6] parameter(0) ROOT y = f32[6] {call} }}")


def _deep_trip_count() -> bytes:
    program = schema.Program.FromString(valid_programs()[12])
    for computation in program.module.computations:
        for instruction in computation.instructions:
            if instruction.opcode == "while":
                instruction.ClearField("backend_config_payload")
                instruction.backend_config = b'{"known_trip_count":' + b"[" * 50_000
    return bytes(program.SerializeToString())


_PROGRAMS: Final = (
    Entry("importer", "a gather of nothing", _without_operands("gather", _GATHER), "VerificationFailed"),
    Entry("program", "a gather of windows of nothing", _gather_of_slices([0, 5], _GATHER), "VerificationFailed"),
    Entry("program", "attention of a query that is true", lambda: _attention_of(query=True), "MalformedProgram"),
    Entry("program", "attention of an infinite scale", lambda: _attention_of(scale=float("inf")), "MalformedProgram"),
    Entry("program", "a base dilation of 10^9", lambda: from_text(_DILATED), "RESOURCE_EXHAUSTED"),
    Entry("importer", "a trip count that nests deep", _deep_trip_count, "MalformedProgram"),
    *(
        Entry("program", f"a configuration of {target} that nests deep", lambda t=target: _deep_config(t), outcome)  # type: ignore[misc]
        for target, outcome in (
            ("flagos.svd", "MalformedProgram"),
            ("flagos.attention", "MalformedProgram"),
            ("flagos.strided_view", "MalformedProgram"),
            ("aten::relu.default", "MalformedProgram"),
            ("Sharding", ACCEPTED),
            ("unheard of", "UnknownCustomCall"),
        )
    ),
    *(
        Entry(
            "custom call",
            f"{target} of {'what it does not take' if operands else 'nothing'}",
            partial(call_of, target, operands, ("f32[2,6]",)),
            "VerificationFailed",
        )
        for target in ("TopK", "PartialReduce", "Sharding", "mhlo.tan", "Qr", "flagos.lu", "flagos.householder_product")
        for operands in ((), ("f32[2,6]", "(f32[2])"))
    ),
    Entry("executable", "no more than its magic", lambda: b"FLAGOSEX", "SerializedExecutableInvalid"),
)

ENTRIES: Final = (*_MANIFESTS, *_KEPT, *_FILES, *_LIBRARIES, *_PROGRAMS)
