"""Which code of a library dlopen would run, beyond what the compiler itself puts into every library.

Serves policy. The compiler's own is crtstuff.c's frame_dummy (GCC: libgcc/crtstuff.c), known by name or by its code.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from plugin_abi.elf import ElfFile


def foreign_initializers(library: ElfFile) -> tuple[str, ...]:
    """What dlopen would run beyond the compiler's own frame_dummy, by name where the library still has names."""
    addresses = list(library.initializers())
    known = [address for address in addresses if address is not None]
    names = library.function_names(frozenset(known))
    foreign = []
    for address in addresses:
        if address is None:
            foreign.append("an external function")
        elif names.get(address) != "frame_dummy" and not (address not in names and _is_frame_dummy(library, address)):
            foreign.append(names.get(address, f"{address:#x}"))
    return tuple(foreign)


def _is_frame_dummy(library: ElfFile, address: int) -> bool:
    """Whether unnamed code is crtstuff's frame_dummy: a jump to register_tm_clones, which begins by comparing an
    address with itself. Known for x86-64 and aarch64; on other machines an unnamed initializer counts as foreign."""
    recognize = _FRAME_DUMMIES.get(library.machine)
    return recognize is not None and recognize(library, address)


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
    body = library.code_at(target, 14)
    if len(body) < 14 or body[0:3] != b"\x48\x8d\x3d" or body[7:10] != b"\x48\x8d\x35":  # lea rdi; lea rsi
        return False
    first = target + 7 + int.from_bytes(body[3:7], "little", signed=True)
    second = target + 14 + int.from_bytes(body[10:14], "little", signed=True)
    return first == second


def _is_frame_dummy_aarch64(library: ElfFile, address: int) -> bool:
    words = _words(library, address, 2)
    if words[:1] in ((0xD503245F,), (0xD503233F,)):  # bti c; paciasp
        address, words = address + 4, words[1:]
    if not words or words[0] >> 26 != 0b000101:  # b
        return False
    offset = words[0] & 0x3FFFFFF
    body = _words(library, address + 4 * (offset - (1 << 26) if offset >> 25 else offset), 4)
    # adrp x0, page; add x0, x0, low; adrp x1, page; add x1, x1, low: equal but for the registers.
    if len(body) < 4 or body[0] & 0x9F000000 != 0x90000000 or body[1] >> 22 != 0b1001000100:
        return False
    return body[0] >> 5 == body[2] >> 5 and body[1] >> 10 == body[3] >> 10


def _words(library: ElfFile, address: int, count: int) -> tuple[int, ...]:
    code = library.code_at(address, 4 * count)
    return tuple(int.from_bytes(code[at : at + 4], "little") for at in range(0, len(code) - 3, 4))


_FRAME_DUMMIES: Final[dict[str, Callable[[ElfFile, int], bool]]] = {
    "x86_64": _is_frame_dummy_x86_64,
    "aarch64": _is_frame_dummy_aarch64,
}
