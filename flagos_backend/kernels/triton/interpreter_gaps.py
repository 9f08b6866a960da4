"""What Triton's interpreter cannot do with NumPy 2 and compiled kernels can, and what it does for nothing. loading.py
changes it before any launch."""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import TensorHandle

from flagos_backend.kernels.triton import interpreter_language


def close() -> None:
    """For kernels of anybody in this process, which has TRITON_INTERPRET=1 set."""
    interpreter._patch_lang_tensor = with_index(interpreter._patch_lang_tensor)
    interpreter_language.patch_once_a_launch(interpreter)
    drop_unread_checks(interpreter.interpreter_builder)
    interpreter._get_np_dtype = once_for_each_type(interpreter._get_np_dtype)
    builder = interpreter.InterpreterBuilder
    builder.get_all_ones_value = with_unsigned(builder.get_all_ones_value)
    if not _rounds_once():
        builder.create_fma = with_one_rounding(builder.create_fma)


def with_index(original: Callable[..., None]) -> Callable[..., None]:
    """A bound of a loop is an array of one element, which NumPy 2.4 makes no int of; Triton 3.6 leaves that to it."""

    def patch(tensor: Any, *rest: Any) -> None:
        original(tensor, *rest)
        tensor.__index__ = lambda value: int(value.handle.data.squeeze())

    return patch


def drop_unread_checks(builder: Any) -> None:
    """Each sum and product of integers is computed in 64 bits too, and compared with the bounds of its type, for an
    assertion that the interpreter makes in debug mode alone: a third of what a kernel takes."""
    if not builder.options.debug:
        builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)


def once_for_each_type(original: Callable[[Any], np.dtype[Any]]) -> Callable[[Any], np.dtype[Any]]:
    """NumPy's type for one of Triton's, or for a block's elements. Triton makes the table of all types for each
    question; of its types, those of one name are equal."""
    found: dict[str, np.dtype[Any]] = {}

    def dtype_of(kind: Any) -> np.dtype[Any]:
        name = kind.scalar.name
        if name not in found:
            found[name] = original(kind)
        return found[name]

    return dtype_of


def with_unsigned(original: Callable[..., Any]) -> Callable[..., Any]:
    """``~x`` is ``x ^ -1``: NumPy 2 makes no unsigned number of -1, and Triton 3.6 and 3.7 ask it to."""

    def all_ones(builder: Any, kind: Any) -> Any:
        dtype = interpreter._get_np_dtype(kind)
        if not np.issubdtype(dtype, np.unsignedinteger):
            return original(builder, kind)
        return TensorHandle(np.full(1, np.iinfo(dtype).max, dtype), kind.scalar)

    return all_ones


def _rounds_once() -> bool:
    """Whether ``fma`` keeps the digits of its product: in Triton 3.6 and 3.7 it is a multiplication and an addition."""
    x, z = (TensorHandle(np.array([value], np.float32), tl.float32) for value in (1 + 2.0**-12, -1 - 2.0**-11))
    return bool(interpreter.interpreter_builder.create_fma(x, x, z).data[0] == 2.0**-24)


def with_one_rounding(original: Callable[..., Any]) -> Callable[..., Any]:
    """The C library's ``fma`` for f32 and f64, an element at a time."""
    library = ctypes.CDLL("libm.so.6")
    functions = {}
    for dtype, name, kind in ((np.float32, "fmaf", ctypes.c_float), (np.float64, "fma", ctypes.c_double)):
        function = getattr(library, name)
        function.argtypes, function.restype = [kind] * 3, kind
        functions[np.dtype(dtype)] = np.frompyfunc(function, 3, 1)

    def create(builder: Any, x: Any, y: Any, z: Any) -> Any:
        function = functions.get(z.data.dtype)
        if function is None:
            return original(builder, x, y, z)
        return TensorHandle(np.asarray(function(x.data, y.data, z.data), z.data.dtype), z.dtype.scalar)

    return create
