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
from support.torch_compile import assert_same, compiled

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
DTYPES = [*FLOATS, *INTEGERS, torch.bool, torch.complex64, torch.complex128]


@pytest.fixture(autouse=True)
def as_on_accelerators(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rules that the host leaves to ATen are taken on the host as well."""
    monkeypatch.setattr(Emitter, "on_host", property(lambda self: False, lambda self, value: None), raising=False)


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


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_reading(dtype: torch.dtype) -> None:
    x = of(dtype, 6, 5, 4)
    inputs = places(4, 3, 2, negative=True), places(4, 2, negative=True), places(5, 2, 3, 4)
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


def distinct_columns() -> torch.Tensor:
    return torch.rand(2, 5, 4).argsort(1)[:, :3]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_writing(dtype: torch.dtype) -> None:
    for x in (of(dtype, 6, 5, 4), of(dtype, 4, 5, 6).permute(2, 1, 0)):
        inputs = distinct(5, 3), distinct(4, 2), torch.rand(6, 5, 4) < 0.4, distinct_columns()
        check(written, x, *inputs, **EXACT)


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


def inputs_of_sums(dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    return of(dtype, 6, 5, 4), places(6, 9), places(4, 9), places(5, 2, 7, 4), of(dtype, 9, 7, 9)


@pytest.mark.parametrize("function", [added, reduced])
@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_combining_integers(dtype: torch.dtype, function: Callable[..., Any]) -> None:
    check(function, *inputs_of_sums(dtype), **EXACT)


@pytest.mark.parametrize("function", [added, reduced])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_combining_floats(dtype: torch.dtype, function: Callable[..., Any]) -> None:
    """Sums of halves are made in float32 and rounded once."""
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


def test_extremes_beside_nan_and_infinities() -> None:
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
