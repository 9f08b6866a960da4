"""Formulas of gradients that take the place of PyTorch's while AOTAutograd traces for this backend, which are right for
data that are not there yet, and of as few operators for long rows as for short ones. For backend.py.

PyTorch asks the data of ``cumprod`` whether they have zeros. Traced, it assumes that they do: up to 2.11 it writes a
``cumprod`` and a ``prod`` for each element of a row, later some forty operators that gather and scatter.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Final

import torch
from torch import Tensor
from torch._C import DispatchKey

aten = torch.ops.aten

_Formula = Callable[..., Tensor]
_is_ours: Final = ContextVar("flagos_gradients", default=False)


@contextmanager
def own_gradients() -> Iterator[None]:
    """While AOTAutograd traces for this backend. What others trace meanwhile, in other threads, keeps PyTorch's."""
    _install()
    token = _is_ours.set(True)
    try:
        yield
    finally:
        _is_ours.reset(token)


@functools.cache
def _install() -> None:
    """PyTorch's Python dispatcher, which is on while a graph is traced and only then, asks the overload."""
    for overload, formula in _FORMULAS.items():
        overload.py_impl(DispatchKey.CompositeImplicitAutograd)(_chosen(overload, formula))


def _chosen(overload: Any, formula: _Formula) -> _Formula:
    original = functools.partial(overload._op_dk, DispatchKey.CompositeImplicitAutograd)

    def gradient(*args: Any, **kwargs: Any) -> Tensor:
        found: Tensor = (formula if _is_ours.get() else original)(*args, **kwargs)
        return found

    return gradient


def cumprod_backward(grad: Tensor, x: Tensor, dim: int, result: Tensor) -> Tensor:
    """aten::cumprod_backward: of each element, the sum over what follows it of gradients times the products without it.
    ``result``: cumprod(x, dim). Shapes: those of x."""
    if x.dim() == 0 or x.shape[dim] <= 1:
        return grad
    return _differentiable(grad, x, dim) if torch.is_grad_enabled() else _closed(grad, x, dim, result)


def _closed(grad: Tensor, x: Tensor, dim: int, result: Tensor) -> Tensor:
    """The results without an element are those with it, divided by it: up to the first zero of a row. Of that one, they
    are the product of what precedes it times running products of what follows, up to the second. Behind it all of them
    have a zero. Gradients of this formula are wrong where there are zeros."""
    conjugate = x.conj()
    size = x.shape[dim]
    places = torch.arange(size, device=x.device).view(-1, *[1] * (x.dim() - 1 - dim % x.dim()))
    is_zero = x == 0
    first = torch.where(is_zero, places, size).amin(dim, keepdim=True)
    second = torch.where(is_zero & (places > first), places, size).amin(dim, keepdim=True)
    before, behind = places < first, (places > first) & (places < second)
    sums = _suffix_sums(torch.where(before, result.conj() * grad, 0), dim)
    preceding = _shifted(result.conj(), dim, 1, 1)
    products = torch.where(behind, conjugate, 1).cumprod(dim)
    of_first = (products * torch.where((places == first) | behind, grad, 0)).sum(dim, keepdim=True) * preceding
    of_rest = torch.where(places == first, of_first, 0)
    return torch.where(before, sums / torch.where(before, conjugate, 1), of_rest)


def _differentiable(grad: Tensor, x: Tensor, dim: int) -> Tensor:
    """The same without a division, in twice log2(size) steps of a few operators: with S[k] = grad[k] + x[k+1] * S[k+1],
    S[k] times the product of what precedes k. Its gradients are right where there are zeros, too."""
    conjugate, size = x.conj(), x.shape[dim]
    sums, factors = grad, _shifted(conjugate, dim, -1, 1)  # S[k] = sums[k] + factors[k] * S[k + step]
    preceding, step = _shifted(conjugate, dim, 1, 1), 1
    while step < size:
        sums = sums + factors * _shifted(sums, dim, -step, 0)
        factors = factors * _shifted(factors, dim, -step, 1)
        preceding = preceding * _shifted(preceding, dim, step, 1)
        step *= 2
    return sums * preceding


def _shifted(x: Tensor, dim: int, by: int, fill: int) -> Tensor:
    """``x`` moved along a dimension; what moves in is ``fill``."""
    shifted: Tensor = aten.constant_pad_nd(x, [0, 0] * (x.dim() - 1 - dim % x.dim()) + [by, -by], fill)
    return shifted


def _suffix_sums(x: Tensor, dim: int) -> Tensor:
    return x.flip(dim).cumsum(dim).flip(dim)


#: By overload: operators that PyTorch's autograd calls by name, and takes apart in C++.
_FORMULAS: Final[dict[Any, _Formula]] = {aten.cumprod_backward.default: cumprod_backward}
