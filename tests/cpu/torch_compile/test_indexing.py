"""Reading and writing at places that tensors say, as programs of accelerators have them, run on the host; PyTorch eager
is the oracle, of doubles where it sums. cpu/accelerator/test_torch_indexing.py runs them on a simulated accelerator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_map_only

from flagos_backend.frontends.torch.compile import report
from flagos_backend.frontends.torch.compile.lowering.emitter import Emitter
from support.indexing import (
    FLOATS,
    INTEGERS,
    added,
    inputs_of_reading,
    inputs_of_sums,
    inputs_of_writing,
    of,
    places,
    read,
    reduced,
    written,
)
from support.torch_compile import assert_same, compiled

DTYPES = [*FLOATS, *INTEGERS, torch.bool, torch.complex64, torch.complex128]


@pytest.fixture(autouse=True)
def as_on_accelerators(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rules that the host leaves to ATen are taken on the host as well."""
    monkeypatch.setattr(Emitter, "on_host", property(lambda self: False, lambda self, value: None), raising=False)


def nothing_whole(*but: str) -> None:
    for graph in report.reports():
        left = {name for name in (graph.whole | graph.fallback) if not name.startswith(but or ("none",))}
        assert not left and not graph.outside, graph


def check(function: Callable[..., Any], *inputs: Any, **tolerance: float) -> None:
    """Against eager, with nothing left to ATen."""
    report.clear()
    torch.compiler.reset()
    assert_same(compiled(function)(*inputs), function(*inputs), **tolerance)
    nothing_whole()


EXACT = {"rtol": 0.0, "atol": 0.0}


# ---- Reading


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_reading(dtype: torch.dtype) -> None:
    x = of(dtype, 6, 5, 4)
    inputs = inputs_of_reading()
    check(read, x, *inputs, **EXACT)
    check(read, of(dtype, 4, 6, 5).permute(1, 2, 0), *inputs, **EXACT)


def test_reading_one_number_and_none() -> None:
    one, empty, zero = torch.tensor(2.5), torch.randn(0, 3), torch.tensor(0)

    def function(one: torch.Tensor, empty: torch.Tensor, zero: torch.Tensor) -> tuple[torch.Tensor, ...]:
        none = zero[None][:0]
        return (
            one.gather(0, zero),
            one.gather(0, zero[None]),
            one.index_select(0, zero[None]),
            one.take(zero[None, None]),
            empty[none],
            empty[:, zero[None]],
            empty.gather(1, torch.zeros(0, 2, dtype=torch.int64)),
            torch.nn.functional.embedding(none, empty),
            torch.ops.aten.index(one[None], [zero]),
            torch.ops.aten.index(one[None, None], [zero, -1 - zero]),
        )

    check(function, one, empty, zero, **EXACT)


def test_what_is_inside_of_a_mask() -> None:
    """Places beyond an edge, where the mask says that nobody reads."""
    x, i, j = torch.randn(6, 5), torch.randint(-9, 9, (4, 3)), torch.randint(5, (3,))
    function = lambda x, i, j: torch.ops.aten._unsafe_masked_index(x, (i >= -6) & (i < 6), [i, j], 7.5)  # noqa: E731
    check(function, x, i, j, **EXACT)


def test_places_outside() -> None:
    """What programs of accelerators do where eager ends the process: docs/limits.md says it."""
    x, i, y = torch.randn(4, 3), torch.tensor([-9, 1, 7]), torch.randn(3, 3)

    def function(x: torch.Tensor, i: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x[i], x.index_select(0, i), torch.ops.aten.index_put(x, [i, i], y[0]), x.index_add(0, i, y)

    read, selected, put, added = compiled(function)(x, i, y)
    nothing_whole()
    assert torch.equal(read, x[[0, 1, 3]]) and torch.equal(selected, read)
    expected = x.clone()
    expected[1, 1] = y[0, 1]
    assert torch.equal(put, expected)
    torch.testing.assert_close(added, x + torch.stack([torch.zeros(3), y[1], torch.zeros(3), torch.zeros(3)]))


# ---- Writing


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_writing(dtype: torch.dtype) -> None:
    for x in (of(dtype, 6, 5, 4), of(dtype, 4, 5, 6).permute(2, 1, 0)):
        check(written, x, *inputs_of_writing(), **EXACT)


def test_writing_one_number_and_none() -> None:
    def function(one: torch.Tensor, zero: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        none = zero[None][:0]
        return (
            one.scatter(0, zero, one + 1),
            one.scatter(0, zero[None], 3.0),
            one.scatter_add(0, zero, one),
            one.index_add(0, zero[None], one),
            one.index_copy(0, zero[None], one + 1),
            one.index_fill(0, zero[None], 2.0),
            x.index_put((none,), x[:0]),
            x.index_add(0, none, x[:0]),
            x.scatter_add(1, zero.expand(0, 3), x),
            x[:0].index_add(1, zero[None], x[:0, :1]),
            x[:, :0].scatter(0, zero.expand(2, 0), x[:, :0]),
            x.scatter_reduce(0, none[:, None].expand(0, 3), x, "amax", include_self=False),
        )

    check(function, torch.tensor(2.5), torch.tensor(0), torch.randn(4, 3), **EXACT)


def test_one_of_what_goes_to_one_place() -> None:
    """Rows that are written whole: each is one of those that were given for it."""
    i, rows = places(4, 40), torch.arange(40.0)[:, None].expand(40, 3).contiguous()
    found = compiled(lambda rows, i: rows.new_full((5, 3), -1).index_put((i,), rows))(rows, i)
    nothing_whole()
    for place in range(5):
        given = (i == place).nonzero().flatten().tolist() or [-1]
        assert all(int(number) in given for number in found[place])


# ---- Combining


@pytest.mark.parametrize("function", [added, reduced])
@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_combining_integers(dtype: torch.dtype, function: Callable[..., Any]) -> None:
    check(function, *inputs_of_sums(dtype), **EXACT)


@pytest.mark.parametrize("function", [added, reduced])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_combining_floats(dtype: torch.dtype, function: Callable[..., Any]) -> None:
    """Sums of 16-bit floats are made in float32 and rounded once."""
    inputs = inputs_of_sums(dtype)
    found = compiled(function)(*inputs)
    nothing_whole()
    exact = function(*tree_map_only(torch.Tensor, lambda t: t.double() if t.is_floating_point() else t, inputs))
    # Ten terms of a few units, each rounded half a unit of the sum's greatest part, and the result once.
    precision = 20 * max(torch.finfo(dtype).eps / (20 if dtype in FLOATS[:2] else 1), torch.finfo(torch.float32).eps)
    precision = 100 * torch.finfo(dtype).eps if dtype is torch.float64 else precision
    for ours, theirs in zip(found, exact, strict=True):
        assert ours.dtype is dtype
        torch.testing.assert_close(ours.double(), theirs, rtol=precision, atol=10 * precision)


def test_averages_of_narrow_integers_wrap_as_in_eager() -> None:
    """Both what is added up, and how many there are."""
    for dtype, count in ((torch.int8, 130), (torch.int8, 256), (torch.uint8, 256), (torch.uint8, 250)):
        torch.compiler.reset()
        source, index = of(dtype, count), torch.zeros(count, dtype=torch.int64)
        function = lambda s, i: s[:2].scatter_reduce(0, i, s, "mean", include_self=False)  # noqa: E731
        assert_same(compiled(function)(source, index), function(source, index))


def test_minima_and_maxima_beside_nan_and_infinities() -> None:
    x = torch.tensor([1.0, float("nan"), 3.0, -float("inf"), 5.0])
    source = torch.tensor([0.0, 2.0, float("nan"), float("inf"), -float("inf"), 4.0, -0.0])
    index = torch.tensor([0, 1, 2, 3, 4, 4, 0])

    def function(x: torch.Tensor, index: torch.Tensor, source: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(
            x.scatter_reduce(0, index, source, kind, include_self=own)
            for kind in ("amax", "amin", "sum", "mean")
            for own in (True, False)
        )

    check(function, x, index, source)


def test_left_to_aten() -> None:
    """Products, and combinations of truth values and complex numbers."""
    x, index = torch.randn(5), torch.tensor([1, 1, 3])
    for function, inputs in (
        (lambda x, i: x.scatter_reduce(0, i, x[:3], "prod"), (x, index)),
        (lambda x, i: torch.scatter(x, 0, i, 2.0, reduce="multiply"), (x, index)),
        (lambda x, i: x.index_add(0, i, x[:3]), (x.to(torch.complex64), index)),
    ):
        torch.compiler.reset()
        report.clear()
        torch.testing.assert_close(compiled(function)(*inputs), function(*inputs))
        assert any(graph.whole or graph.fallback or graph.outside for graph in report.reports()), report.reports()


def test_deterministic_sums_are_atens() -> None:
    """The setting is seen when it changes; integers have one sum."""
    x, index = torch.randn(5), torch.tensor([1, 1, 3])
    run = compiled(lambda x, i: x.index_add(0, i, x[:3]))
    for setting in (False, True):
        torch.use_deterministic_algorithms(setting)
        try:
            for given in (x, x.int()):
                report.clear()
                assert_same(run(given, index), given.index_add(0, index, given[:3]))
                assert [bool(graph.whole) for graph in report.reports()] == [setting and given is x]
        finally:
            torch.use_deterministic_algorithms(False)


# ---- Gradients


def test_gradients() -> None:
    """Through all that reads and writes floats, twice differentiable ones of doubles."""

    def function(x: torch.Tensor, table: torch.Tensor, i: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
        rows = torch.nn.functional.embedding(i, table, padding_idx=2)
        y = x[i - 6] + x[:, own[0, :, 0]].sum(1, keepdim=True)[i] + x.gather(1, own[:, :5].expand(6, 5, 4))[i]
        y = y + x.index_select(0, i) * rows[:, None]
        z = torch.zeros_like(x).index_add(0, i, y).index_put((i,), y.sin() * 0.1, accumulate=True)
        z = z.scatter_add(1, own[:1].expand(6, 7, 4), torch.cat([x, x[:, :2]], 1).cos())
        top = z.scatter_reduce(0, i[:, None, None].expand(9, 5, 4), y, "amax")
        return (z * top).sum() + z.scatter(1, own[:1, :1].expand(6, 1, 4), x[:, :1]).square().sum()

    x, table = torch.randn(6, 5, 4, dtype=torch.float64), torch.randn(6, 4, dtype=torch.float64)
    i, own = places(6, 9), places(5, 1, 7, 4)
    outcomes = []
    for call in (function, compiled(function)):
        given = [t.clone().requires_grad_() for t in (x, table)]
        value = call(*given, i, own)
        outcomes.append((value.detach(), *torch.autograd.grad(value, given)))
    torch.testing.assert_close(outcomes[1], outcomes[0])
    nothing_whole()


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("padding", [None, 3, -1])
def test_gradients_of_tables(dtype: torch.dtype, padding: int | None) -> None:
    table, index, gradient = of(dtype, 7, 5), places(7, 4, 6), of(dtype, 4, 6, 5)

    def found(call: Callable[..., Any], table: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        table = table.clone().requires_grad_()
        (result,) = torch.autograd.grad(call(table), table, gradient)
        return result

    function = lambda table: torch.nn.functional.embedding(index, table, padding)  # noqa: E731
    ours = found(compiled(function), table, gradient)
    nothing_whole()
    exact = found(function, table.double(), gradient.double())
    precision = max(4 * torch.finfo(dtype).eps, 0)
    torch.testing.assert_close(ours.double(), exact, rtol=precision, atol=10 * precision)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_bags(dtype: torch.dtype, mode: str) -> None:
    """Of as many rows each. The host keeps the list of bags that the gradient reads for averages only."""
    table, index, gradient = of(dtype, 7, 5), places(7, 4, 6), of(dtype, 4, 5)
    function = lambda t: torch.nn.functional.embedding_bag(index, t, mode=mode)  # noqa: E731

    def found(call: Callable[..., Any], table: torch.Tensor, gradient: torch.Tensor) -> tuple[torch.Tensor, ...]:
        table = table.clone().requires_grad_()
        bags = call(table)
        return bags.detach(), *torch.autograd.grad(bags, table, gradient)

    ours = found(compiled(function), table, gradient)
    nothing_whole("none" if mode == "mean" else "aten._embedding_bag_backward")
    precision = 4 * torch.finfo(dtype).eps
    for mine, theirs in zip(ours, found(function, table.double(), gradient.double()), strict=True):
        assert mine.dtype is dtype
        torch.testing.assert_close(mine.double(), theirs, rtol=precision, atol=10 * precision)


def test_bags_left_to_aten() -> None:
    """Of unlike sizes, weighted, padded, of maxima."""
    table, index = torch.randn(7, 5), places(7, 12)
    bag = torch.nn.functional.embedding_bag
    for function in (
        lambda t, i: bag(i, t, torch.tensor([0, 3, 4])),
        lambda t, i: bag(i.view(3, 4), t, mode="max"),
        lambda t, i: bag(i.view(3, 4), t, padding_idx=2),
        lambda t, i: bag(i.view(3, 4), t, mode="sum", per_sample_weights=t.flatten()[:12].view(3, 4)),
    ):
        torch.compiler.reset()
        torch.testing.assert_close(compiled(function)(table, index), function(table, index))


def test_triangles() -> None:
    check(lambda x: (x[tuple(torch.tril_indices(5, 4, -1))], torch.triu_indices(3, 6, 1)), torch.randn(5, 4), **EXACT)


# ---- Products with vectors


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_products_with_vectors(dtype: torch.dtype) -> None:
    x, y, z = of(dtype, 7, 5), of(dtype, 5), of(dtype, 7)
    parts: list[Callable[..., torch.Tensor]] = [
        lambda x, y, z: x @ y,
        lambda x, y, z: x.T @ z,
        lambda x, y, z: torch.dot(y, y),
        lambda x, y, z: x[:0] @ y,
        lambda x, y, z: x[:, :0] @ y[:0],
    ]
    if dtype in (torch.float32, torch.float64):
        parts += [
            lambda x, y, z: torch.addmv(z, x, y),
            lambda x, y, z: torch.addmv(z[:1], x, y, beta=0.5, alpha=-2),
            lambda x, y, z: torch.addmv(z * torch.nan, x, y, beta=0),
        ]
    function = lambda *given: [part(*given) for part in parts]  # noqa: E731
    found, exact = compiled(function)(x, y, z), function(x.double(), y.double(), z.double())
    nothing_whole()
    # Seven products of some units, each rounded as often, and the result.
    precision = 16 * torch.finfo(dtype).eps
    for ours, theirs in zip(found, exact, strict=True):
        assert ours.dtype is dtype
        torch.testing.assert_close(ours.double(), theirs, rtol=precision, atol=8 * precision)
