"""The two C functions that the PJRT adapter is given: one converts graphs, one calls Python functions of programs.

Both may be called from any thread and live until the process ends; nothing is ever raised through them.
"""

from __future__ import annotations

import functools
from typing import Any, Final

import ml_dtypes
import numpy as np

from flagos_backend.errors import FlagosBackendError, Interrupted, StatusCode
from flagos_backend.frontends.jax import callbacks, convert
from flagos_backend.ir.types import ElementType
from flagos_backend.process import defects
from plugin_abi import cabi
from plugin_abi.errors import FlagosStatusError
from plugin_abi.errors import StatusCode as HostStatusCode
from plugin_abi.host.api import Api

#: plugin_abi/pjrt/converter.h
_CONVERTER: Final = (
    "int32_t(void* user_data, const char* format, size_t format_size, const void* code, size_t code_size,"
    " const void* compile_options, size_t compile_options_size, FlagosBytesSink sink, void* sink_data)"
)
DTYPES: Final[dict[int, np.dtype[Any]]] = {
    int(kind): np.dtype(dtype)
    for kind, dtype in {
        ElementType.PRED: np.bool_,
        ElementType.S8: np.int8,
        ElementType.S16: np.int16,
        ElementType.S32: np.int32,
        ElementType.S64: np.int64,
        ElementType.U8: np.uint8,
        ElementType.U16: np.uint16,
        ElementType.U32: np.uint32,
        ElementType.U64: np.uint64,
        ElementType.F16: np.float16,
        ElementType.F32: np.float32,
        ElementType.F64: np.float64,
        ElementType.C64: np.complex64,
        ElementType.C128: np.complex128,
        ElementType.BF16: ml_dtypes.bfloat16,
        ElementType.F8E5M2: ml_dtypes.float8_e5m2,
        ElementType.F8E4M3FN: ml_dtypes.float8_e4m3fn,
        ElementType.F8E4M3B11FNUZ: ml_dtypes.float8_e4m3b11fnuz,
        ElementType.F8E5M2FNUZ: ml_dtypes.float8_e5m2fnuz,
        ElementType.F8E4M3FNUZ: ml_dtypes.float8_e4m3fnuz,
        ElementType.F8E4M3: ml_dtypes.float8_e4m3,
        ElementType.F8E3M4: ml_dtypes.float8_e3m4,
        ElementType.F8E8M0FNU: ml_dtypes.float8_e8m0fnu,
        ElementType.F4E2M1FN: ml_dtypes.float4_e2m1fn,
        ElementType.S4: ml_dtypes.int4,
        ElementType.U4: ml_dtypes.uint4,
        ElementType.S2: ml_dtypes.int2,
        ElementType.U2: ml_dtypes.uint2,
    }.items()
}


def _bytes(pointer: Any, size: int) -> bytes:
    ffi = cabi.ffi()
    return bytes(ffi.buffer(ffi.cast("char*", pointer), size)) if size else b""


def _failure(error: BaseException) -> tuple[StatusCode, str]:
    """Status code and message of any exception."""
    if isinstance(error, KeyboardInterrupt):
        error = Interrupted()
    if isinstance(error, FlagosBackendError):
        return error.code, str(error)
    return StatusCode.INTERNAL, defects.describe(error)


def _on_convert(
    _user_data: Any,
    format: Any,
    format_size: int,
    code: Any,
    code_size: int,
    options: Any,
    options_size: int,
    sink: Any,
    sink_data: Any,
) -> int:
    try:
        name = _bytes(format, format_size).decode("utf-8", "replace")
        status, answer = StatusCode.OK, convert.convert(name, _bytes(code, code_size), _bytes(options, options_size))
    except BaseException as error:  # A boundary to C: every exception, of whatever kind, becomes a status.
        status, text = _failure(error)
        answer = _encoded(text)
    sink(sink_data, cabi.ffi().from_buffer(answer), len(answer))
    return int(status)


def _encoded(text: str) -> bytes:
    return text.encode("utf-8", "backslashreplace")


def _on_lost_conversion(_kind: Any, error: BaseException, traceback: Any) -> int:
    """Ctrl-C as ``_on_convert`` begins or returns, which is outside of every ``try`` of it. Without an answer cffi
    would tell C that all went well."""
    status, text = _failure(error)
    answer, given = _encoded(text), traceback.tb_frame.f_locals
    given["sink"](given["sink_data"], cabi.ffi().from_buffer(answer), len(answer))
    return int(status)


def _array(host_array: Any) -> np.ndarray:
    """A view of a FlagosHostArray, dense and row major. Raises KeyError for an element type that NumPy cannot hold."""
    ffi = cabi.ffi()
    dims = tuple(ffi.unpack(host_array.dims, host_array.rank)) if host_array.rank else ()
    dtype = DTYPES[host_array.element_type]
    memory: Any = b""
    if host_array.size_bytes:
        memory = ffi.buffer(ffi.cast("char*", host_array.data), host_array.size_bytes)
    return np.frombuffer(memory, dtype=dtype).reshape(dims)


def _argument(host_array: Any) -> np.ndarray:
    # A copy: the memory is lent for the call, and what a Python function is given it may keep.
    array = _array(host_array).copy()
    array.flags.writeable = False
    return array


def _host_callback(api: Api) -> Any:
    def on_host_callback(
        _: Any, number: int, arguments: Any, num_arguments: int, results: Any, num_results: int
    ) -> Any:
        try:
            values = callbacks.call(number, [_argument(arguments[index]) for index in range(num_arguments)])
            for index in range(num_results):
                if results[index].size_bytes:
                    _array(results[index])[...] = values[index]
        except (
            BaseException
        ) as error:  # A boundary to C: every exception, of whatever kind, ends the program that called.
            return failed(error)
        return cabi.ffi().NULL

    def failed(error: BaseException) -> Any:
        status, message = _failure(error)
        return api.make_error(FlagosStatusError(HostStatusCode(int(status)), message))

    # What comes outside of the ``try``, as Ctrl-C may: without it C would take results that nobody wrote.
    def on_lost(_kind: Any, error: BaseException, _traceback: Any) -> Any:
        return failed(error)

    return cabi.ffi().callback("FlagosHostCallback", on_host_callback, onerror=on_lost)


_kept: list[Any] = []


def _address(callback: Any) -> int:
    _kept.append(callback)
    return int(cabi.ffi().cast("uintptr_t", callback))


@functools.cache
def converter_address() -> int:
    """The address of the process's FlagosGraphConverter."""
    lost = int(StatusCode.CANCELLED)  # where Ctrl-C is pressed again as the first one is answered
    on_lost: Any = _on_lost_conversion  # cffi takes what it returns, which its types leave out
    return _address(cabi.ffi().callback(_CONVERTER, _on_convert, error=lost, onerror=on_lost))


@functools.cache
def host_callback_address(api: Api) -> int:
    """The address of a FlagosHostCallback whose errors are made by this backend."""
    return _address(_host_callback(api))
