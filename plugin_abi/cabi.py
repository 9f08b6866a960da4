"""The plugin ABI for cffi, made from the text of the header itself: one source of truth for Python and C.

Serves the loader, the trial load and the host client. A process that loads a backend parses no C: `abi_types` holds
what cffi made of the header (`python -m plugin_abi.layout --write`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from plugin_abi import abi_types

if TYPE_CHECKING:
    import _cffi_backend
    import cffi

#: One over this package's header, or one that parsed a header itself.
Ffi: TypeAlias = "_cffi_backend.FFI | cffi.FFI"

HEADER: Final = Path(__file__).parent / "include" / "flagos" / "plugin_abi.h"
_CPLUSPLUS_BLOCK: Final = re.compile(r"^#ifdef __cplusplus$.*?^#endif$", re.MULTILINE | re.DOTALL)
_DIRECTIVE: Final = re.compile(r"^\s*#.*$", re.MULTILINE)
_ENTRY_DECLARATION: Final = "int32_t flagos_plugin_entry(FlagosEntryArgs* args);"


def declarations(header: str) -> str:
    """The C declarations of a header's text, as cffi reads them: no preprocessor lines, no C++ parts."""
    return _DIRECTIVE.sub("", _CPLUSPLUS_BLOCK.sub("", header))


def ffi_from_header(header: str) -> cffi.FFI:
    """An FFI over a plugin_abi.h; another minor version's text gives the FFI of a host of that version."""
    import cffi  # with its C parser, some 60 ms: for whoever has another header

    ffi = cffi.FFI()
    ffi.cdef(declarations(header) + _ENTRY_DECLARATION)
    return ffi


def ffi() -> _cffi_backend.FFI:
    """The FFI of this package's own header. There is one: another's types are others."""
    return abi_types.ffi


@dataclass(frozen=True)
class FieldLayout:
    """Where one field lies."""

    name: str
    offset: int
    size: int
    type: str


@dataclass(frozen=True)
class StructLayout:
    """Where the fields of one struct lie, in bytes, on this machine."""

    name: str
    size: int
    alignment: int
    fields: tuple[FieldLayout, ...]

    def field(self, name: str) -> FieldLayout:
        return next(field for field in self.fields if field.name == name)


def struct_layout(ffi: Ffi, name: str) -> StructLayout:
    """The layout of one struct of the header."""
    fields: list[tuple[str, Any]] = ffi.typeof(name).fields
    return StructLayout(
        name,
        ffi.sizeof(name),
        ffi.alignof(name),
        tuple(FieldLayout(n, f.offset, ffi.sizeof(f.type), f.type.cname) for n, f in fields),
    )


def struct_names(header: str) -> tuple[str, ...]:
    """The names of all structs that a header defines, in its order."""
    pattern = re.compile(r"^(?:typedef )?struct (Flagos[A-Za-z]+) \{", re.MULTILINE)
    return tuple(pattern.findall(header))


def layouts(ffi: Ffi, header: str) -> Iterator[StructLayout]:
    """The layout of every struct that a header defines."""
    return (struct_layout(ffi, name) for name in struct_names(header))


def constants(ffi: Ffi, header: str) -> dict[str, int]:
    """The enumerators of a header by name, in its order."""
    names = re.findall(r"\b(FLAGOS_[A-Z0-9_]+) = -?[0-9]+", header)
    library: Any = ffi.dlopen(None)
    return {name: getattr(library, name) for name in names}
