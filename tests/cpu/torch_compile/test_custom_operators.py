"""Operators that no program has: PyTorch runs them on the tensors themselves, between programs. Eager is the oracle."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from flagos_backend.frontends.torch.compile import report
from support.torch_compile import assert_same, check_function, compiled

# Where each call found its arguments.
places: list[int] = []


@torch.library.custom_op("flagos_tests::scaled", mutates_args=())
def scaled(x: Tensor, factor: float) -> Tensor:
    places.append(x.data_ptr())
    return x * factor


@scaled.register_fake
def _(x: Tensor, factor: float) -> Tensor:
    return torch.empty_like(x)


scaled.register_autograd(
    lambda ctx, grad: (scaled(grad, ctx.factor), None),
    setup_context=lambda ctx, inputs, output: setattr(ctx, "factor", inputs[1]),
)


@torch.library.custom_op("flagos_tests::put", mutates_args=("cache",))
def put(row: Tensor, cache: Tensor, at: int) -> None:
    places.append(cache.data_ptr())
    cache[at].copy_(row)


@torch.library.custom_op("flagos_tests::put_all", mutates_args=("caches", "count"))
def put_all(row: Tensor, caches: list[Tensor], count: Tensor | None) -> Tensor:
    places.extend(cache.data_ptr() for cache in caches)
    for cache in caches:
        cache.copy_(row)
    if count is not None:
        count.add_(1)
    return row.sum()


@put_all.register_fake
def _(row: Tensor, caches: list[Tensor], count: Tensor | None) -> Tensor:
    return row.new_empty(())


@torch.library.custom_op("flagos_tests::halves", mutates_args=())
def halves(x: Tensor) -> tuple[Tensor, list[Tensor]]:
    half = x.shape[0] // 2
    return x.sum(0), [x[:half].clone(), x[half:].clone()]


@halves.register_fake
def _(x: Tensor) -> tuple[Tensor, list[Tensor]]:
    half = x.shape[0] // 2
    return x.new_empty(x.shape[1:]), [torch.empty_like(x[:half]), torch.empty_like(x[half:])]


@pytest.fixture(autouse=True)
def no_places() -> Iterator[None]:
    places.clear()
    yield


@torch.no_grad()
def test_runs_on_the_callers_tensor(place: str) -> None:
    x = torch.randn(4, 6, device=place)
    run = compiled(lambda x: scaled(x, 2.0))
    assert_same(run(x), x * 2)
    assert places == [x.data_ptr()]
    assert report.reports()[-1].outside == {"flagos_tests.scaled.default": 1}


@pytest.mark.parametrize("shape", [(0, 3), (), (5, 7)])
def test_between_two_programs(shape: tuple[int, ...], place: str) -> None:
    check_function(lambda x: scaled(x.sin(), 0.5).exp() + x, torch.randn(shape, device=place))


def test_arguments_that_are_not_contiguous(place: str) -> None:
    x = torch.randn(6, 8, device=place)
    for view in (x.t(), x[::2, 1:], x[:, :1].expand(6, 8), x.view(2, 3, 8).permute(2, 0, 1)):
        check_function(lambda x: scaled(x, 3.0).cos(), view)


def test_gradients_pass_through() -> None:
    x = torch.randn(3, 4, requires_grad=True)

    def loss(x: Tensor) -> Tensor:
        return scaled(x.sin(), 2.5).square().sum()

    gradients = [torch.autograd.grad(call(x), x)[0] for call in (compiled(loss), loss)]
    torch.testing.assert_close(*gradients)


def test_tuples_and_lists_of_results() -> None:
    def program(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        total, (first, second) = halves(x * 2)
        return total, first + 1, second

    check_function(program, torch.randn(5, 3))


@torch.no_grad()
def test_writes_to_an_input_where_it_lies(place: str) -> None:
    def step(x: Tensor, cache: Tensor) -> Tensor:
        put(x * 2, cache, 3)
        return cache[3].sum()

    x, cache = torch.randn(8, device=place), torch.zeros(16, 8, device=place)
    run = compiled(step)
    assert_same(run(x, cache), (x * 2).sum())
    expected = torch.zeros_like(cache)
    expected[3] = x * 2
    assert_same(cache, expected)
    assert places == [cache.data_ptr()]


@torch.no_grad()
def test_layers_that_write_to_one_cache_through_views() -> None:
    def step(x: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
        for layer in range(3):
            put(x + layer, cache[layer], layer)
            x = cache[layer].sum(0) * 0.5
        return x, cache.view(-1)

    x, cache = torch.randn(8), torch.randn(3, 4, 8)
    ours, run = cache.clone(), compiled(step)
    begin = ours.data_ptr()
    for _ in range(2):
        assert_same(run(x, ours), step(x, cache))
        assert_same(ours, cache)
    assert begin <= min(places[:3]) and max(places[:3]) < begin + ours.nbytes


@torch.no_grad()
def test_a_base_that_begins_inside_its_storage() -> None:
    """Views are traced by their place in the storage, and the next call's tensor begins elsewhere in its own."""

    def step(x: Tensor, cache: Tensor) -> None:
        put(x, cache.t(), 1)

    run = compiled(step, dynamic=False)
    for begin in (0, 24, 8):
        storage = torch.randn(64)
        ours, eager = storage.clone()[begin : begin + 32].view(8, 4), storage.clone()[begin : begin + 32].view(8, 4)
        x = torch.randn(8)
        run(x, ours)
        step(x, eager)
        assert_same(ours, eager)


@torch.no_grad()
def test_old_values_that_are_read_later_are_kept() -> None:
    def step(x: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
        before = cache * 1
        row = cache[0].clone()
        y = torch.zeros(4, 8)
        alias = y[2]
        kept = alias + 0
        put(x, cache, 0)
        put(x, y, 2)
        return before + cache, kept + row + alias

    x, cache = torch.randn(8), torch.randn(4, 8)
    ours = cache.clone()
    assert_same(compiled(step)(x, ours), step(x, cache))
    assert_same(ours, cache)


@torch.no_grad()
def test_one_value_under_two_names_is_two_tensors() -> None:
    def step(x: Tensor) -> tuple[Tensor, ...]:
        first, second = torch.zeros(3, 8), torch.zeros(3, 8)
        copy = x.clone()
        put(x[0], first, 1)
        put(x[1], second, 2)
        put(x[2], copy, 0)
        return first, second, copy, x + 1

    x = torch.randn(3, 8)
    run = compiled(step)
    for _ in range(2):  # constants are as they were
        assert_same(run(x), step(x))


@torch.no_grad()
def test_lists_and_none_among_what_is_written() -> None:
    def step(x: Tensor, a: Tensor, b: Tensor, count: Tensor) -> Tensor:
        first = put_all(x * 2, [a, b], None)
        return first + put_all(x, [b], count)

    inputs = [torch.randn(4), torch.randn(4), torch.randn(4), torch.tensor(3)]
    ours = [t.clone() for t in inputs]
    assert_same(compiled(step)(*ours), step(*inputs))
    assert places[:3] == [ours[1].data_ptr(), ours[2].data_ptr(), ours[2].data_ptr()]
    assert_same(ours, inputs)


@torch.no_grad()
def test_an_argument_that_is_also_read() -> None:
    def step(cache: Tensor) -> Tensor:
        put(cache[1], cache, 0)
        return cache.sum()

    cache = torch.randn(3, 4)
    ours = cache.clone()
    assert_same(compiled(step)(ours), step(cache))
    assert_same(ours, cache)


@torch.no_grad()
def test_programs_write_to_inputs_beside_operators() -> None:
    def step(x: Tensor, state: Tensor, cache: Tensor) -> Tensor:
        state.mul_(0.5).add_(x)
        put(state, cache, 1)
        cache.add_(1)
        return scaled(state, 2.0) + cache[1]

    x, state, cache = torch.randn(8), torch.randn(8), torch.randn(2, 8)
    ours = state.clone(), cache.clone()
    run = compiled(step)
    for _ in range(2):
        assert_same(run(x, *ours), step(x, state, cache))
        assert_same(ours, (state, cache))


def test_training_keeps_what_the_backward_pass_needs() -> None:
    def loss(x: Tensor, cache: Tensor) -> Tensor:
        product = (x * cache.clone()).sum()
        put(x.detach()[0], cache, 0)
        return product + (x.sin() * cache).sum()

    x, cache = torch.randn(3, 4, requires_grad=True), torch.randn(3, 4)
    ours = cache.clone()
    results = [torch.autograd.grad(call(x, buffer), x)[0] for call, buffer in ((compiled(loss), ours), (loss, cache))]
    torch.testing.assert_close(*results)
    assert_same(ours, cache)


@torch.no_grad()
def test_sizes_as_arguments() -> None:
    def step(x: Tensor, cache: Tensor) -> Tensor:
        put(x.sum(0), cache, x.shape[0] - 1)
        return scaled(x, float(x.shape[0])) + cache[0]

    run = compiled(step, dynamic=True)
    for rows in (2, 5, 3):
        x, cache = torch.randn(rows, 4), torch.zeros(6, 4)
        ours = cache.clone()
        assert_same(run(x, ours), step(x, cache))
        assert_same(ours, cache)


@torch.no_grad()
def test_beside_sizes_that_depend_on_data() -> None:
    def step(x: Tensor, cache: Tensor) -> Tensor:
        put(x * 2, cache, 1)
        return scaled(cache[1][x > 0], 2.0).sum()

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        x, cache = torch.randn(8), torch.zeros(2, 8)
        ours = cache.clone()
        assert_same(compiled(step)(x, ours), step(x, cache))
    assert_same(ours, cache)
    assert places[0] == ours.data_ptr()


def test_refused_by_name_where_the_user_asks_for_that() -> None:
    run = compiled(lambda x: scaled(x, 2.0), options={"fallback": "error"})
    with pytest.raises(Exception, match=r"flagos_tests\.scaled.*FLAGOS-654"):
        run(torch.ones(2))


@torch.library.custom_op("flagos_tests::fill", mutates_args=("target",))
def fill(target: Tensor, value: float) -> Tensor:
    before = target.clone()
    target.fill_(value)
    return before


@fill.register_fake
def _(target: Tensor, value: float) -> Tensor:
    return torch.empty_like(target)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int64, torch.bool])
@pytest.mark.parametrize("shape", [(3, 4), (5, 0), ()], ids=str)
@torch.no_grad()
def test_new_memory_lies_as_it_was_traced(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    def run(x: Tensor) -> tuple[Tensor, Tensor]:
        dense, across = torch.empty_like(x, dtype=dtype), torch.empty(shape[::-1], dtype=dtype).t()
        fill(dense, 1), fill(across, 1)
        return dense, across

    x = torch.randn(shape)
    for given, expected in zip(compiled(run)(x), run(x), strict=True):
        assert_same(given, expected)
        assert (given.dtype, given.stride()) == (expected.dtype, expected.stride())


@torch.no_grad()
def test_new_memory_is_filled_where_pytorch_is_asked_to() -> None:
    def run(x: Tensor) -> Tensor:
        return fill(torch.empty_like(x), 1.0)

    torch.use_deterministic_algorithms(True)
    try:
        assert compiled(run)(torch.randn(64)).isnan().all()
    finally:
        torch.use_deterministic_algorithms(False)
