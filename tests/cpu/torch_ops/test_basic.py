"""Each basic operation against plain PyTorch in float64: values and gradients, compiled as one graph."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.nn import functional as F

from flagos_backend.frontends.torch import ops

Reference = Callable[..., torch.Tensor]


def _half(f: Callable[[torch.Tensor], torch.Tensor]) -> Reference:
    def gated(x: torch.Tensor) -> torch.Tensor:
        a, b = x.chunk(2, -1)
        return f(a) * b

    return gated


def _gelu(x: torch.Tensor) -> torch.Tensor:
    return F.gelu(x, approximate="tanh")


def _situ(x: torch.Tensor) -> torch.Tensor:
    a, b = x.chunk(2, -1)
    return 4 * torch.tanh(a / 4) * torch.sigmoid(a) * 25 * torch.tanh(b / 25)


def _clamped(x: torch.Tensor) -> torch.Tensor:
    a, b = x.chunk(2, -1)
    a, b = a.clamp(max=0.5), b.clamp(-0.5, 0.5)
    return a * torch.sigmoid(1.702 * a) * (b + 1)


def _interleaved(x: torch.Tensor) -> torch.Tensor:
    blocks = x.unflatten(-1, (-1, 2, 3))
    return (F.silu(blocks[..., 0, :]) * blocks[..., 1, :]).flatten(-2)


CASES: dict[str, tuple[Callable[[], torch.nn.Module], Reference]] = {
    "identity": (ops.Identity, lambda x: x * 1),
    "reshape": (lambda: ops.Reshape((-1, 3)), lambda x: x.reshape(-1, 3)),
    "scale": (lambda: ops.ConstantScale(0.7), lambda x: x * 0.7),
    "bias": (lambda: ops.Bias(12), lambda x, b: x + b),
    "dropout": (lambda: ops.Dropout(0.0), lambda x: x * 1),
    "linear": (lambda: ops.BasicLinear(12, 5), lambda x, w: x @ w.T),
    "linear_bias": (lambda: ops.Linear(12, 5), F.linear),
    "layer_norm": (lambda: ops.LayerNorm(12), lambda x, w, b: F.layer_norm(x, (12,), w, b)),
    "layer_norm_zero": (
        lambda: ops.LayerNorm((12,), zero_centered_gamma=True),
        lambda x, w, b: F.layer_norm(x, (12,), w + 1, b),
    ),
    "rms_norm": (lambda: ops.RMSNorm(12), lambda x, w: F.rms_norm(x, (12,), w, 1e-5)),
    "l2": (ops.L2Normalization, lambda x: x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()),
    "gelu": (ops.GELU, _gelu),
    "qgelu": (ops.QGELU, lambda x: x * torch.sigmoid(1.702 * x)),
    "relu": (ops.ReLU, F.relu),
    "srelu": (ops.SReLU, lambda x: F.relu(x).square()),
    "silu": (ops.SiLU, F.silu),
    "glu": (ops.GLU, _half(torch.sigmoid)),
    "geglu": (ops.GEGLU, _half(_gelu)),
    "qgeglu": (ops.QGEGLU, _half(lambda x: x * torch.sigmoid(1.702 * x))),
    "reglu": (ops.ReGLU, _half(F.relu)),
    "sreglu": (ops.SReGLU, _half(lambda x: F.relu(x).square())),
    "swiglu": (ops.SwiGLU, _half(F.silu)),
    "situglu": (ops.SiTUGLU, _situ),
    "clamped": (lambda: ops.ClampedSwiGLU(limit=0.5), _clamped),
    "interleaved": (lambda: ops.SwiGLU(glu_interleave_size=3), _interleaved),
}
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 5e-2, torch.float16: 1e-2}


def _check(
    name: str, dtype: torch.dtype, shape: tuple[int, ...], run: Callable[[torch.nn.Module], torch.nn.Module]
) -> None:
    make, reference = CASES[name]
    module = make().to(dtype)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter)
    x = torch.randn(shape).to(dtype).requires_grad_()
    y = run(module)(x)
    grad = torch.randn(y.shape).to(dtype)
    y.backward(grad)
    inputs = [t.detach().double().requires_grad_() for t in (x, *module.parameters())]
    expected = reference(*inputs)
    expected.backward(grad.double())
    assert y.dtype == dtype
    found = (y, x.grad, *(p.grad for p in module.parameters()))
    for ours, theirs in zip(found, (expected, *(t.grad for t in inputs)), strict=True):
        assert ours is not None and theirs is not None
        scale = max(1.0, theirs.abs().max().item()) if theirs.numel() else 1.0
        assert ours.shape == theirs.shape
        torch.testing.assert_close(ours.double() / scale, theirs / scale, rtol=0, atol=TOLERANCE[dtype])


@pytest.mark.parametrize("shape", [(7, 12), (3, 1, 12), (0, 12)])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("name", CASES)
def test_eager(name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    _check(name, dtype, shape, lambda module: module)


@pytest.mark.parametrize("name", CASES)
def test_compiled_is_one_graph(name: str) -> None:
    def run(module: torch.nn.Module) -> torch.nn.Module:
        return torch.compile(ops.Sequential(module), backend="flagos", fullgraph=True)

    _check(name, torch.float32, (7, 12), run)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_dropout_scales_what_it_keeps() -> None:
    op = ops.Dropout(0.25)
    x = torch.ones(4000, requires_grad=True)
    y = op(x)
    y.sum().backward()
    assert set(y.unique().tolist()) <= {0.0, torch.tensor(1 / 0.75).item()}
    assert 0.2 < (y == 0).float().mean() < 0.3
    assert torch.equal(x.grad, y.detach())
    assert torch.equal(op.eval()(x), x)


@pytest.mark.parametrize("compiled", [False, True])
def test_scaled_activation(compiled: bool) -> None:
    module = ops.Sequential(ops.ScaledSwiGLU())
    run = torch.compile(module, backend="flagos", fullgraph=True) if compiled else module
    x, s = torch.randn(5, 8, requires_grad=True), torch.randn(5, requires_grad=True)
    run(x, s).square().sum().backward()
    a, b = x.detach().double().requires_grad_(), s.detach().double().requires_grad_()
    (_half(F.silu)(a) * b[:, None]).square().sum().backward()
    torch.testing.assert_close(x.grad.double(), a.grad, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(s.grad.double(), b.grad, rtol=1e-4, atol=1e-5)
