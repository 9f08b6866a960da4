"""The PJRT adapter called through its table, as jaxlib calls it, with cffi over the declarations of abi/*.csv."""

from __future__ import annotations

import functools
import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import cffi
import numpy as np

from plugin_abi import cabi

ROOT = Path(__file__).resolve().parents[2]
LIBRARY = "lib/libpjrt_flagos.so"


def _load_generator() -> Any:
    """plugin_abi/pjrt/generate.py of this source tree: a wheel does not hold it."""
    spec = importlib.util.spec_from_file_location("pjrt_generate", ROOT / "plugin_abi" / "pjrt" / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


generate = _load_generator()
abi = generate.load()
CODES = {value: name.removeprefix("PJRT_Error_Code_") for name, value in abi.enums["PJRT_Error_Code"].items()}


@functools.cache
def ffi() -> cffi.FFI:
    ffi = cffi.FFI()
    ffi.cdef("\n".join(generate.declarations(abi)) + "\nconst PJRT_Api* GetPjrtApi(void);")
    return ffi


def library_path() -> Path:
    import plugin_abi

    return Path(plugin_abi.__path__[0]) / LIBRARY


class PjrtError(Exception):
    """A PJRT_Error, read and destroyed."""

    def __init__(self, code: str, message: str, payloads: Mapping[str, bytes]) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code
        self.message = message
        self.payloads = dict(payloads)


class Pjrt:
    """One PJRT_Api. Arguments are structs sized as a caller of this version sizes them."""

    def __init__(self, path: Path | None = None) -> None:
        self.library = ffi().dlopen(str(path or library_path()))
        self.api = self.library.GetPjrtApi()

    def new(self, struct: str, **fields: Any) -> Any:
        made = ffi().new(f"{struct}*")
        if abi.structs[struct].fields[0].name == "struct_size":
            made.struct_size = abi.structs[struct].unpadded_size
        for name, value in fields.items():
            setattr(made, name, value)
        return made

    def call(self, function: str, **fields: Any) -> Any:
        """The filled argument struct.

        Raises:
            PjrtError: the function returned an error.
        """
        return self.call_with(function, self.new(f"{function}_Args", **fields))

    def call_with(self, function: str, args: Any, table: Any = None) -> Any:
        error = getattr(table or self.api, function)(args)
        if error != ffi().NULL:
            raise self.take_error(error)
        return args

    def take_error(self, error: Any) -> PjrtError:
        code = self.call("PJRT_Error_GetCode", error=error).code
        message = self.new("PJRT_Error_Message_Args", error=error)
        self.api.PJRT_Error_Message(message)
        payloads: dict[str, bytes] = {}

        @ffi().callback("PJRT_Error_PayloadVisitor")
        def visit(key: Any, key_size: int, value: Any, value_size: int, _user_arg: Any) -> None:
            payloads[ffi().buffer(key, key_size)[:].decode()] = ffi().buffer(value, value_size)[:]

        self.call("PJRT_Error_ForEachPayload", error=error, visitor=visit)
        taken = PjrtError(CODES[code], text(message.message, message.message_size), payloads)
        self.api.PJRT_Error_Destroy(self.new("PJRT_Error_Destroy_Args", error=error))
        return taken

    def extension(self, type_name: str, struct: str) -> Any:
        """The extension of the table with this type, or None."""
        wanted = abi.enums["PJRT_Extension_Type"][f"PJRT_Extension_Type_{type_name}"]
        base = self.api.extension_start
        while base != ffi().NULL:
            if int(ffi().cast("int", base.type)) == wanted:
                return ffi().cast(f"{struct}*", base)
            base = base.next
        return None

    def named_values(self, values: Mapping[str, Any]) -> tuple[Any, list[Any]]:
        """A PJRT_NamedValue array, and what must live as long as it."""
        array = ffi().new("PJRT_NamedValue[]", len(values))
        kept: list[Any] = [array]
        for item, (name, value) in zip(array, values.items(), strict=True):
            item.struct_size = abi.structs["PJRT_NamedValue"].unpadded_size
            kept.append(name_bytes := ffi().from_buffer(name.encode()))
            item.name, item.name_size, item.value_size = ffi().cast("char*", name_bytes), len(name), 1
            if isinstance(value, bool):
                item.type, item.bool_value = 4, value
            elif isinstance(value, int):
                item.type, item.int64_value = 1, value
            elif isinstance(value, float):
                item.type, item.float_value = 3, value
            elif isinstance(value, str):
                kept.append(content := ffi().from_buffer(value.encode()))
                item.type, item.string_value, item.value_size = 0, ffi().cast("char*", content), len(value)
            else:
                kept.append(numbers := ffi().new("int64_t[]", list(value)))
                item.type, item.int64_array_value, item.value_size = 2, numbers, len(value)
        return array, kept

    # ---- Events ----

    def wait(self, event: Any) -> None:
        """Waits and destroys the event.

        Raises:
            PjrtError: the event failed.
        """
        try:
            self.call("PJRT_Event_Await", event=event)
        finally:
            self.call("PJRT_Event_Destroy", event=event)

    def on_ready(self, event: Any, function: Callable[[PjrtError | None], None]) -> Any:
        """Keep what this returns until the callback ran."""

        @ffi().callback("PJRT_Event_OnReadyCallback")
        def callback(error: Any, _user_arg: Any) -> None:
            function(None if error == ffi().NULL else self.take_error(error))

        self.call("PJRT_Event_OnReady", event=event, callback=callback)
        return callback


def text(pointer: Any, size: int) -> str:
    return ffi().buffer(pointer, size)[:].decode()


def pointer_to(array: np.ndarray) -> Any:
    return ffi().cast("void*", array.ctypes.data)


def int64s(values: Sequence[int]) -> Any:
    return ffi().new("int64_t[]", list(values))


#: PJRT_Buffer_Type of NumPy dtypes, by name (ml_dtypes included).
TYPES = {
    "bool": "PRED", "int8": "S8", "int16": "S16", "int32": "S32", "int64": "S64", "uint8": "U8", "uint16": "U16",
    "uint32": "U32", "uint64": "U64", "float16": "F16", "float32": "F32", "float64": "F64", "bfloat16": "BF16",
    "complex64": "C64", "complex128": "C128", "float8_e5m2": "F8E5M2", "float8_e4m3fn": "F8E4M3FN",
    "float8_e4m3b11fnuz": "F8E4M3B11FNUZ", "float8_e5m2fnuz": "F8E5M2FNUZ", "float8_e4m3fnuz": "F8E4M3FNUZ",
    "float8_e4m3": "F8E4M3", "float8_e3m4": "F8E3M4", "float8_e8m0fnu": "F8E8M0FNU", "float4_e2m1fn": "F4E2M1FN",
    "int4": "S4", "uint4": "U4", "int2": "S2", "uint2": "U2",
}  # fmt: skip


def buffer_type(dtype: Any) -> int:
    return abi.enums["PJRT_Buffer_Type"]["PJRT_Buffer_Type_" + TYPES[np.dtype(dtype).name]]


class FlagosTable:
    """A copy of a backend's function table, in which slots can be replaced."""

    def __init__(self, address: int) -> None:
        self.ffi = cabi.ffi()
        self.original = self.ffi.cast("FlagosApi*", address)
        self.copy = self.ffi.new("FlagosApi*", self.original[0])
        self.kept: list[Any] = []

    @property
    def address(self) -> int:
        return int(self.ffi.cast("intptr_t", self.copy))

    def replace(self, slot: str, function: Callable[..., Any]) -> None:
        callback = self.ffi.callback(self.ffi.typeof(getattr(self.copy, slot)), function)
        self.kept.append(callback)
        setattr(self.copy, slot, callback)

    def restore(self) -> None:
        self.copy[0] = self.original[0]

    def make_error(self, code: int, message: str, payloads: Mapping[str, bytes] | None = None) -> Any:
        content = message.encode()
        args = self.ffi.new("FlagosErrorCreateArgs*")
        args.struct_size, args.code, args.message_size = self.ffi.sizeof("FlagosErrorCreateArgs"), code, len(content)
        args.message = kept = self.ffi.new("char[]", content)
        assert self.original.error_create(args) == self.ffi.NULL
        del kept
        return args.error

    def fail(self, slot: str, code: int, message: str) -> None:
        """From now on the slot returns this error and does nothing else."""
        self.replace(slot, lambda _args: self.make_error(code, message))
