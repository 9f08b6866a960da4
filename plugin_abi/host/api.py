"""Calls through the function table: arguments in, errors out as exceptions, and the values that cross in both ways.

The base of the host client; the objects of the ABI are built on it.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from plugin_abi import cabi
from plugin_abi.errors import FlagosStatusError, StatusCode
from plugin_abi.loader import Backend
from plugin_abi.negotiation import slots

Value = str | bytes | int | float | bool | Sequence[int]


class ElementType(enum.IntEnum):
    """The element types of the ABI, with the numbers of xla.PrimitiveType."""

    INVALID = 0
    PRED = 1
    S8 = 2
    S16 = 3
    S32 = 4
    S64 = 5
    U8 = 6
    U16 = 7
    U32 = 8
    U64 = 9
    F16 = 10
    F32 = 11
    F64 = 12
    C64 = 15
    BF16 = 16
    TOKEN = 17
    C128 = 18
    F8E5M2 = 19
    F8E4M3FN = 20
    S4 = 21
    U4 = 22
    F8E4M3B11FNUZ = 23
    F8E5M2FNUZ = 24
    F8E4M3FNUZ = 25
    S2 = 26
    U2 = 27
    F8E4M3 = 28
    F8E3M4 = 29
    S1 = 30
    U1 = 31
    F4E2M1FN = 32
    F8E8M0FNU = 33

    @property
    def item_size(self) -> int:
        """Bytes of one element in a dense array; sub-byte types take one."""
        return _ITEM_SIZES.get(self, 1)

    @classmethod
    def of_format(cls, format: str) -> ElementType:
        """The type of a buffer-protocol format. Raises ValueError where there is none."""
        kind = _FORMATS.get(format.lstrip("@="))
        if kind is None:
            raise ValueError(f"the buffer format {format!r} has no element type; pass element_type")
        return kind


_ITEM_SIZES: Final[dict[ElementType, int]] = {
    ElementType.INVALID: 0,
    ElementType.TOKEN: 0,
    **dict.fromkeys((ElementType.S16, ElementType.U16, ElementType.F16, ElementType.BF16), 2),
    **dict.fromkeys((ElementType.S32, ElementType.U32, ElementType.F32), 4),
    **dict.fromkeys((ElementType.S64, ElementType.U64, ElementType.F64, ElementType.C64), 8),
    ElementType.C128: 16,
}
_FORMATS: Final[dict[str, ElementType]] = {
    "?": ElementType.PRED,
    "b": ElementType.S8,
    "B": ElementType.U8,
    "h": ElementType.S16,
    "H": ElementType.U16,
    "i": ElementType.S32,
    "I": ElementType.U32,
    "l": ElementType.S64,
    "L": ElementType.U64,
    "q": ElementType.S64,
    "Q": ElementType.U64,
    "e": ElementType.F16,
    "f": ElementType.F32,
    "d": ElementType.F64,
    "Zf": ElementType.C64,
    "Zd": ElementType.C128,
}


class _ValueKind(enum.IntEnum):
    """Which member of a FlagosNamedValue is meaningful."""

    STRING = 0
    INT64 = 1
    INT64_LIST = 2
    DOUBLE = 3
    BOOL = 4


@dataclass(frozen=True)
class HostArray:
    """A dense row-major array in host memory, as a host callback sees it: results are to be filled in place."""

    data: memoryview
    dims: tuple[int, ...]
    element_type: ElementType


#: Called with the call's id, its arguments and its results. An exception fails the program that called.
HostCallback = Callable[[int, Sequence[HostArray], Sequence[HostArray]], None]


class KeyValueStore(Protocol):
    """A store that all processes of a job share."""

    def get(self, key: bytes, timeout_ms: int) -> bytes:
        """The value; raises KeyError when there is none and TimeoutError when none came in time."""

    def put(self, key: bytes, value: bytes) -> None:
        """Set a value; raises KeyError when the key has one."""


class Api:
    """The function table of a backend. Every call raises FlagosStatusError for an error that the backend returns."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.ffi: cabi.Ffi = cabi.ffi()
        #: The table may end before this host's header does: what lies beyond is not touched.
        self._functions: dict[str, Any] = {
            name: getattr(backend.api, name)
            for name, offset in slots(self.ffi).items()
            if offset + self.ffi.sizeof("void*") <= backend.api.struct_size
        }

    def has(self, slot: str) -> bool:
        """Whether the backend's table has this function."""
        return slot in self._functions

    def function(self, slot: str) -> Any:
        """A function of the table. Raises FlagosStatusError (UNIMPLEMENTED) where the backend is older than it."""
        function = self._functions.get(slot)
        if function is None:
            message = f"{slot} is not in the table of {self.backend.place} (ABI {self.backend.version})"
            raise FlagosStatusError(StatusCode.UNIMPLEMENTED, f"{message}. Install a newer build of the backend.")
        return function

    def new(self, struct: str, **fields: Any) -> Any:
        """A zeroed argument struct with its struct_size and these fields set."""
        args: Any = self.ffi.new(f"{struct}*")
        args.struct_size = self.ffi.sizeof(struct)
        for name, value in fields.items():
            setattr(args, name, value)
        return args

    def call(self, slot: str, args: Any) -> Any:
        """Call a function that returns an error; gives back `args` with its out fields written."""
        error = self.function(slot)(args)
        if error != self.ffi.NULL:
            raise self.take_error(error)
        return args

    # ---- Errors ----

    def take_error(self, error: Any) -> FlagosStatusError:
        """Turn an error handle into an exception and destroy it."""
        try:
            args = self.new("FlagosErrorDescribeArgs", error=error)
            self.function("error_describe")(args)
            payloads = self.raw_named_values(args.payloads, args.num_payloads)
            message = self.read_text(args.message, args.message_size)
            return FlagosStatusError(StatusCode.of(args.code), message, payloads)
        finally:
            self.function("error_destroy")(error)

    def make_error(self, error: BaseException | None) -> Any:
        """An error handle of the backend for an exception, to be given away; NULL for None."""
        if error is None:
            return self.ffi.NULL
        if isinstance(error, FlagosStatusError):
            code, text = error.code, error.message
        else:
            code, text = StatusCode.UNKNOWN, f"{type(error).__name__}: {error}"
        message = text.encode("utf-8", "replace")
        characters = self.ffi.new("char[]", message)
        args = self.new("FlagosErrorCreateArgs", message=characters, message_size=len(message), code=int(code))
        return self.call("error_create", args).error

    # ---- Values ----

    def read_text(self, pointer: Any, size: int | None = None) -> str:
        """A string that the backend owns: zero-terminated, or of `size` bytes."""
        if pointer == self.ffi.NULL:
            return ""
        data = self.ffi.string(pointer) if size is None else self.read_bytes(pointer, size)
        assert isinstance(data, bytes)
        return data.decode("utf-8", "replace")

    def read_bytes(self, pointer: Any, size: int) -> bytes:
        """A copy of bytes that the backend owns."""
        return bytes(self.ffi.buffer(self.ffi.cast("char*", pointer), size)) if size else b""

    def read_list(self, pointer: Any, count: int) -> list[Any]:
        """The elements of an array that the backend owns."""
        values = self.ffi.unpack(pointer, count) if count else []
        assert isinstance(values, list)
        return values

    def int64s(self, values: Sequence[int]) -> Any:
        """An int64 array for a call; NULL for an empty one."""
        return self.ffi.new("int64_t[]", [int(value) for value in values]) if len(values) else self.ffi.NULL

    def raw_named_values(self, pointer: Any, count: int) -> dict[str, bytes]:
        """Named byte strings, as error payloads are."""
        values = (pointer[index] for index in range(count))
        return {self.read_text(v.name, v.name_size): self.read_bytes(v.string_value, v.value_size) for v in values}

    def named_values(self, pointer: Any, count: int) -> dict[str, Value]:
        """The named values of a description, each in the type that its kind says."""
        return {
            self.read_text(value.name, value.name_size): self._value(value)
            for value in (pointer[i] for i in range(count))
        }

    def _value(self, value: Any) -> Value:
        if value.kind == _ValueKind.STRING:
            return self.read_text(value.string_value, value.value_size)
        if value.kind == _ValueKind.INT64:
            return int(value.int64_value)
        if value.kind == _ValueKind.INT64_LIST:
            return tuple(self.read_list(value.int64_list, value.value_size))
        return bool(value.bool_value) if value.kind == _ValueKind.BOOL else float(value.double_value)

    def make_named_values(self, values: Mapping[str, Value]) -> tuple[Any, list[Any]]:
        """An array of FlagosNamedValue for a call, and what must stay alive as long as the array is used."""
        array: Any = self.ffi.new("FlagosNamedValue[]", len(values)) if values else self.ffi.NULL
        kept: list[Any] = [array]
        for index, (name, value) in enumerate(values.items()):
            item = array[index]
            item.struct_size = self.ffi.sizeof("FlagosNamedValue")
            encoded = name.encode()
            item.name, item.name_size, item.value_size = self._keep(kept, "char[]", encoded), len(encoded), 1
            self._fill(item, value, kept)
        return array, kept

    def _keep(self, kept: list[Any], kind: str, value: Any) -> Any:
        kept.append(self.ffi.new(kind, value))
        return kept[-1]

    def _fill(self, item: Any, value: Value, kept: list[Any]) -> None:
        if isinstance(value, str | bytes):
            data = value.encode() if isinstance(value, str) else value
            item.kind, item.value_size = _ValueKind.STRING, len(data)
            item.string_value = self._keep(kept, "char[]", data)
        elif isinstance(value, bool):
            item.kind, item.bool_value = _ValueKind.BOOL, int(value)
        elif isinstance(value, int):
            item.kind, item.int64_value = _ValueKind.INT64, value
        elif isinstance(value, float):
            item.kind, item.double_value = _ValueKind.DOUBLE, value
        else:
            item.kind, item.value_size = _ValueKind.INT64_LIST, len(value)
            item.int64_list = self._keep(kept, "int64_t[]", list(value))
