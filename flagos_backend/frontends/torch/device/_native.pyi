from collections.abc import Callable
from typing import Any

from torch import Tensor

class Kernel:
    def __init__(
        self,
        name: str,
        inner: Callable[..., Any],
        inner_number: Callable[..., Any] | None,
        tensor_positions: int,
        generator: tuple[int, str],
        flags: int,
        written: tuple[tuple[int, str], ...],
        returns: tuple[int, ...],
    ) -> None: ...
    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...
    @property
    def name(self) -> str: ...
    @property
    def inner(self) -> Callable[..., Any]: ...
    @property
    def flags(self) -> int: ...

def open(tensor_type: type, out_of_memory: type, inner: tuple[int, int], /) -> None: ...
def is_open() -> bool: ...
def refuse(message: str, /) -> None: ...
def configure(
    *,
    device_type: type,
    devices: tuple[Any, ...],
    inner_device: Any,
    is_conj: str,
    is_neg: str,
    conjugate: Callable[..., Any],
    negate: Callable[..., Any],
    resolve: Callable[..., Any],
    generator: Any,
    is_guarded: tuple[Callable[[], bool], ...],
    guarded: Callable[..., Any],
    refuse: Callable[..., Any],
    refuse_device: Callable[..., Any],
    check_generator: Callable[..., Any],
    adopt: Callable[..., Any],
    share: Callable[..., Any],
    resize: Callable[..., Any],
) -> None: ...
def install_guard() -> None: ...
def wrap(inner: Tensor, counted: bool = True, /) -> Tensor: ...
def unwrap(tensor: Tensor, /) -> Tensor: ...
def memory_counters() -> tuple[int, int, int, int, int]: ...
def set_limit(bytes: int, /) -> None: ...
def reset_peak() -> None: ...
