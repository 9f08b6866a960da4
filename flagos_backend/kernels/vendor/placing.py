"""Has an operator of ATen that takes no ``out`` make its results where a program wants them: of what it allocates on
the way, what is laid out as such an array is that array. Used by attention.py."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from flagos_backend.process.torch_loading import Tensor, torch

aten = torch.ops.aten
_ALLOCATE = frozenset({aten.empty.memory_format, aten.empty_like.default, aten.empty_strided.default})


def call_into(
    operator: OpOverload,
    places: Sequence[Tensor | None],
    *args: Any,
    through: Collection[OpOverload] = (),
    **kwargs: Any,
) -> list[Any]:
    """The results of ``operator(*args, **kwargs)``; those that ``places`` has an array for are that array.

    A result is made in its array if the operator allocates one of the same type, sizes and strides, in any order of
    dimensions, on the array's device for it, and is copied there if not. The operator has a kernel for that device, and
    its results are new. ``through``: operators of which the same holds, that its kernel calls to allocate the results.
    """
    wanted = [place for place in places if place is not None]
    if not wanted:
        return _listed(operator(*args, **kwargs))
    with _Allocations(wanted, through) as allocations:
        results = _listed(allocations.descend(operator, args, kwargs))
    elsewhere = [n for n, place in enumerate(places) if place is not None and not _is_same(results[n], place)]
    for number in elsewhere:  # before any is written, which may be where another one was made
        if any(_overlap(results[number], place) for place in wanted):
            results[number] = results[number].clone()
    for number, place in enumerate(places):
        if place is not None:
            results[number] = place.copy_(results[number]) if number in elsewhere else place
    return results


def _listed(results: Any) -> list[Any]:
    return [results] if isinstance(results, Tensor) else list(results)


class _Allocations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While it is entered, what kernels allocate uninitialized is one of ``places``, each once, where one fits: its
    dimensions may be in another order."""

    def __init__(self, places: Sequence[Tensor], through: Collection[OpOverload]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._left = list(places)
        self._through = through
        self._kernels = torch._C.DispatchKeySet(torch._C._dispatch_key_parse(places[0].device.type.upper()))

    def descend(self, operator: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Its kernel for the device, called directly: the mode stays on for what that calls."""
        return operator.redispatch(self._kernels, *args, **kwargs)

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _ALLOCATE:
            found = self._take(func(*args, **(kwargs | {"device": "meta", "pin_memory": False})), args, kwargs)
            return func(*args, **kwargs) if found is None else found
        if func not in self._through:
            return func(*args, **kwargs)
        with self:
            return self.descend(func, args, kwargs)

    def _take(self, allocated: Tensor, args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor | None:
        like = args[0] if args and isinstance(args[0], Tensor) else None
        device = kwargs.get("device") or (like.device if like is not None else torch.get_default_device())
        for number, place in enumerate(self._left):
            alike = place.device == torch.device(device) and place.dtype == allocated.dtype
            if alike and _walk(place) == _walk(allocated):
                return self._left.pop(number).as_strided(allocated.shape, allocated.stride())
        return None


def _steps(tensor: Tensor) -> list[tuple[int, int, int]]:
    """(dimension, size, stride) of those that lead anywhere."""
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    return [(number, size, stride) for number, (size, stride) in enumerate(pairs) if size != 1]


def _walk(tensor: Tensor) -> list[tuple[int, int]]:
    return sorted((stride, size) for _, size, stride in _steps(tensor))


def _is_same(one: Tensor, other: Tensor) -> bool:
    same_places = one.data_ptr() == other.data_ptr() and _steps(one) == _steps(other)
    return same_places and (one.shape, one.dtype) == (other.shape, other.dtype)


def _overlap(one: Tensor, other: Tensor) -> bool:
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
