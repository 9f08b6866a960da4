"""Operators that do other things than they say: errors name them and what is wrong; later calls are unharmed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from flagos_backend.frontends.torch.compile.errors import UndeclaredWrite, UnexpectedResult
from support.torch_compile import assert_same, compiled

library = torch.library.Library("flagos_bad", "DEF")


def operator(name: str, function: Callable[..., Tensor], fake: Callable[..., Tensor]) -> Callable[..., Tensor]:
    library.define(f"{name}(Tensor x) -> Tensor")
    library.impl(name, function, "CompositeExplicitAutograd")
    library._register_fake(name, fake)
    packet: Callable[..., Tensor] = getattr(torch.ops.flagos_bad, name)
    return packet


longer = operator("longer", lambda x: torch.cat([x, x]), torch.empty_like)
narrower = operator("narrower", lambda x: x.half(), torch.empty_like)
transposed = operator("transposed", lambda x: x.t().contiguous().t() + 1, torch.empty_like)
itself = operator("itself", lambda x: x, torch.empty_like)
sly = operator("sly", lambda x: x.add_(1).clone(), torch.empty_like)


@pytest.mark.parametrize("then", [lambda x: x, lambda x: x * 2], ids=["returned", "into a program"])
@pytest.mark.parametrize(
    ("lying", "fact"),
    [
        (longer, r"float32 of sizes \[3, 4\].*float32 of sizes \[6, 4\]"),
        (narrower, "float32.*float16"),
        (transposed, r"strides \[4, 1\].*strides \[1, 3\]"),
        (itself, "memory of its argument x"),
    ],
    ids=["sizes", "dtype", "strides", "memory"],
)
@torch.no_grad()
def test_a_fake_implementation_that_lies(lying: Callable, fact: str, then: Callable) -> None:
    run = compiled(lambda x: then(lying(x.sin())))
    for _ in range(2):
        with pytest.raises(UnexpectedResult, match=rf"{fact}.*flagos_bad\.\w+.*FLAGOS-656"):
            run(torch.randn(3, 4))


@torch.no_grad()
def test_sizes_that_differ_in_a_later_call() -> None:
    grows = iter((False, True, False))
    again = operator("again", lambda x: torch.cat([x, x]) if next(grows) else x.clone(), torch.empty_like)
    run, x = compiled(lambda x: again(x * 2) + 1), torch.randn(3)
    assert_same(run(x), x * 2 + 1)
    with pytest.raises(RuntimeError, match=r"the result of flagos_bad\.again.*sizes \[3\].*sizes \[6\]"):
        run(x)
    assert_same(run(x), x * 2 + 1)


@torch.no_grad()
def test_a_write_that_is_not_declared() -> None:
    run = compiled(lambda x: sly(x) + 1)
    with pytest.raises(UndeclaredWrite, match=r"its argument x.*flagos_bad\.sly.*FLAGOS-657"):
        run(torch.randn(3))


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_an_operator_that_raises(direction: str) -> None:
    fails = iter([False])

    def kernel(x: Tensor) -> Tensor:
        if next(fails, False):
            raise ZeroDivisionError("by the operator")
        return x * 2

    name = f"flagos_bad::raises_{direction}"
    raising = torch.library.custom_op(name, kernel, mutates_args=())
    raising.register_fake(torch.empty_like)
    fine = torch.library.custom_op(f"{name}_not", lambda x: x * 2, mutates_args=(), schema="(Tensor x) -> Tensor")
    fine.register_fake(torch.empty_like)
    first, second = (raising, fine) if direction == "forward" else (fine, raising)
    first.register_autograd(lambda ctx, grad: second(grad.contiguous()))
    run, x = compiled(lambda x: (first(x.sin()) + 1).sum()), torch.randn(4, requires_grad=True)

    def gradient() -> Tensor:
        return torch.autograd.grad(run(x), x)[0]

    expected = 2 * x.cos()
    assert_same(gradient(), expected)
    fails = iter([True])
    with pytest.raises(ZeroDivisionError, match="by the operator") as caught:
        gradient()
    assert any(name.replace("::", ".") in note for note in caught.value.__notes__)
    assert_same(gradient(), expected)


@torch.no_grad()
def test_no_kernel_for_the_device() -> None:
    library.define("elsewhere(Tensor x) -> Tensor")
    library.impl("elsewhere", torch.clone, "CUDA")
    library._register_fake("elsewhere", torch.empty_like)
    with pytest.raises(NotImplementedError, match=r"flagos_bad::elsewhere.*'CPU' backend"):
        compiled(lambda x: torch.ops.flagos_bad.elsewhere(x * 2) + 1)(torch.randn(3))
