"""Programs that read and write at places that tensors say, and arrays for them."""

from __future__ import annotations

import torch

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]


def of(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    if dtype is torch.bool:
        return torch.rand(shape) < 0.5
    if dtype in INTEGERS:
        return torch.randint(0 if dtype is torch.uint8 else -50, 50, shape, dtype=dtype)
    return torch.randn(shape, dtype=torch.complex128 if dtype.is_complex else torch.float64).to(dtype)


def places(size: int, *shape: int, negative: bool = False, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.randint(-size if negative else 0, size, shape, dtype=dtype)


def distinct(size: int, count: int) -> torch.Tensor:
    return torch.randperm(size)[:count]


def inputs_of_reading() -> tuple[torch.Tensor, ...]:
    return places(4, 3, 2, negative=True), places(4, 2, negative=True), places(5, 2, 3, 4)


def read(x: torch.Tensor, i: torch.Tensor, j: torch.Tensor, own: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """``x`` [6, 5, 4]; ``i`` [3, 2] and ``j`` [2] may be negative; ``own`` [2, 3, 4] is inside of 5."""
    row = (i % 5).reshape(-1)
    return (
        x[i],
        x[:, j],
        x[:, :, j[:, None]],
        x[i, j],
        x[i, :, j],
        x[:, i, j],
        x[None, :, j, None, i],
        x[i, j, (i + 100) % 4],
        x[i.int(), 1],
        x[2, i],
        x.index_select(1, row),
        x.index_select(-2, row[:0]),
        x.gather(1, own),
        x.gather(-2, own[:1, :, :2]),
        x.transpose(0, 2).gather(1, own.transpose(0, 2)),
        x.take(i),
        torch.nn.functional.embedding(i % 6, x[:, 0]),
        torch.nn.functional.embedding(j % 5, x[0], padding_idx=1),
        torch.take_along_dim(x, own[:1, :1], 1),
    )


def inputs_of_writing() -> tuple[torch.Tensor, ...]:
    return distinct(5, 3), distinct(4, 2), torch.rand(6, 5, 4) < 0.4, torch.rand(2, 5, 4).argsort(1)[:, :3]


def written(
    x: torch.Tensor, i: torch.Tensor, j: torch.Tensor, some: torch.Tensor, own: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """``x`` [6, 5, 4]; ``i`` [3] and ``j`` [2] are distinct; ``own`` [2, 3, 4] is distinct along dimension 1."""
    y, value = x.flip(0), x[1, 2, 3]
    return (
        x.index_put((i,), y[:3]),
        x.index_put((i - 5,), y[0]),
        torch.ops.aten.index_put(x, [None, j], y[:, :2]),
        torch.ops.aten.index_put(x, [j[:, None], i], y[:2, :3]),
        torch.ops.aten.index_put(x, [i[:, None], None, j], y[:3, :2, 0][..., None]),
        torch.ops.aten.index_put(x, [i, i % 5, i % 4 * 0], y[:3, 0, 0]),
        torch.ops.aten.index_put(x, [some], value),
        torch.ops.aten.index_put(x, [some[:, 0, 0]], value[None]),
        torch.ops.aten._unsafe_index_put(x, [i], y[:3]),
        x.index_copy(0, i, y[:3]),
        x.index_copy(-1, j, y[..., :2]),
        x.index_fill(1, i, value),
        x.index_fill(2, j - 4, 3),
        x.scatter(1, own, y),
        x.scatter(-2, own, 1),
        x.scatter(0, i[:, None, None].expand(3, 5, 4), y),
        x.transpose(0, 2).scatter(1, own.transpose(0, 2), y.transpose(0, 2)),
    )


def inputs_of_sums(dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    return of(dtype, 6, 5, 4), places(6, 9), places(4, 9), places(5, 2, 7, 4), of(dtype, 9, 7, 9)


def added(
    x: torch.Tensor, i: torch.Tensor, j: torch.Tensor, own: torch.Tensor, y: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """``x`` [6, 5, 4]; ``i`` [9] in 6 and ``j`` [9] in 4 repeat, as ``own`` [2, 7, 4] in 5 does; ``y`` [9, 7, 9]."""
    return (
        torch.ops.aten.index_put(x, [i], y[:, :5, :4], True),
        torch.ops.aten.index_put(x, [i - 6, None, j - 4], y[:, :5, 0], True),
        torch.ops.aten.index_put(x, [None, j, i % 4], y[:6, 0], True),
        torch.ops.aten.index_put(x, [i, j, j], y[0, 0, 0], True),
        x.index_add(0, i, y[:, :5, :4]),
        x.index_add(2, j, y[:6, :5]),
        x.index_add(-1, j.int(), y[:6, :5], alpha=3),
        x.scatter_add(1, own, y[..., :4]),
        x.scatter_add(0, i[:, None, None].expand(9, 5, 4), y[:, :5, :4]),
        torch.scatter(x, 1, own, y[..., :4], reduce="add"),
        torch.scatter(x, 1, own, 2, reduce="add"),
    )


def reduced(
    x: torch.Tensor, i: torch.Tensor, j: torch.Tensor, own: torch.Tensor, y: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    row = i[:, None, None].expand(9, 5, 4)
    return tuple(
        x.scatter_reduce(dim, index, y[:, : x.shape[1] if dim == 0 else 7, :4], kind, include_self=own_too)
        for kind in ("sum", "mean", "amax", "amin")
        for own_too in (True, False)
        for dim, index in ((1, own), (0, row))
    )
