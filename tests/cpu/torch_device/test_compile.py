"""torch.compile(backend="flagos") on tensors of the device."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing import assert_close
from torch.utils._mode_utils import no_dispatch
from torch.utils.checkpoint import checkpoint

from flagos_backend.frontends.torch.compile.backend import flagos
from flagos_backend.frontends.torch.compile.rng_selection import rng_of_flagos


@pytest.fixture(autouse=True)
def fresh_compiler() -> None:
    torch._dynamo.reset()


def test_training(device: torch.device) -> None:
    host = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 2))
    there = copy.deepcopy(host).to(device)
    x = torch.randn(4, 8)
    compiled = torch.compile(there, backend=flagos, fullgraph=True)
    for _ in range(2):
        expected, actual = host(x), compiled(x.to(device))
        assert actual.device == device
        assert_close(actual.detach().cpu(), expected.detach())
        expected.sum().backward(), actual.sum().backward()
    for a, b in zip(there.parameters(), host.parameters(), strict=True):
        assert a.grad is not None and a.grad.device == device
        assert_close(a.grad.cpu(), b.grad)


def test_factories_mutation_and_aliases(device: torch.device) -> None:
    def step(x: Tensor, state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        state.add_(x.sum())
        return x, x[1:], torch.arange(3, device=x.device) + state

    x, state = torch.ones(3, device=device), torch.zeros((), device=device)
    same, view, fresh = torch.compile(step, backend=flagos, fullgraph=True)(x, state)
    assert state.item() == 3
    assert same.data_ptr() == x.data_ptr() and view.data_ptr() == x[1:].data_ptr()
    assert all(t.device == device for t in (same, view, fresh))
    assert fresh.tolist() == [3.0, 4.0, 5.0]


def test_nothing_is_copied(device: torch.device) -> None:
    x = torch.ones(1 << 18, device=device)
    doubled = torch.compile(lambda x: x * 2, backend=flagos)
    doubled(x)
    torch.flagos.reset_peak_memory_stats()
    before = torch.flagos.memory_allocated()
    y = doubled(x)
    assert torch.flagos.max_memory_allocated() == before + (1 << 20)
    del y


def test_dynamic_sizes(device: torch.device) -> None:
    compiled = torch.compile(lambda x: (x * 2).sum(0), backend=flagos, dynamic=True, fullgraph=True)
    for size in (3, 5, 9):
        x = torch.randn(size, 4)
        assert_close(compiled(x.to(device)).cpu(), (x * 2).sum(0))


def test_constants_and_numbers_of_the_host(device: torch.device) -> None:
    constant = torch.tensor([1.0, 2.0, 3.0], device=device)
    compiled = torch.compile(lambda x: x * constant + torch.tensor(2.0), backend=flagos)
    assert compiled(torch.ones(3, device=device)).tolist() == [3.0, 4.0, 5.0]


def test_a_launch_inside_a_launch_goes_on_with_the_device_s_random_numbers(device: torch.device) -> None:
    """As where an operator inside a program launches another one."""
    torch.ones(1, device=device)
    torch.manual_seed(8)  # all devices
    torch.flagos.manual_seed(7)
    with rng_of_flagos():
        drawn = [torch.rand(3)]
        with rng_of_flagos():
            drawn.append(torch.rand(3))
        drawn.append(torch.rand(3))
    of_device, of_host = torch.Generator().manual_seed(7), torch.Generator().manual_seed(8)
    for numbers in drawn:
        assert torch.equal(numbers, torch.rand(3, generator=of_device))
    assert torch.equal(torch.rand(3), torch.rand(3, generator=of_host))


def test_random_numbers_are_the_device_s(device: torch.device) -> None:
    compiled = torch.compile(lambda x: nn.functional.dropout(x, 0.5), backend=flagos)
    x = torch.ones(64, device=device)
    compiled(x)
    host, state = torch.get_rng_state(), torch.flagos.get_rng_state()
    first = compiled(x)
    assert torch.equal(host, torch.get_rng_state())
    assert not torch.equal(first, compiled(x))
    torch.flagos.set_rng_state(state)
    assert torch.equal(first, compiled(x))


@pytest.mark.parametrize("backend", [flagos, "aot_eager"], ids=["flagos", "aot_eager"])
def test_a_checkpoint_draws_its_random_numbers_again(device: torch.device, backend: Callable[..., object]) -> None:
    """And other ones than the operators around it, which a program draws itself."""

    def step(x: Tensor) -> tuple[Tensor, ...]:
        before = nn.functional.dropout(x, 0.5)
        again = checkpoint(lambda x: nn.functional.dropout(x.sin(), 0.5) * torch.rand_like(x), x, use_reentrant=False)
        return before, again, nn.functional.dropout(x, 0.5)

    results = []
    for run in (step, torch.compile(step, backend=backend)):
        x = torch.linspace(0.5, 2, 64, device=device, requires_grad=True)
        torch.flagos.manual_seed(11)
        drawn = run(x)
        assert not torch.equal(drawn[0], drawn[2])
        drawn[1].sum().backward()
        results.append([*drawn, x.grad, torch.rand(2, device=device)])
    assert_close(results[1], results[0])


def test_what_is_called_back_draws_the_device_s_random_numbers_in_turn(device: torch.device) -> None:
    @torch.library.custom_op("flagos_tests::noise", mutates_args=())
    def noise(x: Tensor) -> Tensor:
        return torch.rand_like(x) + torch.rand(x.shape).to(x.device)

    noise.register_fake(torch.empty_like)

    def step(x: Tensor) -> tuple[Tensor, ...]:
        return nn.functional.dropout(x, 0.5), noise(x), nn.functional.dropout(x, 0.5), noise(x)

    results = []
    for run in (step, torch.compile(step, backend=flagos)):
        torch.manual_seed(11)  # all devices
        torch.flagos.manual_seed(12)
        results.append([*run(torch.ones(64, device=device)), torch.rand(2, device=device), torch.rand(2)])
    assert_close(results[1], results[0])


def test_attention_is_one_operator(device: torch.device) -> None:
    q = torch.randn(1, 2, 4, 8)
    compiled = torch.compile(nn.functional.scaled_dot_product_attention, backend=flagos, fullgraph=True)
    there = q.to(device).requires_grad_()
    actual = compiled(there, there, there)
    assert_close(actual.detach().cpu(), nn.functional.scaled_dot_product_attention(q, q, q))
    actual.sum().backward()


def test_autocast(device: torch.device) -> None:
    layer = nn.Linear(4, 4).to(device)

    def step(x: Tensor) -> Tensor:
        with torch.autocast("flagos", dtype=torch.bfloat16):
            y: Tensor = layer(x)
            return y

    x = torch.randn(2, 4, device=device)
    y = torch.compile(step, backend=flagos, fullgraph=True)(x)
    assert y.dtype is torch.bfloat16
    assert_close(y, step(x))


@pytest.mark.parametrize("backend", [flagos, "aot_eager"], ids=["flagos", "aot_eager"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("bias", [True, False], ids=["biases", "no biases"])
@pytest.mark.parametrize("cell", [nn.LSTMCell, nn.GRUCell])
def test_recurrent_cells(
    device: torch.device, cell: type[nn.Module], bias: bool, dtype: torch.dtype, backend: Callable[..., object]
) -> None:
    """For which PyTorch has operators that are not the host's, and not all of them rules to trace by."""
    host = cell(3, 5, bias=bias)
    there = copy.deepcopy(host).to(device, dtype)
    compiled = torch.compile(there, backend=backend, fullgraph=True)
    x = torch.randn(2, 3)
    for module, given in ((host, x), (compiled, x.to(device, dtype))):
        state = module(given)
        parts = state if isinstance(state, tuple) else (state,)
        state = module(given, state)
        sum(part.square().sum() for part in (*parts, *(state if isinstance(state, tuple) else (state,)))).backward()
    tolerance = {"rtol": 0.05, "atol": 0.05} if dtype is torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-6}
    for a, b in zip(there.parameters(), host.parameters(), strict=True):
        assert a.grad is not None
        assert_close(a.grad.cpu().float(), b.grad, **tolerance)


@pytest.mark.parametrize("backend", [flagos, "aot_eager"], ids=["flagos", "aot_eager"])
def test_a_generator_of_the_device(device: torch.device, backend: Callable[..., object]) -> None:
    def draw(x: Tensor, generator: torch.Generator) -> Tensor:
        noisy = x * 2 + torch.randn(4, generator=generator, device=x.device)
        generator.manual_seed(3)
        return noisy + torch.rand(4, generator=generator, device=x.device)

    x = torch.randn(4, device=device)
    expected = draw(x, torch.Generator(device).manual_seed(7))
    assert_close(torch.compile(draw, backend=backend)(x, torch.Generator(device).manual_seed(7)), expected)


@pytest.mark.parametrize(("bins", "low", "high"), [(4, 0, 3), (5, -2, 7), (3, 0.5, 8.5)])
def test_histograms_of_integers(device: torch.device, bins: int, low: float, high: float) -> None:
    values = torch.randint(0, 9, (2, 30))
    count = torch.compile(lambda x: torch.histc(x, bins, low, high) * 2, backend=flagos, fullgraph=True)
    expected = torch.histc(values.double(), bins, int(low), int(high)) * 2
    assert_close(count(values.int().to(device)).cpu(), expected.int())
    assert_close(count(torch.empty(0, dtype=torch.int64, device=device)).cpu(), torch.zeros(bins, dtype=torch.int64))


@pytest.mark.parametrize("backend", [flagos, "aot_eager"], ids=["flagos", "aot_eager"])
@pytest.mark.parametrize("size", [(5, 5), (2, 3, 0)])
def test_operators_that_pytorch_traces_by_running_them(
    device: torch.device, backend: Callable[..., object], size: tuple[int, ...]
) -> None:
    """On zeros, made in the form of tensors that have no memory."""
    x = torch.randn(size)
    factor = torch.compile(lambda x: torch.geqrf(x.mT), backend=backend, fullgraph=True)
    for ours, theirs in zip(factor(x.to(device)), torch.geqrf(x.mT), strict=True):
        assert ours.device == device
        assert_close(ours.cpu(), theirs)


@pytest.mark.parametrize(
    "options", [{}, {"dtype": torch.float64}, {"device": "cpu"}, {"memory_format": torch.contiguous_format}], ids=str
)
def test_zeros_in_the_form_of_what_has_no_memory(device: torch.device, options: dict[str, Any]) -> None:
    x = torch.randn(2, 3, device=device).t()
    with FakeTensorMode() as mode:
        traced = mode.from_tensor(x)
    with no_dispatch():  # as PyTorch makes operands to run an operator on
        zeros = torch.zeros_like(traced, **options)
    expected = torch.zeros_like(x, **options)
    assert type(zeros) is Tensor and zeros.device == expected.device
    assert zeros.stride() == expected.stride()
    assert_close(zeros.cpu(), expected.cpu(), rtol=0, atol=0)
