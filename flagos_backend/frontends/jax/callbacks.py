"""Python functions that programs call back: how one enters a program (lowering) and how a call reaches it (running).

A program names its function by a number. The number is random, so a program that outlived its process (a cache, a
serialized executable) never meets another function.
"""

from __future__ import annotations

import json
import secrets
import traceback
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np

from flagos_backend.frontends.jax import jax_internals
from flagos_backend.frontends.jax.errors import HostCallbackFailed, HostCallbackGone

TARGET: Final = "flagos.host_callback"
#: XLA's partitioners know callbacks by these names alone: they keep a call without results on its device, or split it.
#: partition.py puts TARGET in their place again.
PLACEHOLDER: Final = "xla_ffi_python_cpu_callback"
PARTITIONED_PLACEHOLDER: Final = "xla_ffi_partitioned_python_cpu_callback"


class HostFunction:
    """A flat callback and what its program expects of it. JAX keeps it while an executable or a launch needs it."""

    __slots__ = ("__weakref__", "_callback", "_results", "id")

    def __init__(self, callback: Callable[..., Sequence[Any]], results: Sequence[Any]) -> None:
        self._callback = callback
        self._results = tuple((tuple(aval.shape), np.dtype(aval.dtype)) for aval in results)
        self.id = _register(self)

    def __call__(self, *arguments: np.ndarray) -> tuple[np.ndarray, ...]:
        """The function's results as arrays. Raises TypeError or ValueError where they are not what was declared."""
        outputs = self._callback(*arguments)
        if len(outputs) != len(self._results):
            raise ValueError(
                f"Mismatched number of outputs from callback. Expected: {len(self._results)}, Actual: {len(outputs)}"
            )
        return tuple(self._checked(index, output) for index, output in enumerate(outputs))

    def _checked(self, index: int, output: Any) -> np.ndarray:
        shape, dtype = self._results[index]
        array = np.asarray(jax_internals.canonicalize_value(np.asarray(output)))
        if array.shape != shape:
            raise ValueError(
                f"Incorrect output shape for return value #{index}: Expected: {shape}, Actual: {array.shape}"
            )
        if array.dtype != dtype:
            raise TypeError(
                f"Incorrect output dtype for return value #{index}: Expected: {dtype}, Actual: {array.dtype}"
            )
        return array


_functions: weakref.WeakValueDictionary[int, HostFunction] = weakref.WeakValueDictionary()


def _register(function: HostFunction) -> int:
    number = secrets.randbits(63)
    while number in _functions:
        number = secrets.randbits(63)
    _functions[number] = function
    return number


def call(number: int, arguments: Sequence[np.ndarray]) -> tuple[np.ndarray, ...]:
    """Calls the function with this number. Raises HostCallbackGone, or HostCallbackFailed with its traceback."""
    function = _functions.get(number)
    if function is None:
        raise HostCallbackGone(id=number, place="a program that is running")
    try:
        return function(*arguments)
    except BaseException as error:  # A boundary to the device: KeyboardInterrupt too ends the program that called.
        text = "".join(traceback.format_exception(error))
        shown = f"{type(error).__name__}: {error}"
        raise HostCallbackFailed(exception=shown, traceback=text) from error


def emit_python_callback(
    ctx: Any,
    callback: Callable[..., Sequence[Any]],
    token: Any | None,
    operands: Sequence[Any],
    operand_avals: Sequence[Any],
    result_avals: Sequence[Any],
    *,
    has_side_effect: bool,
    returns_token: bool = True,
    partitioned: bool = False,
    sharding: Any | None = None,
) -> jax_internals.EmittedCallback:
    """What JAX's function of this name does, for flagos: results, the next token and the callback's object."""
    del returns_token
    if partitioned and result_avals:
        raise ValueError("Partitioned callback not supported with return values.")
    function = HostFunction(callback, [jax_internals.physical_aval(aval) for aval in result_avals])
    jax_internals.add_host_callback(ctx, function)
    types = jax_internals.ir_types(ctx, result_avals)
    if token is not None:
        operands, types = [token, *operands], [jax_internals.token_type(), *types]
        if sharding is not None and result_avals:
            sharding = jax_internals.sharding_with_token(sharding)
    target = TARGET
    if sharding is not None and jax_internals.num_devices(ctx) > 1:
        target = PARTITIONED_PLACEHOLDER if partitioned else PLACEHOLDER
    config = json.dumps({"id": function.id})
    # XLA's partitioner for callbacks insists on layouts; a token has no dimensions.
    shapes = [[jax_internals.physical_aval(aval).shape for aval in avals] for avals in (operand_avals, result_avals)]
    prefix = [] if token is None else [0]
    ranks = ([*prefix, *map(len, shapes[0])], [*prefix, *map(len, shapes[1])])
    operation = jax_internals.custom_call(target, types, operands, config, has_side_effect=has_side_effect, ranks=ranks)
    if sharding is not None:
        jax_internals.set_sharding(ctx, operation, sharding)
    results = list(operation.results)
    return (results, None, function) if token is None else (results[1:], results[0], function)
