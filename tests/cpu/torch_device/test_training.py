"""Modules, autograd, optimizers, mixed precision and torch.func: gradients are those of the host."""

from __future__ import annotations

import copy
import subprocess
import sys
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.testing import assert_close


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(x)
        return y


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.inner = kind(8, 4, 2, bidirectional=True)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(x)[0]
        return y


MODULES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (lambda: nn.Sequential(nn.Linear(8, 4), nn.GELU(), nn.LayerNorm(4), nn.Linear(4, 2)), (3, 8)),
    "convolution": (
        lambda: nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2)),
        (2, 2, 8, 8),
    ),
    "transposed": (lambda: nn.Sequential(nn.ConvTranspose1d(2, 3, 3), nn.GroupNorm(3, 3), nn.Softmax(-1)), (2, 2, 8)),
    "attention": (Attention, (2, 5, 8)),
    "lstm": (lambda: Recurrent(nn.LSTM), (5, 2, 8)),
    "gru": (lambda: Recurrent(nn.GRU), (5, 2, 8)),
    "rnn": (lambda: Recurrent(nn.RNN), (5, 2, 8)),
    "rms_norm": (
        lambda: nn.Sequential(nn.RMSNorm(8), nn.SiLU()),
        (3, 8),
    ),
}


@pytest.mark.parametrize("name", MODULES)
def test_forward_and_backward(device: torch.device, name: str) -> None:
    make, shape = MODULES[name]
    host = make()
    there = copy.deepcopy(host).to(device)
    x = torch.randn(shape)
    x_host, x_there = x.clone().requires_grad_(), x.to(device).requires_grad_()
    expected, actual = host(x_host), there(x_there)
    weight = torch.randn_like(expected)
    (expected * weight).sum().backward()
    (actual * weight.to(device)).sum().backward()
    assert_close(actual.detach().cpu(), expected.detach())
    assert_close(x_there.grad.cpu(), x_host.grad)
    for a, b in zip(there.parameters(), host.parameters(), strict=True):
        assert_close(a.grad.cpu(), b.grad)


OPTIMIZERS: list[tuple[type[torch.optim.Optimizer], dict[str, Any]]] = [
    (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
    (torch.optim.SGD, {"fused": True}),
    (torch.optim.AdamW, {"foreach": True}),
    (torch.optim.AdamW, {"foreach": False}),
    (torch.optim.AdamW, {"fused": True}),
    (torch.optim.AdamW, {"capturable": True}),
    (torch.optim.Adagrad, {}),
    (torch.optim.RMSprop, {"centered": True}),
    (torch.optim.NAdam, {}),
]


@pytest.mark.parametrize(("optimizer", "options"), OPTIMIZERS)
def test_optimizers(device: torch.device, optimizer: Any, options: dict[str, Any]) -> None:
    host = nn.Linear(4, 3)
    there = copy.deepcopy(host).to(device)
    x = torch.randn(2, 4)
    on_host = {name: value for name, value in options.items() if name != "capturable"}
    for module, data, given in ((host, x, on_host), (there, x.to(device), options)):
        steps = optimizer(module.parameters(), lr=0.1, **given)
        for _ in range(3):
            steps.zero_grad()
            module(data).square().sum().backward()
            steps.step()
    for a, b in zip(there.parameters(), host.parameters(), strict=True):
        assert_close(a.detach().cpu(), b.detach())


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.embedding(tokens))
        return logits


def test_parameters_move_in_place(device: torch.device) -> None:
    model = Tied()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model(torch.tensor([1])).sum().backward()
    gradient = model.head.weight.grad
    assert gradient is not None
    for move in (lambda: model.to(device), model.cpu, model.flagos, lambda: model.to("cpu", torch.float64)):
        move()
        weight = model.head.weight
        assert model.embedding.weight is weight
        assert optimizer.param_groups[0]["params"][0] is weight
        assert weight.grad is not None and weight.grad.device == weight.device
        assert_close(weight.grad.cpu().float(), gradient.cpu())
    assert len(list(model.parameters())) == 1


def test_parameters_that_cannot_move_in_place_stay_tied(device: torch.device) -> None:
    model = Tied()
    watched = weakref.ref(model.head.weight)
    with pytest.warns(UserWarning, match="was replaced, not moved in place"):
        model.to(device)
    assert model.head.weight is model.embedding.weight is not watched()
    assert model.head.weight.is_flagos


def test_autocast(device: torch.device) -> None:
    layer = nn.Linear(4, 4).to(device)
    x = torch.randn(2, 4, device=device)
    with torch.autocast("flagos", dtype=torch.bfloat16):
        y = layer(x)
        assert y.dtype is torch.bfloat16
        assert y.exp().dtype is torch.float32
        assert y.softmax(-1).dtype is torch.float32
        assert functional.layer_norm(y, (4,)).dtype is torch.float32
        assert torch.addcmul(x, y, y).dtype is torch.float32
        with torch.autocast("flagos", enabled=False):
            assert torch.mm(x, x.t()).dtype is torch.float32
        with pytest.raises(RuntimeError, match="unsafe to autocast"):
            functional.binary_cross_entropy(y.float().sigmoid(), torch.ones_like(x))
    y.sum().backward()
    assert layer.weight.grad is not None and layer.weight.grad.dtype is torch.float32


@pytest.mark.parametrize("first", ["torch.ones(1, device='flagos')", "None"])
def test_autocast_without_a_type_has_that_of_the_host_or_of_accelerators(first: str) -> None:
    code = f"""
import torch
from flagos_backend.frontends.torch.autoload import enable
enable()
{first}
found = torch.autocast("flagos").fast_dtype
from flagos_backend.frontends.torch.device.runtime import runtime
print(found, runtime().device.is_host_memory, torch.autocast("flagos").fast_dtype)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=250)
    found, host, later = done.stdout.split()
    assert found == later == ("torch.bfloat16" if host == "True" else "torch.float16"), done.stderr


def test_autocast_of_the_host_leaves_the_device_alone(device: torch.device) -> None:
    x = torch.randn(3, 3, device=device)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        product = torch.mm(x, x)
    assert product.dtype is torch.float32
    assert_close(product.cpu(), x.cpu() @ x.cpu())


def test_gradient_scaler(device: torch.device) -> None:
    layer = nn.Linear(4, 1).to(device)
    before = layer.weight.detach().clone()
    scaler, optimizer = torch.amp.GradScaler("flagos"), torch.optim.SGD(layer.parameters(), lr=0.1)
    for x, moves in ((torch.full((1, 4), float("inf"), device=device), False), (torch.ones(1, 4, device=device), True)):
        optimizer.zero_grad()
        scaler.scale(layer(x).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        assert (not torch.equal(layer.weight, before)) == moves


ATTENTION: list[dict[str, Any]] = [
    {},
    {"is_causal": True},
    {"scale": 0.3},
    {"attn_mask": torch.ones(4, 6).tril().bool()},
    {"attn_mask": torch.randn(2, 1, 4, 6)},
    {"enable_gqa": True},
]


@pytest.mark.parametrize("options", ATTENTION)
def test_attention_stays_whole(device: torch.device, options: dict[str, Any]) -> None:
    q, k = torch.randn(2, 3, 4, 8), torch.randn(2, 1 if "enable_gqa" in options else 3, 6, 8)
    there = [t.to(device).requires_grad_() for t in (q, k, k)]
    host = [t.clone().requires_grad_() for t in (q, k, k)]
    moved = {name: value.to(device) if isinstance(value, Tensor) else value for name, value in options.items()}
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        actual = functional.scaled_dot_product_attention(*there, **moved)
    assert any("flash_attention" in event.name for event in profile.events())
    expected = functional.scaled_dot_product_attention(*host, **options)
    actual.sum().backward(), expected.sum().backward()
    assert_close(actual.detach().cpu(), expected.detach())
    for a, b in zip(there, host, strict=True):
        assert a.grad is not None
        assert_close(a.grad.cpu(), b.grad)


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("compiled", [False, True])
def test_an_encoder_of_padded_rows(device: torch.device, compiled: bool, gradients: bool) -> None:
    """Which PyTorch would compute as nested tensors where it can: the values of what is not padding are the same."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    host = nn.TransformerEncoder(layer, 2).eval()
    there: Any = copy.deepcopy(host).to(device)
    if compiled:
        torch._dynamo.reset()
        there = torch.compile(there, backend="flagos")
    x, padding = torch.randn(2, 5, 8), torch.tensor([[False, False, False, True, True], [False] * 5])
    with torch.set_grad_enabled(gradients):
        expected = host(x, src_key_padding_mask=padding)
        actual = there(x.to(device), src_key_padding_mask=padding.to(device))
    assert_close(actual.detach().cpu()[~padding], expected.detach()[~padding])


def test_attention_with_dropout_is_repeatable(device: torch.device) -> None:
    q = torch.randn(1, 4, 3, 8, device=device)
    torch.manual_seed(1)
    first = functional.scaled_dot_product_attention(q, q, q, dropout_p=0.5)
    torch.manual_seed(1)
    assert torch.equal(first, functional.scaled_dot_product_attention(q, q, q, dropout_p=0.5))


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_draw_the_same_numbers_again(device: torch.device, reentrant: bool) -> None:
    block = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)).to(device)
    x = torch.randn(4, 8, device=device, requires_grad=True)
    y = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=reentrant)
    y.sum().backward()
    assert x.grad is not None
    kept = (y != 0).float()
    assert_close(x.grad, kept @ block[0].weight.detach() * 2)


def test_functional_transforms(device: torch.device) -> None:
    x = torch.randn(4, 3)
    there = x.to(device)
    assert_close(torch.vmap(lambda t: t.sin().sum())(there).cpu(), x.sin().sum(1))
    assert_close(torch.func.grad(lambda t: t.sin().sum())(there).cpu(), x.cos())
    assert_close(torch.func.jvp(torch.sin, (there,), (there,))[1].cpu(), x.cos() * x)
    assert_close(torch.func.jacrev(torch.sin)(there[0]).cpu(), torch.diag(x[0].cos()))
    assert_close(torch.func.vmap(torch.func.grad(lambda t: (t**3).sum()))(there).cpu(), 3 * x**2)


def test_data_parallel_runs_on_the_one_device(device: torch.device) -> None:
    layer = nn.Linear(3, 3).to(device)
    x = torch.randn(2, 3, device=device)
    assert torch.equal(nn.DataParallel(layer)(x), layer(x))


def test_hooks(device: torch.device) -> None:
    x = torch.ones(3, device=device, requires_grad=True)
    x.register_hook(lambda gradient: gradient * 2)
    (x * 3).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [6.0] * 3


def test_inference_mode(device: torch.device) -> None:
    with torch.inference_mode():
        y = (torch.ones(3, device=device) * 2)[1:]
        y.add_(1)
    assert y.is_inference()
    assert y.tolist() == [3.0, 3.0]


def test_lazy_modules_get_their_sizes_after_the_move(device: torch.device) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.LazyConv1d(4, 3), nn.LazyBatchNorm1d(), nn.LazyLinear(2))
    weight = module[0].weight
    module.to(device).double()
    x = torch.randn(2, 3, 8, dtype=torch.float64)
    module(x.to(device)).sum().backward()
    assert module[0].weight is weight, "an optimizer made before holds it"
    assert weight.shape == (4, 3, 3)
    twin = copy.deepcopy(module).cpu()
    assert_close(module(x.to(device)).cpu(), twin(x))
