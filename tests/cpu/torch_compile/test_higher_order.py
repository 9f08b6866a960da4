"""Operators that take functions: conditionals, loops, scans, attention with a score function, checkpoints."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch._higher_order_ops import associative_scan, scan, while_loop
from torch.nn import functional
from torch.nn.attention import flex_attention as flex

from support.torch_compile import check_function, compiled

# What PyTorch before 2.13 does wrong itself, with backend="eager" as well.
BEFORE_2_13 = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13)


def check_gradient(function: Callable[..., torch.Tensor], *inputs: torch.Tensor, eager: Callable | None = None) -> None:
    """The gradient of a number by the last input, on the same random numbers; ``eager``: the oracle, if another."""
    gradients = []
    for call in (compiled(function), eager or function):
        torch.manual_seed(3)
        last = inputs[-1].detach().clone().requires_grad_()
        gradients += torch.autograd.grad(call(*inputs[:-1], last), last)
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("sign", [1, -1])
def test_conditional(sign: int) -> None:
    def program(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, lambda x, w: (x * w).sin(), lambda x, w: (x * w * 2).cos(), (x, w)).sum()

    inputs = torch.rand(4) * sign, torch.randn(4)
    check_function(program, *inputs)
    check_gradient(program, *inputs)


def test_while_loop() -> None:
    def program(count: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = while_loop(
            lambda i, x: i < count, lambda i, x: (i + 1, (x * 1.5).sin()), (torch.tensor(0), x)
        )[1]
        return result.sum()

    def unrolled(count: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        for _ in range(int(count)):
            x = (x * 1.5).sin()
        return x.sum()

    for count in (0, 5):
        check_function(program, torch.tensor(count), torch.rand(3))
    if BEFORE_2_13:
        pytest.skip("PyTorch before 2.13 refuses the gradient of a while_loop: strides of what it carries differ")
    check_gradient(program, torch.tensor(4), torch.rand(3), eager=unrolled)


def test_scan() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        last, all_ = scan(lambda total, row: (total * row + 1, (total * row).sin()), torch.ones(3), x)
        return all_.sum() + last.sum()

    def unrolled(x: torch.Tensor) -> torch.Tensor:
        total, sines = torch.ones(3), torch.zeros(())
        for row in x:
            total, sines = total * row + 1, sines + (total * row).sin().sum()
        return sines + total.sum()

    check_function(program, torch.rand(5, 3))
    if BEFORE_2_13:
        pytest.skip("PyTorch before 2.13 gives a wrong gradient of this scan, whatever compiles it")
    check_gradient(program, torch.rand(5, 3), eager=unrolled)


def test_associative_scan() -> None:
    x = torch.rand(6, 3)
    program = compiled(lambda x: associative_scan(lambda a, b: a * b, x, 0, combine_mode="generic"))
    torch.testing.assert_close(program(x), x.cumprod(0))


def test_flex_attention() -> None:
    q, k, v = torch.randn(3, 1, 2, 128, 16)

    def causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return flex.flex_attention(q, k, v, lambda score, b, h, i, j: torch.where(i >= j, score, -float("inf")))

    expected = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.testing.assert_close(compiled(causal)(q, k, v), expected, rtol=1e-4, atol=1e-5)


def test_flex_attention_with_a_block_mask() -> None:
    q, k, v = torch.randn(3, 1, 2, 256, 16)
    mask = flex.create_block_mask(lambda b, h, i, j: (i >= j) & (i - j < 40), None, None, 256, 256, device="cpu")
    dense = torch.ones(256, 256, dtype=torch.bool).tril().triu(-39)
    expected = functional.scaled_dot_product_attention(q, k, v, dense)
    actual = compiled(lambda q, k, v: flex.flex_attention(q, k, v, block_mask=mask))(q, k, v)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


def test_checkpoint_draws_its_random_numbers_again() -> None:
    def program(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        hidden = torch.utils.checkpoint.checkpoint(
            lambda x: functional.dropout((x @ w).sin(), 0.5), x, use_reentrant=False
        )
        return hidden.square().sum()

    check_gradient(program, torch.rand(4, 4), torch.randn(4, 4))


def test_transforms() -> None:
    check_function(lambda x: torch.func.vmap(torch.func.grad(lambda row: (row**3).sum()))(x), torch.rand(3, 4))
