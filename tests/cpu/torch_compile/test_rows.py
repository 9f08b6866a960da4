"""Graphs whose rows are computed alone: sizes beyond the first few share programs, and results are eager's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from flagos_backend.frontends.torch.compile import report
from flagos_backend.frontends.torch.compile.rows import enough
from flagos_backend.frontends.torch.compile.specialization import _SIZES_OF_THEIR_OWN

FIRST = range(2, 2 + _SIZES_OF_THEIR_OWN)
LATER = (21, 17, 24, 30, 23, 90, 65, 18, 96)
ROWS_OF_LATER = {enough(size) for size in LATER}


@torch.library.custom_op("test_rows::scaled", mutates_args=())
def scaled(x: torch.Tensor, by: float) -> torch.Tensor:
    return x * by


@scaled.register_fake
def _(x: torch.Tensor, by: float) -> torch.Tensor:
    return torch.empty_like(x)


def normalized(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * weight


def layer(ids: torch.Tensor, x: torch.Tensor, table: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """A token's way through a layer, with an operator of the user's amid it."""
    h = normalized(x + F.embedding(ids, table), w[0, :8])
    gate, up = (h @ w).chunk(2, -1)
    heads = scaled(F.silu(gate) * up, 0.5).view(x.shape[0], 2, 4)
    heads = torch.cat([-heads[..., 2:].detach(), heads[..., :2]], -1) * heads.softmax(-1)
    return heads.reshape(x.shape[0], -1), h, gate


def branches(ids: torch.Tensor, x: torch.Tensor, table: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return torch.where(ids[:, None] > 3, x.exp(), table.index_select(0, ids)), x.amax(1), ids * 2 + 1


def mean_of_rows(ids: torch.Tensor, x: torch.Tensor, table: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return (x - x.mean(0),)


def running(ids: torch.Tensor, x: torch.Tensor, table: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return (x.cumsum(0),)


def by_count(ids: torch.Tensor, x: torch.Tensor, table: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return x / x.shape[0], x.flip(0)


def looks_back(ids: torch.Tensor, x: torch.Tensor, table: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return x.roll(1, 0), x @ x.T


def inputs(rows: int) -> list[torch.Tensor]:
    return [torch.randint(0, 9, (rows,)), torch.randn(rows, 8), torch.randn(9, 8), torch.randn(8, 16)]


def run_all(function: Callable[..., Any]) -> int:
    """Compares each size with eager, in which a first size is met again; says how many programs the later ones got."""
    torch._dynamo.reset()
    report.clear()
    compiled = torch.compile(function, backend="flagos")

    def compare(rows: int) -> None:
        given = inputs(rows)
        for position in (0, 1):
            torch._dynamo.mark_dynamic(given[position], 0)
        for ours, expected in zip(compiled(*given), function(*given), strict=True):
            assert ours.shape == expected.shape and ours.stride() == expected.stride()
            torch.testing.assert_close(ours, expected)

    with torch.no_grad():
        for rows in FIRST:
            compare(rows)
        before = len(report.reports())
        for rows in (*LATER, FIRST[0], LATER[0]):
            compare(rows)
    return len(report.reports()) - before


def test_rows_of_wider_arrays_and_none_at_all() -> None:
    compiled = torch.compile(branches, backend="flagos")
    with torch.no_grad():
        for rows in (*FIRST, *LATER, 0, 1):
            ids, x, table, w = inputs(rows)
            x = torch.randn(rows, 24)[:, 8:16]
            torch._dynamo.mark_dynamic(ids, 0)
            torch._dynamo.mark_dynamic(x, 0)
            for ours, expected in zip(compiled(ids, x, table, w), branches(ids, x, table, w), strict=True):
                torch.testing.assert_close(ours, expected)


def test_a_place_outside_of_the_table_is_an_error_among_shared_programs() -> None:
    compiled = torch.compile(branches, backend="flagos")
    with torch.no_grad():
        for rows in (*FIRST, *LATER):
            ids, *others = inputs(rows)
            torch._dynamo.mark_dynamic(ids, 0)
            torch._dynamo.mark_dynamic(others[0], 0)
            compiled(ids, *others)
        ids, *others = inputs(19)
        ids[18] = 9
        with pytest.raises((IndexError, RuntimeError)):
            compiled(ids, *others)


@pytest.mark.parametrize("function", [layer, branches])
def test_later_sizes_share_programs(function: Callable[..., Any]) -> None:
    assert run_all(function) == len(ROWS_OF_LATER) < len(LATER)


@pytest.mark.parametrize("function", [mean_of_rows, running, by_count, looks_back])
def test_rows_that_depend_on_others_get_programs_of_their_own(function: Callable[..., Any]) -> None:
    assert run_all(function) == len(LATER)


def test_enough_is_little_more() -> None:
    for rows in range(1, 3000):
        assert rows <= enough(rows) <= max(1.5 * rows, 1)
    assert len({enough(rows) for rows in range(1, 4097)}) < 26
