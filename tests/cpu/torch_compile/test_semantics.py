"""What a compiled graph owes its caller besides numbers: sizes, strides, aliases, mutation, errors, memory."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable

import pytest
import torch
from torch._dynamo.exc import BackendCompilerFailed
from torch.nn import functional

from flagos_backend.errors import FlagosBackendError
from flagos_backend.frontends.torch.compile import device_contexts, report
from flagos_backend.frontends.torch.compile.backend import flagos
from support.torch_compile import assert_same, check_function, compiled


def test_strides_of_outputs() -> None:
    check_function(lambda x: (x.t() + 1, (x * 2).t(), x.expand(3, 4, 5), (x + 1)[:, ::2]), torch.randn(4, 5))


def test_strides_of_inputs() -> None:
    base = torch.randn(6, 8, 4)
    views = (base[::2], base[:, 1:5], base.permute(2, 0, 1), base[0, 0].expand(3, 4), base[1:])
    check_function(lambda *views: [view * 2 + 1 for view in views], *views)


def test_zero_sizes_and_scalars() -> None:
    check_function(lambda x, y: (x.sum(0) + 1, y * 3, x * 2, y.exp()), torch.randn(0, 3), torch.tensor(1.5))


def test_inputs_as_outputs() -> None:
    x, y = torch.randn(3), torch.randn(3)
    first, second, same = compiled(lambda x, y: (x, x + y, y.view(3, 1)))(x, y)
    assert first is x
    assert same.data_ptr() == y.data_ptr()
    assert_same(second, x + y)


def test_nothing_and_numbers_as_outputs() -> None:
    assert_same(compiled(lambda x: (None, 3, x + 1, "a"))(torch.zeros(2)), (None, 3, torch.ones(2), "a"))


def test_mutated_inputs_and_buffers() -> None:
    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.add_(y)
        y[1:3] = 0
        return x.mul(2)

    ours, theirs = ([torch.arange(4.0), torch.ones(4)] for _ in range(2))
    assert_same(compiled(step)(*ours), step(*theirs))
    assert_same(ours, theirs)


def test_output_may_be_written_over() -> None:
    run = compiled(lambda x: x * 2)
    x = torch.randn(5, requires_grad=True)
    y = run(x)
    y.add_(1)
    y.sum().backward()
    assert_same(x.grad, torch.full((5,), 2.0))


def test_inputs_are_not_copied() -> None:
    """The program reads the caller's memory: what is written there between launches is what it sees."""
    run, x = compiled(lambda x: x + 1), torch.zeros(64)
    run(x)
    x.fill_(5)
    assert_same(run(x), torch.full((64,), 6.0))


@pytest.mark.parametrize("dynamic", [False, True])
def test_memory_around_a_view_is_not_read(dynamic: bool) -> None:
    """The same graph for a view that begins elsewhere; it is refused, as for one that was traced so."""
    memory = torch.arange(12.0)
    function = torch.compile(lambda x: x.t().as_strided((2,), (1,), 0) + 1, backend="flagos", dynamic=dynamic)
    assert_same(function(memory[:4]), torch.tensor([1.0, 2.0]))
    with pytest.raises(FlagosBackendError, match="FLAGOS-653"):
        function(memory[4:8])
    assert_same(function(memory), torch.tensor([1.0, 2.0]))
    beyond = torch.compile(lambda x: x.as_strided((8,), (1,)) + 1, backend="flagos")
    with pytest.raises(BackendCompilerFailed, match="FLAGOS-653"):
        beyond(memory[:4])


def test_outputs_outlive_everything() -> None:
    y = compiled(lambda x: x.exp().cumsum(0))(torch.zeros(1000))
    torch._dynamo.reset()
    gc.collect()
    assert_same(y, torch.arange(1.0, 1001.0))


def test_symbolic_sizes_specialize_inside_one_graph() -> None:
    def scores(x: torch.Tensor) -> tuple[torch.Tensor, int]:
        return functional.softmax(x.view(x.shape[0] * 2, -1), -1) @ torch.ones(x.shape[1] // 2, 3), x.shape[0] * 2

    run = torch.compile(scores, backend=flagos, dynamic=True, fullgraph=True)
    for rows in (3, 5, 8, 3):
        x = torch.randn(rows, 6)
        assert_same(run(x), scores(x))
    names = [known.name for known in report.reports()]
    assert len(names) == 3, "one program for each of three sizes"
    assert len(set(names)) == 1, "all of one graph"


def test_symbolic_sizes_with_gradients() -> None:
    layer = torch.nn.Linear(6, 4)
    run = torch.compile(layer, backend=flagos, dynamic=True, fullgraph=True)
    for rows in (2, 7, 5):
        x = torch.randn(rows, 6, requires_grad=True)
        run(x).square().sum().backward()
        twin = x.detach().clone().requires_grad_()
        layer(twin).square().sum().backward()
        torch.testing.assert_close(x.grad, twin.grad)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64, torch.int32, torch.bfloat16], ids=str)
def test_a_step_counter_is_no_size(dtype: torch.dtype) -> None:
    """One program computes with every integer; where an operator rounds it otherwise than a tensor, it is as before."""

    def step(x: torch.Tensor, count: int) -> tuple[torch.Tensor, ...]:
        return x * count + 1, x - count, x / count, x > count, x.to(torch.float32) + count

    run = compiled(step)
    for count in (3, 257, 258, 2**24 + 1, -5, 7):
        x = torch.randint(300, (5,)).to(dtype)
        assert_same(run(x, count), step(x, count))
    if dtype in (torch.float32, torch.float64, torch.int64):
        assert len(report.reports()) == 2, "one for the first number, one for all others"


def test_the_gradient_of_a_step_counter_s_factor() -> None:
    run = compiled(lambda x, count: (x * count).sin().sum())
    for count in (3, 5, 6, 7):
        x = torch.randn(4, requires_grad=True)
        (gradient,) = torch.autograd.grad(run(x, count), x)
        torch.testing.assert_close(gradient, (x * count).cos() * count)
    assert len(report.reports()) == 4


def test_old_specializations_are_dropped() -> None:
    options = {"max_specializations": 2}
    run = torch.compile(lambda x: x.sin(), backend=flagos, dynamic=True, options=options)
    for rows in (3, 4, 5, 3):
        x = torch.randn(rows)
        assert_same(run(x), x.sin())
    assert len(report.reports()) == 4, "3 was compiled again"


def test_conditional_loop_and_custom_operator() -> None:
    @torch.library.custom_op("flagos_tests::twice", mutates_args=())
    def twice(x: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(x.numpy() * 2)

    twice.register_fake(torch.empty_like)

    def program(x: torch.Tensor) -> torch.Tensor:
        chosen = torch.cond(x.sum() > 0, lambda x: x.sin() + 1, lambda x: x.cos() * 3, (x,))
        return twice(chosen) + 1

    for sign in (1, -1):
        check_function(program, torch.rand(5) * sign)
    assert sum(report.reports()[-1].outside.values()) == 2


def test_error_of_an_operator_is_pytorch_s() -> None:
    run = compiled(lambda table, rows: functional.embedding(rows, table) + 1)
    table = torch.randn(4, 2)
    with pytest.raises(IndexError, match="index out of range"):
        run(table, torch.tensor([1, 9]))
    assert_same(run(table, torch.tensor([1, 3])), table[[1, 3]] + 1)


def test_error_of_the_users_own_code_is_the_same_exception() -> None:
    class OwnError(Exception):
        pass

    @torch.library.custom_op("flagos_tests::refuse", mutates_args=())
    def refuse(x: torch.Tensor) -> torch.Tensor:
        raise OwnError("no")

    refuse.register_fake(torch.empty_like)
    with pytest.raises(OwnError, match="no"):
        compiled(lambda x: refuse(x) + 1)(torch.ones(2))


def test_operators_without_lowering_are_counted_and_can_be_refused() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        return torch.special.i0(x) + 1

    check_function(program, torch.randn(4))
    assert (
        report.reports()[-1].fallback["aten.special_i0.default"] + report.reports()[-1].fallback["aten.i0.default"] == 1
    )
    with pytest.raises(Exception, match=r"has no lowering.*FLAGOS-654"):
        compiled(program, options={"fallback": "error"})(torch.randn(4))


@pytest.mark.parametrize(
    "arguments",
    [{"options": {"fallbacks": "error"}}, {"options": {"fallback": "maybe"}}, {"mode": "fast"}],
    ids=["option", "value", "mode"],
)
def test_unknown_options_are_refused_by_name(arguments: dict) -> None:
    with pytest.raises(Exception, match="FLAGOS-651"):
        compiled(lambda x: x + 1, **arguments)(torch.ones(2))


def test_sparse_tensors_are_refused_by_name() -> None:
    with pytest.raises(Exception, match=r"sparse|FLAGOS-652"):
        compiled(lambda x: torch.relu(x))(torch.eye(3).to_sparse())


def test_threads() -> None:
    """Eight threads compile and run at once."""
    run = torch.compile(lambda x: (x @ x).tanh().sum(0), backend=flagos, dynamic=True)
    failures = []

    def work(size: int) -> None:
        try:
            for _ in range(5):
                x = torch.randn(size, size)
                assert_same(run(x), (x @ x).tanh().sum(0), rtol=1e-4, atol=1e-5)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(size,)) for size in (2, 3, 4, 5, 2, 3, 4, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures


def test_memory_does_not_grow() -> None:
    run = compiled(lambda x: (x.sin() @ x).relu())
    x = torch.randn(64, 64)
    device = device_contexts.host().device
    run(x)
    gc.collect()
    before = device.memory_stats().num_allocations, device.memory_stats().bytes_in_use
    for _ in range(200):
        run(x)
    assert (device.memory_stats().num_allocations, device.memory_stats().bytes_in_use) <= before


def test_effects_take_place_in_order() -> None:
    seen = []

    @torch.library.custom_op("flagos_tests::note", mutates_args=())
    def note(x: torch.Tensor, number: int) -> None:
        seen.append((number, float(x.sum())))

    note.register_fake(lambda x, number: None)
    from torch._higher_order_ops.effects import _EffectType, _register_effectful_op

    _register_effectful_op(torch.ops.flagos_tests.note.default, _EffectType.ORDERED)

    def program(x: torch.Tensor) -> torch.Tensor:
        note(x, 1)
        y = x * 2
        note(y, 2)
        return y + 1

    assert_same(compiled(program)(torch.ones(3)), torch.full((3,), 3.0))
    assert seen == [(1, 3.0), (2, 6.0)]


def test_a_singular_matrix_is_refused_as_by_eager() -> None:
    run = compiled(torch.linalg.inv)
    matrix = torch.randn(3, 3, requires_grad=True)
    check_function(torch.linalg.inv, matrix, rtol=1e-4, atol=1e-5)
    zeros = torch.zeros(3, 3, requires_grad=True)
    try:
        torch.compile(torch.linalg.inv, backend="aot_eager")(zeros)
    except torch.linalg.LinAlgError:
        with pytest.raises(torch.linalg.LinAlgError, match="singular"):
            run(zeros)
    else:
        pytest.skip("this PyTorch (2.11) drops the check while it traces, whatever compiles")


@pytest.mark.parametrize("min_max", [torch.max, torch.min])
def test_minima_and_maxima_of_nothing_are_refused_as_by_eager(min_max: Callable[[torch.Tensor], torch.Tensor]) -> None:
    run = torch.compile(min_max, backend=flagos, dynamic=True)
    x = torch.randn(2, 3)
    assert_same(run(x), min_max(x))
    for module in (min_max, run):
        with pytest.raises(RuntimeError, match="Expected reduction dim to be specified"):
            module(torch.empty(0, 3))


def test_training_steps_do_not_keep_memory() -> None:
    layer = torch.nn.Linear(32, 32)
    run, x = compiled(torch.nn.Sequential(layer, torch.nn.GELU())), torch.randn(4, 32)
    device = device_contexts.host().device

    def steps(count: int) -> tuple[int, int]:
        for _ in range(count):
            layer.zero_grad()
            run(x).square().sum().backward()
        gc.collect()
        stats = device.memory_stats()
        return stats.num_allocations, stats.bytes_in_use

    before = steps(5)
    assert steps(495) <= before


def test_a_failed_launch_leaves_the_next_one_whole() -> None:
    run = compiled(lambda table, rows: functional.embedding(rows, table) + 1)
    table = torch.randn(4, 2)
    for _ in range(3):
        with pytest.raises(IndexError):
            run(table, torch.tensor([9]))
        assert_same(run(table, torch.tensor([2])), table[[2]] + 1)


def test_lazily_conjugated_and_negated_inputs() -> None:
    x = torch.randn(3, dtype=torch.complex64)
    check_function(lambda x: x * 2, x.conj())
    check_function(lambda x: x + 1, x.conj().imag)


def test_gradients_that_come_in_another_layout() -> None:
    x = torch.randn(3, 4, requires_grad=True)
    y = compiled(lambda x: x.sin() * 2)(x)
    for gradient in (torch.ones(()).expand(3, 4), torch.randn(4, 3).t(), torch.randn(3, 8)[:, ::2]):
        expected = torch.autograd.grad(x.sin() * 2, x, gradient)
        torch.testing.assert_close(torch.autograd.grad(y, x, gradient, retain_graph=True), expected)


def test_gradients_of_parts() -> None:
    def parts(x: torch.Tensor) -> torch.Tensor:
        pieces = (x[1:], x[:-1], x[:, ::2], x[2:5:2], x[:, -3:], x[3], x[:, -1], x[1:1], x[:, 5:6:4])
        return sum((number + 1) * (piece * piece).sum() for number, piece in enumerate(pieces))

    x = torch.randn(6, 8, requires_grad=True)
    expected, compiled_gradient = (torch.autograd.grad(call(x), x)[0] for call in (parts, compiled(parts)))
    assert_same(compiled_gradient, expected)
    assert not any("backward" in name for each in report.reports() for name in each.whole)
