"""Training of what reads a tensor and then changes it: gradients are those of the values from before, eager is the
oracle. Each case runs two steps, of which the second reads what the first has left."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint

from flagos_backend.frontends.torch.compile import backend
from support.torch_compile import compiled

DEVICES = ["cpu", "flagos"]
ROWS, COLUMNS = 5, 4
TOLERANCE = {"rtol": 1e-4, "atol": 1e-5}


def scaled(x: Tensor, s: Tensor) -> Tensor:
    y = x * s.exp()
    s.mul_(0.9)
    return y.sin()


def without_gradients(x: Tensor, s: Tensor) -> Tensor:
    y = x * s.exp()
    with torch.no_grad():
        s.mul_(0.9)
    return y.sin()


def replaced(x: Tensor, s: Tensor) -> Tensor:
    y = x * (s + 1)
    s.copy_(x.detach().mean(0))
    return y


def normalized(x: Tensor, s: Tensor) -> Tensor:
    y = x * torch.rsqrt(s + 1e-5)
    s.lerp_(x.detach().var(0), 0.1)
    return y * y


def several(x: Tensor, s: Tensor, t: Tensor) -> Tensor:
    y = (x * s.exp() + t.tanh()) * t.sigmoid()
    s.mul_(0.9)
    t.add_(s)
    return y * s.cos()


def views(x: Tensor, s: Tensor) -> Tensor:
    y = x * s[0].exp() * s[1, :1].sigmoid() + (x[:, ::2] * s[1, ::2].exp()).sum()
    s[0].mul_(0.9)
    s[1].copy_(x.detach().mean(0))
    return y


def repeated(x: Tensor, s: Tensor) -> Tensor:
    """What is saved is a view of a part of ``s``."""
    y = x * s[1, None].expand(ROWS, COLUMNS).sigmoid()
    s.mul_(0.9)
    return y.sin()


def of_every_other_column(x: Tensor, s: Tensor) -> Tensor:
    """As above, and the view is not dense."""
    y = x[:, ::2] * s[1:2, ::2].expand(ROWS, COLUMNS // 2).sigmoid()
    s.mul_(0.9)
    return y.sin()


CASES: list[tuple[Callable[..., Tensor], list[tuple[int, ...]]]] = [
    *((function, [(COLUMNS,)]) for function in (scaled, without_gradients, replaced, normalized)),
    (several, [(COLUMNS,), (COLUMNS,)]),
    (views, [(2, COLUMNS)]),
    (repeated, [(64, COLUMNS)]),
    (of_every_other_column, [(64, COLUMNS)]),
]


class Averaging(nn.Module):
    """Centres and scales by a buffer that then follows the mean."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(COLUMNS, COLUMNS)
        self.register_buffer("s", torch.ones(COLUMNS))

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        z = (y - self.s.tanh()) * self.s.sigmoid()
        self.s.mul_(0.9).add_(y.detach().mean(0), alpha=0.1)
        return z


class Normalizing(nn.Module):
    """Batch norm in training, which a checkpoint computes again in the backward pass."""

    def __init__(self, *, again: bool) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(COLUMNS, 6), nn.BatchNorm1d(6), nn.ReLU())
        self.head = nn.Linear(6, COLUMNS)
        self.again = again

    def forward(self, x: Tensor) -> Tensor:
        return self.head(checkpoint(self.block, x, use_reentrant=False) if self.again else self.block(x))


def steps(call: Callable[..., Tensor], inputs: Sequence[Tensor], state: Sequence[Tensor]) -> list[Tensor]:
    """Results and gradients of a step for each of the inputs, and what is left of the state."""
    found = []
    for given in inputs:
        x = given.clone().requires_grad_()
        y = call(x, *state)
        y.sin().sum().backward()
        found += [y.detach(), x.grad]
    return [tensor.detach().cpu() for tensor in (*found, *state)]


def trained(module: nn.Module, call: Callable[..., Tensor], inputs: Sequence[Tensor]) -> list[Tensor]:
    """Results, gradients and buffers over a step for each of the inputs."""
    found = steps(call, inputs, ())
    return [*found, *(tensor.detach().cpu() for tensor in (*(p.grad for p in module.parameters()), *module.buffers()))]


def batches(device: str) -> list[Tensor]:
    return [(torch.rand(ROWS, COLUMNS) * 2 - 1).to(device) for _ in range(2)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize(("function", "sizes"), CASES, ids=[function.__name__ for function, _ in CASES])
def test_tensors(function: Callable[..., Tensor], sizes: list[tuple[int, ...]], dynamic: bool, device: str) -> None:
    inputs, state = batches(device), [(torch.rand(size) + 0.5).to(device) for size in sizes]
    expected = steps(function, inputs, [tensor.clone() for tensor in state])
    torch.testing.assert_close(steps(compiled(function, dynamic=dynamic), inputs, state), expected, **TOLERANCE)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_buffers(dynamic: bool, device: str) -> None:
    module, inputs = Averaging().to(device), batches(device)
    twin = copy.deepcopy(module)
    expected = trained(module, module, inputs)
    torch.testing.assert_close(trained(twin, compiled(twin, dynamic=dynamic), inputs), expected, **TOLERANCE)


@pytest.mark.parametrize("device", DEVICES)
def test_a_checkpoint_reads_the_values_from_before(device: str) -> None:
    """Eager mode would compute it again from the changed ones; it is right without the checkpoint."""

    def step(x: Tensor, s: Tensor) -> Tensor:
        y = checkpoint(lambda x: x * s.exp(), x, use_reentrant=False)
        s.mul_(0.9)
        return y.sin()

    inputs, state = batches(device), [torch.rand(COLUMNS).to(device)]
    expected = steps(scaled, inputs, [tensor.clone() for tensor in state])
    torch.testing.assert_close(steps(compiled(step), inputs, state), expected, **TOLERANCE)


@pytest.mark.parametrize("device", DEVICES)
def test_batch_norm_computed_again(device: str) -> None:
    """Against batch norm that is not: eager mode would update the statistics twice."""
    module, inputs = Normalizing(again=False).to(device), batches(device)
    twin = Normalizing(again=True).to(device)
    twin.load_state_dict(module.state_dict())
    expected = trained(module, module, inputs)
    torch.testing.assert_close(trained(twin, compiled(twin), inputs), expected, **TOLERANCE)


@pytest.mark.parametrize("device", DEVICES)
def test_a_tensor_with_a_gradient(device: str) -> None:
    def assign(x: Tensor, a: Tensor) -> Tensor:
        a.mul_(x)
        a[0] = x[0]
        return a.sum(0) * 2

    weight, *inputs = (torch.rand(ROWS, COLUMNS).to(device) for _ in range(3))
    outcomes = []
    for call in (compiled(assign), assign):
        leaves = [tensor.clone().requires_grad_() for tensor in (weight, *inputs)]
        a = leaves[0] * 1.5
        y = sum(call(x, a) for x in leaves[1:])
        gradients = torch.autograd.grad(y.sin().sum() + a.cos().sum(), leaves)
        outcomes.append([tensor.detach().cpu() for tensor in (y, a, *gradients)])
    torch.testing.assert_close(*outcomes, **TOLERANCE)


def test_parts_of_a_subclass() -> None:
    inputs, parts = batches("cpu"), [torch.rand(COLUMNS) for _ in range(2)]
    outcomes = []
    for call in (compiled(scaled), scaled):
        state = TwoTensor(*(part.clone() for part in parts))
        found = []
        for given in inputs:
            x = given.clone().requires_grad_()
            call(x, state).sum().backward()
            found += [x.grad.a, x.grad.b]
        outcomes.append([*found, state.a, state.b])
    torch.testing.assert_close(*outcomes, **TOLERANCE)


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> list[torch.Size]:
    """The sizes of what the forward graphs to come copy."""
    sizes: list[torch.Size] = []
    keep = backend.keep_values

    def spy(forward: GraphModule, changed: dict[str, int], results: int) -> None:
        keep(forward, changed, results)
        copies = forward.graph.find_nodes(op="call_function", target=torch.ops.aten.clone.default)
        sizes.extend(node.meta["val"].shape for node in copies)

    monkeypatch.setattr(backend, "keep_values", spy)
    return sizes


def test_only_what_is_saved_is_copied(copied: list[torch.Size]) -> None:
    def step(x: Tensor, s: Tensor, count: Tensor) -> Tensor:
        y = (x * s.exp()).sin()
        s.mul_(0.9)
        count.add_(1)
        return y

    compiled(step)(torch.randn(ROWS, COLUMNS, requires_grad=True), torch.rand(COLUMNS), torch.zeros(()))
    assert copied == [torch.Size([COLUMNS])]


def test_what_is_smaller_is_saved_instead(copied: list[torch.Size]) -> None:
    """Of a codebook a few rows, though it is a buffer, which else costs nothing to save."""

    class Codebook(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("codes", torch.randn(64, COLUMNS))

        def forward(self, x: Tensor) -> Tensor:
            y = (x * self.codes[:ROWS].exp()).sin()
            self.codes.mul_(0.9)
            return y

    compiled(Codebook())(torch.randn(ROWS, COLUMNS, requires_grad=True)).sum().backward()
    assert copied == []


def test_batch_norm_copies_nothing(copied: list[torch.Size]) -> None:
    compiled(Normalizing(again=False))(torch.randn(ROWS, COLUMNS)).sum().backward()
    assert copied == []
