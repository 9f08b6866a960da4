"""Python functions behind programs: checked results, errors with their traceback, lifetimes, and the C functions."""

from __future__ import annotations

import contextlib
import gc
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from flagos_backend.errors import Interrupted, StatusCode
from flagos_backend.frontends.jax import callbacks, trampolines
from flagos_backend.frontends.jax.errors import HostCallbackFailed, HostCallbackGone
from flagos_backend.importer import schema
from plugin_abi import cabi
from plugin_abi.errors import StatusCode as HostStatusCode
from plugin_abi.host.api import ElementType
from unit.jax.artifacts import artifact, compile_options

F32 = jax.ShapeDtypeStruct((2,), jnp.float32)


def test_a_call_reaches_its_function() -> None:
    function = callbacks.HostFunction(lambda x: (x * 2,), [F32])
    (result,) = callbacks.call(function.id, [np.array([1, 2], np.float32)])
    np.testing.assert_array_equal(result, [2, 4])


def test_numbers_differ_and_fit_an_int64() -> None:
    functions = [callbacks.HostFunction(lambda: (), []) for _ in range(100)]
    assert len({function.id for function in functions}) == 100
    assert all(0 <= function.id < 2**63 for function in functions)


def test_a_function_lives_as_long_as_its_program() -> None:
    function = callbacks.HostFunction(lambda: (), [])
    number, watched = function.id, weakref.ref(function)
    del function
    gc.collect()
    assert watched() is None
    with pytest.raises(HostCallbackGone, match=f"host callback {number} is not in this process"):
        callbacks.call(number, [])


@pytest.mark.parametrize(
    ("result", "message"),
    [
        ((), "Mismatched number of outputs from callback. Expected: 1, Actual: 0"),
        ((np.zeros(3, np.float32),), r"Incorrect output shape for return value #0: Expected: \(2,\), Actual: \(3,\)"),
        ((np.zeros(2, np.int32),), "Incorrect output dtype for return value #0: Expected: float32, Actual: int32"),
    ],
    ids=["count", "shape", "dtype"],
)
def test_results_that_are_not_what_was_declared_are_refused(result: Any, message: str) -> None:
    function = callbacks.HostFunction(lambda: result, [F32])
    with pytest.raises(HostCallbackFailed, match=message):
        callbacks.call(function.id, [])


def test_an_exception_keeps_its_traceback() -> None:
    def culprit() -> Any:
        raise ZeroDivisionError("of all things")

    function = callbacks.HostFunction(culprit, [])
    with pytest.raises(HostCallbackFailed, match="ZeroDivisionError: of all things") as caught:
        callbacks.call(function.id, [])
    assert "in culprit" in str(caught.value)
    assert caught.value.code is StatusCode.INTERNAL


# ---- The C functions -----------------------------------------------------------------------------------------------

ffi = cabi.ffi()


class FakeApi:
    """The one function of a backend's table that the callback needs."""

    def __init__(self) -> None:
        self.errors: list[Any] = []

    def make_error(self, error: Any) -> Any:
        self.errors.append(error)
        return ffi.cast("FlagosError*", len(self.errors))


@pytest.fixture
def api() -> Iterator[FakeApi]:
    yield FakeApi()


def host_callback(api: FakeApi) -> Any:
    return ffi.cast("FlagosHostCallback", trampolines.host_callback_address(api))


def host_array(array: np.ndarray, kind: ElementType, kept: list[Any]) -> dict[str, Any]:
    dims = ffi.new("int64_t[]", list(array.shape))
    kept += [array, dims]
    data = ffi.cast("void*", array.ctypes.data)
    return {
        "struct_size": ffi.sizeof("FlagosHostArray"),
        "data": data,
        "size_bytes": array.nbytes,
        "dims": dims,
        "rank": array.ndim,
        "element_type": int(kind),
    }


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        (ElementType.F32, np.float32),
        (ElementType.PRED, np.bool_),
        (ElementType.U64, np.uint64),
        (ElementType.C64, np.complex64),
        (ElementType.BF16, ml_dtypes.bfloat16),
        (ElementType.F8E4M3FN, ml_dtypes.float8_e4m3fn),
        (ElementType.S4, ml_dtypes.int4),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
@pytest.mark.parametrize("shape", [(2, 3), (), (0, 4)], ids=str)
def test_arrays_cross_the_boundary(
    api: FakeApi, rng: np.random.Generator, kind: ElementType, dtype: Any, shape: tuple[int, ...]
) -> None:
    given = np.asarray(rng.integers(0, 2, shape)).astype(dtype)
    seen: list[np.ndarray] = []
    function = callbacks.HostFunction(
        lambda x: (seen.append(x) or x,), [SimpleNamespace(shape=shape, dtype=np.dtype(dtype))]
    )
    with jax.enable_x64(True):
        result, kept = np.empty(shape, dtype), []
        arguments = ffi.new("FlagosHostArray[]", [host_array(given, kind, kept)])
        results = ffi.new("FlagosHostArray[]", [host_array(result, kind, kept)])
        error = host_callback(api)(ffi.NULL, function.id, arguments, 1, results, 1)
    assert not api.errors
    assert error == ffi.NULL
    assert result.tobytes() == given.tobytes()
    assert not seen[0].flags.writeable
    assert not np.shares_memory(seen[0], given)


@pytest.mark.parametrize("exception", [ValueError("wrong"), KeyboardInterrupt(), SystemExit(3)], ids=repr)
def test_no_exception_crosses_the_boundary(api: FakeApi, exception: BaseException) -> None:
    def raises() -> Any:
        raise exception

    function = callbacks.HostFunction(raises, [])
    error = host_callback(api)(ffi.NULL, function.id, ffi.NULL, 0, ffi.NULL, 0)
    assert error != ffi.NULL
    (reported,) = api.errors
    assert type(exception).__name__ in reported.message


def test_the_callback_may_come_from_any_thread(api: FakeApi) -> None:
    names: list[str] = []
    function = callbacks.HostFunction(lambda: names.append(threading.current_thread().name) or (), [])
    pointer = host_callback(api)
    threads = [
        threading.Thread(target=pointer, args=(ffi.NULL, function.id, ffi.NULL, 0, ffi.NULL, 0), name=str(n))
        for n in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(names) == ["0", "1", "2", "3"]


@contextlib.contextmanager
def interrupted(function: str, when: Callable[[], bool]) -> Iterator[None]:
    """Ctrl-C in a function of this name, as soon as ``when`` holds: as it begins, or before a later line."""

    def trace(frame: Any, event: str, _argument: Any) -> Any:
        if frame.f_code.co_name != function:
            return None
        if when():
            raise KeyboardInterrupt  # which ends the tracing
        return trace

    sys.settrace(trace)
    try:
        yield
    finally:
        assert sys.gettrace() is None, f"{function} was not reached"
        sys.settrace(None)


def test_ctrl_c_around_a_callback_is_an_error(api: FakeApi) -> None:
    function = callbacks.HostFunction(lambda: (), [])
    pointer = host_callback(api)
    with interrupted("on_host_callback", lambda: True):
        error = pointer(ffi.NULL, function.id, ffi.NULL, 0, ffi.NULL, 0)
    assert error != ffi.NULL
    (reported,) = api.errors
    assert reported.code is HostStatusCode.CANCELLED


CONVERTER = "int32_t(*)(void*, const char*, size_t, const void*, size_t, const void*, size_t, FlagosBytesSink, void*)"


def run_converter(format: bytes, code: bytes, options: bytes, received: list[bytes] | None = None) -> tuple[int, bytes]:
    """The status and the bytes of one call through the function's address. ``received`` gets each answer."""
    answers = [] if received is None else received
    sink = ffi.callback("FlagosBytesSink", lambda _, data, size: answers.append(bytes(ffi.buffer(data, size))))
    function = ffi.cast(CONVERTER, trampolines.converter_address())
    status = function(ffi.NULL, format, len(format), code, len(code), options, len(options), sink, ffi.NULL)
    if received is None:
        assert len(answers) == 1
    return status, answers[-1]


def test_the_converter_sinks_a_program(lower: Callable[..., Any]) -> None:
    status, answer = run_converter(b"mlir", artifact(lower(jnp.sin, F32)), compile_options())
    assert status == 0
    assert schema.Program.FromString(answer).module.name == "jit_sin"


@pytest.mark.parametrize(
    ("format", "message"),
    [(b"mlir", "not valid StableHLO"), (b"\xff\xfe", "Unknown program format"), (b"", "Unknown program format")],
)
def test_the_converter_sinks_a_message(format: bytes, message: str) -> None:
    status, answer = run_converter(format, b"nonsense", compile_options())
    assert status == StatusCode.INVALID_ARGUMENT
    assert message in answer.decode()


def test_a_defect_of_the_converter_is_a_status_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> bytes:
        raise MemoryError("no more")

    monkeypatch.setattr("flagos_backend.frontends.jax.convert.convert", broken)
    status, answer = run_converter(b"mlir", b"", b"")
    assert status == StatusCode.INTERNAL
    assert "MemoryError: no more" in answer.decode()


@pytest.mark.parametrize("late", [False, True], ids=["as it begins", "after its answer"])
def test_ctrl_c_around_the_converter_is_a_status(lower: Callable[..., Any], late: bool) -> None:
    code, options, received = artifact(lower(jnp.sin, F32)), compile_options(), []
    with interrupted("_on_convert", lambda: bool(received) is late):
        status, answer = run_converter(b"mlir", code, options, received)
    assert len(received) == 1 + late
    assert status == StatusCode.CANCELLED
    assert f"[FLAGOS-{Interrupted.number}]" in answer.decode()
