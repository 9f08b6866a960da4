"""Running sums whose error does not grow with the number of addends. Used by the windowed reductions."""

from __future__ import annotations

from flagos_backend.process.torch_loading import Tensor, torch

_BLOCK = 8
# torch adds up everything narrower in double.
_WIDEST = (torch.float64, torch.complex128)


def cumulative_sum(x: Tensor, dimension: int) -> Tensor:
    """Sums of everything up to each element along ``dimension``, in x's own dtype.

    torch adds one element after the other on the host: in float64 the error of a sum of n elements is n roundings, and
    grows as their square root. Here it is that of one block, whatever n is.
    """
    size = x.shape[dimension]
    if x.dtype not in _WIDEST or x.device.type != "cpu" or size <= _BLOCK:
        return x.cumsum(dimension, dtype=x.dtype)
    rows = x.movedim(dimension, -1)
    whole = size - size % _BLOCK
    sums = rows[..., :whole].reshape(*rows.shape[:-1], whole // _BLOCK, _BLOCK).cumsum(-1)
    before = _compensated(sums[..., -1])
    sums[..., 1:, :] += before[..., :-1].unsqueeze(-1)
    result = sums.flatten(-2)
    if whole < size:
        result = torch.cat((result, rows[..., whole:].cumsum(-1) + before[..., -1:]), -1)
    return result.movedim(-1, dimension)


def _compensated(x: Tensor) -> Tensor:
    """Running sums along the last dimension, to which what each addition rounded away is added up by itself."""
    sums = x.cumsum(-1)
    before, after = sums[..., :-1], sums[..., 1:]
    added = after - before
    lost = (before - (after - added)) + (x[..., 1:] - added)
    sums[..., 1:] += _finite(lost).cumsum(-1)
    return sums


def _finite(x: Tensor) -> Tensor:
    """0 where a sum has become infinite or NaN: nothing is lost there."""
    return torch.where(x.isfinite(), x, 0)
