"""Whether products of f32 are rounded to TF32. torch has switches of the process for that, as no call of cuBLAS through
ATen says so itself. Used by what multiplies on CUDA devices: kernels/vendor, kernels/reference.

Whoever relies on a switch is alone with it until its kernels are enqueued: another thread that turns it would take
digits from its products. That is a lock around microseconds, and no replay of a graph comes here. What the user
computes with torch in other threads meanwhile goes by the switch as it is turned here.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from flagos_backend.process.torch_loading import torch

_TENSOR_FLOAT, _EXACT, _INHERITED = "tf32", "ieee", "none"
# Held again by the same thread: a product may run a signal's handler, or a finalizer, that multiplies.
_lock = threading.RLock()


@contextmanager
def relied_on() -> Iterator[None]:
    """Products inside go by the switch as the user set it."""
    with _lock:
        yield


def is_set() -> bool:
    """Whether the user lets matrix products of f32 be rounded."""
    with _lock:
        return _is_on()


@contextmanager
def products(allowed: bool) -> Iterator[None]:
    """Matrix products of f32 and c64 inside are rounded to TF32 if that is ``allowed``."""
    with _lock:
        put_back = _nothing if _is_on() is allowed else _turn_products(allowed)
        try:
            yield
        finally:
            put_back()


@contextmanager
def exact_convolutions() -> Iterator[None]:
    """Convolutions of f32 inside are not rounded to TF32; by default cuDNN's are. Where it has none for one they are
    matrix products."""
    with products(False):
        put_back = _turn_convolutions_off()
        try:
            yield
        finally:
            put_back()


def _nothing() -> None:
    pass


def _is_on() -> bool:
    return bool(torch.backends.cuda.matmul.fp32_precision == _TENSOR_FLOAT)


def _turn_products(allowed: bool) -> Callable[[], None]:
    """Returns what puts the switch back. It has an old name and a new one; where they disagree, torch raises when it is
    asked by the old one: so they never do because of this."""
    switch = torch.backends.cuda.matmul
    before = switch.fp32_precision
    # A setting that only follows that of all of CUDA goes on to follow it.
    restored = _INHERITED if before == torch.backends.cudnn.fp32_precision else before

    def put_new_back() -> None:
        switch.fp32_precision = restored

    try:
        is_medium = switch.allow_tf32 and torch.get_float32_matmul_precision() == "medium"
    except RuntimeError:  # the user has only set the new one
        switch.fp32_precision = _TENSOR_FLOAT if allowed else _EXACT
        return put_new_back

    def put_back() -> None:
        if is_medium:
            torch.set_float32_matmul_precision("medium")
        else:
            switch.allow_tf32 = not allowed
        put_new_back()

    switch.allow_tf32 = allowed
    return put_back


def _turn_convolutions_off() -> Callable[[], None]:
    """Returns what puts the switch back."""
    switch = torch.backends.cudnn.conv  # type: ignore[attr-defined]
    before = switch.fp32_precision
    if before != _TENSOR_FLOAT:
        return _nothing
    switch.fp32_precision = _EXACT

    def put_back() -> None:
        switch.fp32_precision = before

    return put_back
