"""Programs on the host that call the library seldom or never."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest
import torch
from torch import nn
from torch.nn import functional

from flagos_backend.frontends.torch.compile import report
from support.torch_compile import check_function, check_training, compiled


class Regression(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3), nn.Tanh())

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return functional.mse_loss(self.layers(x), target)


def test_a_small_model_calls_no_library_forward_or_backward() -> None:
    check_training(Regression(), (torch.randn(4, 5), torch.randn(4, 3)))
    assert len(report.reports()) == 2
    for known in report.reports():
        assert not known.whole and not known.fallback, known


def test_an_operator_left_whole_leaves_the_others_lowered() -> None:
    weight, bias = torch.randn(3, 5), torch.randn(3)
    check_function(lambda x: functional.linear(x, weight, bias).cumsum(0), torch.randn(4, 5))
    assert set(report.reports()[-1].whole) == {"aten.cumsum.default"}


@pytest.mark.parametrize("approximate", ["tanh", "none"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_gelu(dtype: torch.dtype, approximate: str) -> None:
    x = torch.cat([torch.randn(100), torch.tensor([0.0, -0.0, 1e-30, 9.0, -9.0, 80.0, -80.0, torch.nan])])
    check_function(lambda x: functional.gelu(x, approximate=approximate), x.to(dtype))
    assert set(report.reports()[-1].whole) == ({"aten.gelu.default"} if dtype is torch.bfloat16 else set())
    if dtype is not torch.bfloat16:  # of an infinity ATen's loop over vectors makes NaN
        assert compiled(functional.gelu)(torch.full((9,), torch.inf, dtype=dtype)).isposinf().all()
    gradients = []
    for run in (functional.gelu, compiled(functional.gelu)):
        leaf = x.to(dtype).requires_grad_()
        gradients.append(torch.autograd.grad(run(leaf, approximate=approximate).sum(), leaf)[0])
    torch.testing.assert_close(*gradients, equal_nan=True)


@pytest.mark.parametrize("sizes", [(6, 3), (2, 3, 5), (2, 3, 4, 5), (1, 3, 2, 3, 4), (0, 3, 4)], ids=str)
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_batch_norm_by_known_statistics(dtype: torch.dtype, affine: bool, sizes: tuple[int, ...]) -> None:
    norm = nn.BatchNorm1d(3, affine=affine).to(dtype).eval()
    norm._check_input_dim = lambda x: None
    for tensor in norm.state_dict().values():
        if tensor.is_floating_point():
            tensor.uniform_(0.5, 2)
    x = torch.randn(sizes).to(dtype)
    with torch.no_grad():
        check_function(norm, x)
    if x.numel():
        assert bool(report.reports()[-1].whole) is (dtype is torch.bfloat16)
    gradients = []
    x = x.abs() + 2  # above every mean: gradients add up numbers of one sign, which f32 knows to a few units
    for run in (norm, compiled(norm)):
        leaf = x.clone().requires_grad_()
        result = run(leaf)
        gradients.append(torch.autograd.grad((result * result).sum(), [leaf, *norm.parameters()]))
    torch.testing.assert_close(*gradients, equal_nan=True)


def test_results_that_lie_in_another_order_are_taken_as_they_lie() -> None:
    """Attention's heads lie behind its positions: what follows reads them there."""
    width, heads = 8, 2
    projection = torch.randn(width, width)

    def attend(x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.unflatten(-1, (heads, -1)).transpose(1, 2) for part in x.chunk(3, -1))
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return attended.transpose(1, 2).flatten(2) @ projection

    check_function(attend, torch.randn(2, 5, 3 * width))
    x = torch.randn(2, 5, 3 * width)
    gradients = []
    for run in (attend, compiled(attend)):
        leaf = x.clone().requires_grad_()
        gradients.append(torch.autograd.grad(run(leaf).square().sum(), leaf)[0])
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("addend", [(3,), (4, 1), (4, 3), (1, 3), ()], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_products_with_an_addend(addend: tuple[int, ...], dtype: torch.dtype) -> None:
    x, y, b = (torch.randn(size).to(dtype) for size in ((4, 5), (3, 5), addend))
    check_function(lambda b, x, y: torch.addmm(b, x, y.t()), b, x, y)
    check_function(lambda b, x, y: torch.addmm(b, x, y.t(), beta=0.5, alpha=2), b, x, y)


@pytest.mark.parametrize("sizes", [(4, 3), ()], ids=str)
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_mean_squared_error(sizes: tuple[int, ...], reduction: str) -> None:
    x, y = torch.randn(sizes, requires_grad=True), torch.randn(sizes)
    expected = functional.mse_loss(x, y, reduction=reduction)
    actual = compiled(functional.mse_loss)(x, y, reduction=reduction)
    torch.testing.assert_close(actual, expected, equal_nan=True)
    gradients = [torch.autograd.grad(loss.sum(), x)[0] for loss in (actual, expected)]
    torch.testing.assert_close(*gradients, equal_nan=True)


def test_a_target_that_broadcasts() -> None:
    with pytest.warns(UserWarning, match="different to the input size"):
        check_function(functional.mse_loss, torch.randn(4, 3), torch.randn(3))


def test_the_mean_of_nothing() -> None:
    check_function(functional.mse_loss, torch.randn(0, 3), torch.randn(0, 3))


def test_loops_beside_library_calls_take_the_threads_that_torch_takes() -> None:
    code = """
    import os, torch
    from flagos_backend.frontends.torch.compile.backend import flagos
    torch.set_num_threads(1)
    x = torch.randn(512, 512)
    def threads_after(call):
        torch.compile(call, backend=flagos)(x)
        return len(os.listdir("/proc/self/task"))
    alone = threads_after(lambda x: x.sin() + x)
    beside = threads_after(lambda x: torch.nn.functional.layer_norm(x.sin() + x, (512,)).exp() + 1)
    print(beside - alone)
    """
    run = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["0"]
