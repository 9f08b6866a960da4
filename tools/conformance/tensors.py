"""Compares PyTorch results: by PyTorch's tolerances, and where these are too narrow by the distance to the truth."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

# The next wider type that results are computed in to judge both sides.
WIDER = {
    torch.float16: torch.float64,
    torch.bfloat16: torch.float64,
    torch.float32: torch.float64,
    torch.complex32: torch.complex128,
    torch.complex64: torch.complex128,
}
# The types whose largest value intermediate results pass where the final ones need not.
_HALF_FLOATS = (torch.float16, torch.bfloat16)
# The truth judges only where the reference itself is near to it: where it is not, they computed something else, such as
# other random numbers. In square roots of a rounding.
_REASONABLE = 4.0
# Where results are but roundings of what cancels, the operands say how near is near: how many of their roundings the
# reference may be off, and never a larger share of them than this.
_CANCELLED, _SHARE = 1024, 1e-3


@contextmanager
def exact_products() -> Iterator[None]:
    """Neither products nor convolutions of float32 inside are rounded to TF32: PyTorch's are not, and ours do as it
    says."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        # Once its tests' utilities are imported, PyTorch refuses to have this set otherwise.
        with torch.backends.cudnn.flags(enabled=torch.backends.cudnn.enabled, allow_tf32=False):
            yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def truth_of(run: Callable[[Callable[[Any], Any]], Any]) -> Any:
    """What ``run(place)`` computes with wide types for what it leaves to the default; ``place`` widens a leaf of its
    arguments."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        return run(_widened)
    finally:
        torch.set_default_dtype(default)


def _widened(value: Any) -> Any:
    if isinstance(value, torch.dtype):
        return WIDER.get(value, value)
    if isinstance(value, torch.Tensor) and value.dtype in WIDER:
        return value.detach().to(WIDER[value.dtype]).requires_grad_(value.requires_grad)
    return value


def compare(
    ours: Any,
    reference: Any,
    truth: Callable[[], Any] | None = None,
    *,
    values: bool = True,
    scale: float = 0.0,
    operands: Callable[[], Any] | None = None,
) -> str:
    """What differs between two structures of tensors and plain values, or "".

    ``truth`` computes the same in WIDER types; ours may be twice as far from it as the reference is. ``values``:
    whether they are compared, or only sizes and types. ``scale``: of what the results were computed from, of which they
    may be nothing but the rounding. ``operands`` gives what they were computed from: where the reference is off the
    truth by roundings of the largest number there, ours passes if it is no farther from it. Where the reference
    overflowed in 16-bit floats and the truth is finite, ours passes if it is the truth but for roundings.
    """
    mine, theirs = tree_leaves(ours), tree_leaves(reference)
    if len(mine) != len(theirs):
        return f"{len(mine)} results instead of {len(theirs)}"
    exact: list[Any] | None = None
    for number, (a, b) in enumerate(zip(mine, theirs, strict=True)):
        difference = _difference(a, b, values)
        if difference and truth is not None and isinstance(b, torch.Tensor) and b.dtype in WIDER:
            exact = tree_leaves(truth()) if exact is None else exact
            if len(exact) == len(theirs) and _is_right(a, b, exact[number], scale, operands):
                continue
        if difference:
            return f"result {number}: {difference}"
    return ""


def _difference(a: Any, b: Any, values: bool) -> str:
    if not isinstance(b, torch.Tensor) or not isinstance(a, torch.Tensor):
        if type(a) is not type(b):
            return f"{type(a).__name__} instead of {type(b).__name__}"
        return "" if not values or a == b or a != a else f"{a} instead of {b}"
    for what in ("shape", "dtype", "layout"):
        if getattr(a, what) != getattr(b, what):
            return f"{what} {getattr(a, what)} instead of {getattr(b, what)}"
    if not values:
        return ""
    if b.dtype is torch.complex32:  # neither compared nor printed by PyTorch
        a, b = a.to(torch.complex64), b.to(torch.complex64)
        tolerance: float | None = 4e-3
    else:
        tolerance = None  # as PyTorch has it for the type
    try:
        torch.testing.assert_close(a, b, equal_nan=True, rtol=tolerance, atol=tolerance)
    except AssertionError as error:
        return " ".join(str(error).split())[:400]
    return ""


def _is_right(a: Any, b: torch.Tensor, exact: Any, scale: float, operands: Callable[[], Any] | None) -> bool:
    """By the truth: see compare."""
    if not isinstance(a, torch.Tensor) or not isinstance(exact, torch.Tensor):
        return False
    if exact.shape != b.shape or any(getattr(a, what) != getattr(b, what) for what in ("shape", "dtype", "layout")):
        return False
    if b.dtype in _HALF_FLOATS and b.layout is torch.strided:
        settled = _overflowed(b, exact) & _is_truth(a, exact)
        if settled.any():  # and the rest is judged by itself
            a, b, exact = (t.detach().masked_fill(settled, 0.0) for t in (a, b, exact))
            if not _difference(a, b, True):
                return True
    return _as_near(a, b, exact, scale, operands)


def _overflowed(b: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """Where the reference is infinite, or NaN of infinities, though the truth is finite."""
    return ~b.isfinite() & exact.isfinite()


def _is_truth(a: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """Where ``a`` is the truth in its type, but for two roundings."""
    near = torch.isclose(a.to(exact.dtype), exact, rtol=2 * torch.finfo(a.dtype).eps, atol=0.0)
    return near | (a == exact.to(a.dtype))


def _as_near(
    a: torch.Tensor, b: torch.Tensor, exact: torch.Tensor, scale: float, operands: Callable[[], Any] | None
) -> bool:
    """Whether ``a`` is as near to the truth as ``b`` by the largest error, or within some roundings of the largest
    value."""
    rounding = torch.finfo(b.dtype).eps
    a, b, exact = (t.detach().to_dense().to(WIDER[b.dtype]) for t in (a, b, exact))
    finite = exact.isfinite() & b.isfinite() & a.isfinite()
    # Where something is not finite both sides must say the same.
    special = ~(a.isfinite() & b.isfinite())
    if not finite.any() or not torch.equal(torch.nan_to_num(a[special]), torch.nan_to_num(b[special])):
        return False
    scale = max(scale, float(exact[finite].abs().max()))
    own, other = (float((t - exact)[finite].abs().max()) for t in (a, b))
    if other <= _REASONABLE * max(rounding**0.5, 1e-3) * scale and own <= 2 * other + 4 * rounding * scale:
        return True
    if operands is None or own > other:
        return False
    return other <= min(_CANCELLED * rounding, _SHARE) * _largest(operands())


def _largest(values: Any) -> float:
    """The largest finite absolute value in the tensors of a structure that have one of WIDER's dtypes."""
    found = [leaf.detach() for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor) and leaf.dtype in WIDER]
    sizes = [leaf.to_dense().to(WIDER[leaf.dtype]).abs() for leaf in found if leaf.numel()]
    return max((float(torch.nan_to_num(size, 0.0, 0.0).max()) for size in sizes), default=0.0)
