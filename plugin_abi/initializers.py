"""Which code of a library dlopen would run, beyond what the compiler itself puts into every library.

Serves policy. The compiler's own is crtstuff.c's frame_dummy (GCC: libgcc/crtstuff.c) and crti.S's _init (glibc), known
by their code, since names and sections can say anything.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Final

from plugin_abi.elf import ElfFile
from plugin_abi.elf_format import Relocation, Tag

#: Which relocation writes the load address plus an addend, and which what a function of the library returns.
_RELATIVE: Final[dict[str, int]] = {"x86_64": 8, "aarch64": 1027, "riscv64": 3, "loongarch64": 3}
_IRELATIVE: Final[dict[str, int]] = {"x86_64": 37, "aarch64": 1032, "riscv64": 58, "loongarch64": 12}
#: A relocation writes 8 bytes or fewer, but for a TLS descriptor, and a copy, which is as long as its symbol.
_TLS_DESCRIPTOR: Final[dict[str, int]] = {"x86_64": 36, "aarch64": 1031, "riscv64": 12, "loongarch64": 14}
_COPY: Final[dict[str, int]] = {"x86_64": 5, "aarch64": 1024, "riscv64": 4, "loongarch64": 4}
#: The profiler's hook, which _init calls where something defines it.
_HOOK: Final = "__gmon_start__"


def foreign_initializers(library: ElfFile) -> tuple[str, ...]:
    """What dlopen would run beyond the compiler's own, by name where the library still has names: functions of DT_INIT
    and of the arrays, and the resolvers of indirect functions."""
    addresses = [*_initializers(library), *sorted(_resolvers(library))]
    names = library.function_names(frozenset(address for address in addresses if address is not None))
    foreign = ["an external function" if a is None else names.get(a, f"{a:#x}") for a in addresses]
    # The _init of this library, and of any other, calls it.
    foreign += [_HOOK for symbol in library.dynamic_symbols if symbol.name == _HOOK and symbol.is_defined]
    return tuple(foreign)


def _initializers(library: ElfFile) -> Iterator[int | None]:
    """The functions that dlopen would call; None where only the dynamic linker could tell which."""
    address = library.tags.get(Tag.INIT)
    if address is not None and not _is_crt_init(library, address):
        yield address
    for table, size in ((Tag.PREINIT_ARRAY, Tag.PREINIT_ARRAYSZ), (Tag.INIT_ARRAY, Tag.INIT_ARRAYSZ)):
        pointers = library.pointers(table, size)
        written = _written(library, pointers[0][0], pointers[-1][0] + 8) if pointers else ()
        for at, value in pointers:
            pointer = _relocated(library, at, value, written)
            if pointer is None or not _is_frame_dummy(library, pointer):
                yield pointer


def _written(library: ElfFile, start: int, end: int) -> tuple[Relocation, ...]:
    """The relocations that may write to addresses from `start` to `end`."""
    copy, wide = _COPY.get(library.machine), _TLS_DESCRIPTOR.get(library.machine)
    near = (r for r in library.relocations.within(start - 16, end) if r.offset > start - 8 or r.kind == wide)
    return (*(r for r in near if r.kind != copy), *library.relocations.of_kind(copy))


def _relocated(library: ElfFile, at: int, value: int, written: tuple[Relocation, ...]) -> int | None:
    """What the linker makes of the word `value` at address `at`; None where that needs a symbol or is not plain."""
    odd = _COPY.get(library.machine), _TLS_DESCRIPTOR.get(library.machine)
    if any((r.offset - at) % 8 or r.kind in odd for r in written):
        return None
    here = {r for r in written if r.offset == at}
    if not here:
        return value
    if len(here) > 1:
        return None
    (relocation,) = here
    if relocation.kind != _RELATIVE.get(library.machine) or relocation.symbol:
        return None
    return relocation.addend & 0xFFFF_FFFF_FFFF_FFFF


def _resolvers(library: ElfFile) -> set[int]:
    """The functions that the linker calls for the addresses of others (STT_GNU_IFUNC)."""
    kind = _IRELATIVE.get(library.machine)
    by_relocation = {r.addend & 0xFFFF_FFFF_FFFF_FFFF for r in library.relocations.of_kind(kind)}
    unlisted = (symbol for symbol in set(library.relocations.symbols) if symbol > len(library.dynamic_symbols))
    symbols = (*library.dynamic_symbols, *map(library.symbol, unlisted))
    return by_relocation | {symbol.value for symbol in symbols if symbol.is_resolver}


# ---- The compiler's own --------------------------------------------------------------------------------------------


def _is_crt_init(library: ElfFile, address: int) -> bool:
    """Whether code is _init as crti.o and crtn.o make it, with nothing between: it calls the profiler's hook if there
    is one. Known for x86-64 and aarch64; on other machines DT_INIT counts as foreign."""
    slot_of = _HOOK_SLOTS.get(library.machine)
    slot = slot_of(library, address) if slot_of is not None else None
    if slot is None:
        return False
    written = _written(library, slot, slot + 8)
    if not written:
        # The static linker found that nothing defines the hook.
        return library.code_at(slot, 8) == bytes(8)
    symbols = {r.symbol for r in written if r.offset == slot and r.addend == 0}
    if len(written) != 1 or len(symbols) != 1 or 0 in symbols:
        return False
    symbol = library.symbol(symbols.pop())
    return symbol.name == _HOOK and not symbol.is_defined


_D32: Final = rb"([\s\S]{4})"
_INIT_X86_64: Final = re.compile(
    rb"(?:\xf3\x0f\x1e\xfa)?"  # endbr64
    rb"\x48\x83\xec\x08\x48\x8b\x05" + _D32 + rb"\x48\x85\xc0"  # sub rsp, 8; mov rax, [slot]; test rax, rax
    rb"(?:\x74\x02\xff\xd0|\x74\x05\xe8" + _D32 + rb")"  # jz; call rax, or call a stub that jumps through a slot
    rb"\x48\x83\xc4\x08\xc3"  # add rsp, 8; ret
)
_STUB_X86_64: Final = re.compile(rb"(?:\xf3\x0f\x1e\xfa)?\xf2?\xff\x25" + _D32)


def _distance(match: re.Match[bytes], group: int, address: int) -> int:
    """The address that a 32-bit displacement at the end of a part of an instruction means."""
    return address + match.end(group) + int.from_bytes(match[group], "little", signed=True)


def _hook_slot_x86_64(library: ElfFile, address: int) -> int | None:
    match = _INIT_X86_64.match(library.code_at(address, 64))
    if match is None:
        return None
    slot = _distance(match, 1, address)
    if match[2] is not None:
        stub = _distance(match, 2, address)
        jump = _STUB_X86_64.match(library.code_at(stub, 16))
        if jump is None or _hooked(library, _distance(jump, 1, stub)) != _hooked(library, slot):
            return None
    return slot


def _hooked(library: ElfFile, slot: int) -> set[int]:
    return {r.symbol for r in _written(library, slot, slot + 8)}


_PROLOGUES_AARCH64: Final = ((0xD503245F,), (0xD503233F,), (0xD503201F,), ())  # bti c; paciasp; nop


def _hook_slot_aarch64(library: ElfFile, address: int) -> int | None:
    words = _words(library, address, 8)
    prologue = next(p for p in _PROLOGUES_AARCH64 if words[: len(p)] == p)
    at = len(prologue)
    # stp x29, x30, [sp, -16]!; mov x29, sp; bl; ldp x29, x30, [sp], 16; autiasp where paciasp was; ret
    end = (0xA8C17BFD, *((0xD50323BF,) if prologue == (0xD503233F,) else ()), 0xD65F03C0)
    if words[at : at + 2] != (0xA9BF7BFD, 0x910003FD) or words[at + 3 : at + 3 + len(end)] != end:
        return None
    target = _branch(address + 4 * (at + 2), words[at + 2], 0b100101)
    body = _words(library, target, 5) if target is not None else ()
    # adrp x0, page; ldr x0, [x0, low]; cbz x0, to the ret; b to the stub; ret
    if len(body) < 5 or (body[0] & 0x9F00001F, body[1] & 0xFFC003FF) != (0x90000000, 0xF9400000):
        return None
    if (body[2], body[3] >> 26, body[4]) != (0xB4000040, 0b000101, 0xD65F03C0):
        return None
    assert target is not None
    slot = _page(target, body[0]) + (body[1] >> 10 & 0xFFF) * 8
    stub = _branch(target + 12, body[3], 0b000101)
    return slot if stub is not None and _stub_slot_aarch64(library, stub, slot) else None


def _stub_slot_aarch64(library: ElfFile, stub: int, slot: int) -> bool:
    """Whether a stub of .plt jumps to what the slot's symbol is."""
    words = _words(library, stub, 5)
    words = words[1:] if words[:1] == (0xD503245F,) else words
    # adrp x16, page; ldr x17, [x16, low]
    if len(words) < 2 or (words[0] & 0x9F00001F, words[1] & 0xFFC003FF) != (0x90000010, 0xF9400211):
        return False
    start = stub + 4 * (len(_words(library, stub, 5)) - len(words))
    other = _page(start, words[0]) + (words[1] >> 10 & 0xFFF) * 8
    return _hooked(library, other) == _hooked(library, slot)


def _is_frame_dummy(library: ElfFile, address: int) -> bool:
    """Whether code is crtstuff's frame_dummy: a jump to register_tm_clones, which compares an address with itself and
    returns. Known for x86-64 and aarch64; on other machines every initializer counts as foreign."""
    recognize = _FRAME_DUMMIES.get(library.machine)
    return recognize is not None and recognize(library, address)


#: lea rdi, first; lea rsi, second; half of their distance in words; je to a ret: GCC from 8 on, and before.
_REGISTER_X86_64: Final = re.compile(
    rb"\x48\x8d\x3d" + _D32 + rb"\x48\x8d\x35" + _D32 + rb"(?:"
    rb"\x48\x29\xfe\x48\x89\xf0\x48\xc1\xee\x3f\x48\xc1\xf8\x03"
    rb"|\x55\x48\x29\xfe\x48\x89\xe5\x48\xc1\xfe\x03\x48\x89\xf0\x48\xc1\xe8\x3f"
    rb")\x48\x01\xc6\x48\xd1\xfe\x74([\x00-\x7f])"
)


def _is_frame_dummy_x86_64(library: ElfFile, address: int) -> bool:
    code = library.code_at(address, 16)
    start = 0
    for prologue in (b"\xf3\x0f\x1e\xfa", b"\x55\x48\x89\xe5\x5d"):  # endbr64; an old compiler's empty frame
        if code.startswith(prologue, start):
            start += len(prologue)
    width = {b"\xe9": 4, b"\xeb": 1}.get(code[start : start + 1])
    if width is None or len(code) < start + 1 + width:
        return False
    jump = int.from_bytes(code[start + 1 : start + 1 + width], "little", signed=True)
    target = address + start + 1 + width + jump
    match = _REGISTER_X86_64.match(library.code_at(target, 64))
    if match is None or _distance(match, 1, target) != _distance(match, 2, target):
        return False
    end = library.code_at(target + match.end() + match[3][0], 3)
    return end.removeprefix(b"\x5d").removeprefix(b"\xf3").startswith(b"\xc3")  # pop rbp; rep ret


#: Half of the distance from x0 to x1 in words, as GCC from 10 on, and before, writes it.
_DISTANCES_AARCH64: Final = (
    (0xCB000021, 0xD37FFC22, 0x8B810C41, 0x9341FC21),  # sub x1; lsr x2, x1, 63; add x1, x2, x1, asr 3; asr x1, 1
    (0xCB000021, 0x9343FC21, 0x8B41FC21, 0x9341FC21),  # sub x1; asr x1, 3; add x1, x1, x1, lsr 63; asr x1, 1
)


def _is_frame_dummy_aarch64(library: ElfFile, address: int) -> bool:
    words = _words(library, address, 2)
    if words[:1] in ((0xD503245F,), (0xD503233F,)):  # bti c; paciasp
        address, words = address + 4, words[1:]
    target = _branch(address, words[0], 0b000101) if words else None
    body = _words(library, target, 9) if target is not None else ()
    # adrp x0, page; add x0, x0, low; adrp x1, page; add x1, x1, low: equal but for the registers.
    if len(body) < 9 or (body[0] & 0x9F00001F, body[1] & 0xFFC003FF) != (0x90000000, 0x91000000):
        return False
    assert target is not None
    if (body[2] & 0x9F00001F, body[3] & 0xFFC003FF) != (0x90000001, 0x91000021) or body[1] >> 10 != body[3] >> 10:
        return False
    if _page(target, body[0]) != _page(target + 8, body[2]) or body[4:8] not in _DISTANCES_AARCH64:
        return False
    if body[8] & 0xFF80001F != 0xB4000001:  # cbz x1, forwards
        return False
    return _words(library, target + 32 + 4 * (body[8] >> 5 & 0x3FFFF), 1) == (0xD65F03C0,)  # ret


def _words(library: ElfFile, address: int, count: int) -> tuple[int, ...]:
    code = library.code_at(address, 4 * count)
    return tuple(int.from_bytes(code[at : at + 4], "little") for at in range(0, len(code) - 3, 4))


def _branch(address: int, word: int, opcode: int) -> int | None:
    """Where a `b` or `bl` leads; None where the word is another instruction."""
    offset = word & 0x3FFFFFF
    return None if word >> 26 != opcode else address + 4 * (offset - (1 << 26) if offset >> 25 else offset)


def _page(address: int, word: int) -> int:
    """The page that an `adrp` means."""
    pages = (word >> 5 & 0x7FFFF) << 2 | word >> 29 & 3
    return (address & ~0xFFF) + ((pages - (1 << 21) if pages >> 20 else pages) << 12)


_FRAME_DUMMIES: Final[dict[str, Callable[[ElfFile, int], bool]]] = {
    "x86_64": _is_frame_dummy_x86_64,
    "aarch64": _is_frame_dummy_aarch64,
}
_HOOK_SLOTS: Final[dict[str, Callable[[ElfFile, int], int | None]]] = {
    "x86_64": _hook_slot_x86_64,
    "aarch64": _hook_slot_aarch64,
}
