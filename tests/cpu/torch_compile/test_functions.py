"""Elementwise operators, movement and statistics that are lowered, against eager PyTorch: special values, types, empty
and scalar arrays, gradients. What is lowered leaves no operator of ATen in the program."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from flagos_backend.frontends.torch.compile import report
from support.torch_compile import compiled

SPECIAL = [0.0, -0.0, 0.5, -0.5, 1.5, -1.5, 2.5, -2.5, 1e-30, -1e-30, 3e9, -3e9, 1e19, -1e19, 1e38, -1e38]
SPECIAL += [float("inf"), -float("inf"), float("nan"), 1.0, -1.0, 2.0, -2.0, 127.4, -128.6, 255.5]

UNARY: dict[str, Callable[[Tensor], Tensor]] = {
    **{
        name: getattr(torch, name)
        for name in (
            *("acos", "acosh", "asin", "asinh", "atan", "atanh", "cosh", "sinh", "tan", "erfc"),
            *("round", "sign", "trunc"),
        )
    },
    **{f"copysign {y}": lambda x, y=y: torch.copysign(x, y) for y in (2, -0.0, 0.3)},
    **{name: getattr(torch, name) for name in ("isnan", "isinf", "isfinite", "frac")},
    **{f"pow {p}": lambda x, p=p: x**p for p in (-2, -1, -0.5, 0, 0.5, 1, 2, 3, 4, 1.7, -3)},
    **{f"power of {b}": lambda x, b=b: b**x for b in (2, 0.9, 0, 1.0, -2)},
    **{f"remainder {y}": lambda x, y=y: x % y for y in (3, -3, 0.7, 0)},
    **{f"fmod {y}": lambda x, y=y: torch.fmod(x, y) for y in (3, -3, 0.7, 0)},
    **{
        f"quotient {mode} {y}": lambda x, y=y, mode=mode: torch.div(x, y, rounding_mode=mode)
        for mode, y in itertools.product(("floor", "trunc"), (3, -3, 0.7, 0))
    },
    "clamp_min": lambda x: x.clamp(min=0.25),
    "clamp_max": lambda x: x.clamp(max=-0.25),
    "leaky_relu": lambda x: functional.leaky_relu(x, 0.1),
    "elu": functional.elu,
    "celu": lambda x: functional.celu(x, 0.7),
    "selu": functional.selu,
    "hardtanh": functional.hardtanh,
    "relu6": functional.relu6,
    "hardswish": functional.hardswish,
    "hardsigmoid": functional.hardsigmoid,
    "softplus": lambda x: functional.softplus(x, 2, 10),
    "mish": functional.mish,
}


def _same(ours: Any, eager: Any, **tolerance: float) -> None:
    torch.testing.assert_close(ours, eager, equal_nan=True, **tolerance)
    if isinstance(ours, Tensor):
        assert ours.stride() == eager.stride()


def _whole() -> set[str]:
    return {name for known in report.reports() for name in (*known.whole, *known.fallback, *known.outside)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", UNARY)
def test_special_values(name: str, dtype: torch.dtype) -> None:
    report.clear()
    function = UNARY[name]
    x = torch.tensor(SPECIAL, dtype=torch.float64).to(dtype)
    # ATen's vectors of powers are off by up to 20 units in the last place of large results.
    tolerance = {"rtol": 5e-6, "atol": 1e-38} if name.startswith("pow") and dtype is torch.float32 else {}
    _same(compiled(function)(x), function(x), **tolerance)
    if dtype in (torch.float32, torch.float64):
        assert not _whole()


@pytest.mark.parametrize("name", UNARY)
def test_random_values_and_gradients(name: str) -> None:
    function = UNARY[name]
    for shape in ((), (0, 3), (4, 33), (2, 3, 70)):
        x = (torch.randn(shape, dtype=torch.float32) * 2).requires_grad_()
        results = []
        for run in (compiled(function), function):
            result = run(x)
            differentiable = result.requires_grad
            gradient = torch.linspace(-1, 2, result.numel()).reshape(result.shape)
            results.append([result.detach(), *(torch.autograd.grad(result, x, gradient) if differentiable else ())])
        for ours, eager in zip(*results, strict=True):
            _same(ours, eager)


BINARY: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "atan2": torch.atan2,
    "copysign": torch.copysign,
    "pow": torch.pow,
    "remainder": torch.remainder,
    "fmod": torch.fmod,
    "floor_divide": torch.floor_divide,
    "trunc quotient": lambda x, y: torch.div(x, y, rounding_mode="trunc"),
    "clamp": lambda x, y: torch.clamp(x, y, y + 1),
    "clamp below": lambda x, y: torch.clamp(x, max=y),
    "addcmul": lambda x, y: torch.addcmul(x, y, x, value=0.3),
    "addcdiv": lambda x, y: torch.addcdiv(x, x, y, value=-0.3),
    "lerp near": lambda x, y: torch.lerp(x, y, 0.2),
    "lerp far": lambda x, y: torch.lerp(x, y, 0.9),
    "lerp to the end": lambda x, y: torch.lerp(x, y, 1.0),
    "lerp by a tensor": lambda x, y: torch.lerp(x, y, y),
    "logaddexp": torch.logaddexp,
    "xlogy": torch.xlogy,
    "smooth_l1": lambda x, y: functional.smooth_l1_loss(x, y, beta=0.7),
    "prelu": lambda x, y: functional.prelu(x, y.flatten()[:1]),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", BINARY)
def test_two_operands(name: str, dtype: torch.dtype) -> None:
    report.clear()
    function = BINARY[name]
    pairs = torch.tensor(list(itertools.product(SPECIAL, repeat=2)), dtype=torch.float64).to(dtype)
    for x, y in (
        (pairs[:, 0].clone(), pairs[:, 1].clone()),
        (torch.randn(6, 1, 5).to(dtype), torch.randn(4, 5).to(dtype)),
    ):
        if name in ("smooth_l1", "prelu") and x.shape != y.shape:
            continue
        # ATen's vectors of remainders are NaN where the quotient is large.
        exact = name in ("remainder", "fmod") and dtype is torch.float32
        _same(compiled(function)(x, y), function(x.double(), y.double()).to(dtype) if exact else function(x, y))
    assert not _whole()


@pytest.mark.parametrize("source", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "target", [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.bool], ids=str
)
def test_floats_become_integers_as_on_the_processor(source: torch.dtype, target: torch.dtype) -> None:
    report.clear()
    x = torch.cat([torch.tensor(SPECIAL, dtype=torch.float64), torch.randn(1000, dtype=torch.float64) * 300]).to(source)
    _same(compiled(lambda x: x.to(target))(x), x.to(target))
    assert not _whole()


MOVEMENT: dict[str, Callable[[Tensor], Any]] = {
    "roll": lambda x: x.roll((1, -2), (0, 1)),
    "roll of everything": lambda x: x.roll(7),
    "roll by more than there is": lambda x: x.roll(-23, -1),
    "repeat": lambda x: x.repeat(2, 1, 3, 2),
    "repeat nothing": lambda x: x.repeat(0, 1, 1),
    "tile": lambda x: x.tile((2, 2)),
    "write a slice": lambda x: _written(x, (slice(None), slice(1, 3))),
    "write every second": lambda x: _written(x, (slice(None), slice(0, None, 2))),
    "write a row": lambda x: _written(x, (-1,)),
    "write a column": lambda x: _written(x, (Ellipsis, 2)),
    "write the rest": lambda x: _written(x, (slice(1, None),)),
    "write nothing": lambda x: _written(x, (slice(2, 2),)),
    "nearest": lambda x: functional.interpolate(x[None], size=(7, 3)),
    "bilinear": lambda x: functional.interpolate(x[None], scale_factor=2.0, mode="bilinear"),
    "bicubic": lambda x: functional.interpolate(x[None], size=(9, 4), mode="bicubic", align_corners=True),
    "linear": lambda x: functional.interpolate(x, size=11, mode="linear"),
}


def _written(x: Tensor, index: Any) -> Tensor:
    x = x * 2
    x[index] = x[index] * 3 + 1
    return x


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", MOVEMENT)
def test_movement(name: str, dtype: torch.dtype) -> None:
    function = MOVEMENT[name]
    x = torch.randn(3, 5, 4).to(dtype).requires_grad_()
    results = []
    for run in (compiled(function), function):
        result = run(x)
        results.append([result.detach(), *torch.autograd.grad(result.square().sum(), x)])
    for ours, eager in zip(*results, strict=True):
        _same(
            ours,
            eager,
            **({} if dtype is torch.float64 else {"rtol": 2e-2, "atol": 2e-2} if dtype is torch.bfloat16 else {}),
        )


STATISTICS: dict[str, Callable[[Tensor], Any]] = {
    "var": lambda x: x.var(-1),
    "var of all": lambda x: x.var(),
    "var of two dimensions": lambda x: x.var((0, 2), correction=0, keepdim=True),
    "std": lambda x: x.std(1),
    "var_mean": lambda x: torch.var_mean(x, -1, keepdim=True),
    "var_mean of columns": lambda x: torch.var_mean(x, 0),
    "too large a correction": lambda x: x.var(0, correction=9),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", STATISTICS)
def test_statistics(name: str, dtype: torch.dtype) -> None:
    report.clear()
    function = STATISTICS[name]
    x = (torch.randn(5, 7, 33, dtype=dtype) * 3 + 100).requires_grad_()
    results = []
    for run in (compiled(function), function):
        result = run(x)
        parts = result if isinstance(result, tuple) else (result,)
        results.append([*(p.detach() for p in parts), *torch.autograd.grad(sum(p.sum() for p in parts), x)])
    for ours, eager in zip(*results, strict=True):
        _same(ours, eager, **({"rtol": 2e-5, "atol": 1e-5} if dtype is torch.float32 else {}))
    assert not _whole()


OPTIMIZERS = ("AdamW", "Adam", "RMSprop", "NAdam", "SGD", "Adagrad", "RAdam", "Adadelta", "Adamax")


@pytest.mark.parametrize("foreach", [False, True], ids=["one by one", "lists"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_is_one_program(name: str, foreach: bool) -> None:
    report.clear()
    outcomes = []
    for compile_it in (True, False):
        torch.manual_seed(3)
        parameters = [torch.nn.Parameter(torch.randn(17, 5)) for _ in range(3)]
        optimizer = getattr(torch.optim, name)(parameters, lr=0.1, foreach=foreach)
        step = torch.compile(optimizer.step, backend="flagos") if compile_it else optimizer.step
        for _ in range(3):
            for p in parameters:
                p.grad = torch.randn_like(p)
            step()
        outcomes.append([p.detach().clone() for p in parameters])
    _same(*outcomes)
    assert not _whole()


LISTS: dict[str, Callable[[list[Tensor]], Any]] = {
    "add": lambda x: torch._foreach_add(x, x, alpha=0.5),
    "add numbers": lambda x: torch._foreach_add(x, [1.0, 2.0, 3.0]),
    "scale": lambda x: torch._foreach_mul(x, 0.3),
    "divide": lambda x: torch._foreach_div(x, [2.0, 3.0, 4.0]),
    "addcdiv": lambda x: torch._foreach_addcdiv(x, x, torch._foreach_exp(x), [0.1, 0.2, 0.3]),
    "addcmul": lambda x: torch._foreach_addcmul(x, x, x, value=0.2),
    "lerp": lambda x: torch._foreach_lerp(x, torch._foreach_neg(x), 0.3),
    "pow": lambda x: torch._foreach_pow(torch._foreach_abs(x), 1.5),
    "bounds": lambda x: torch._foreach_minimum(torch._foreach_maximum(x, -0.5), 0.5),
    "norms": lambda x: torch._foreach_norm(x),
    "greatest": lambda x: torch._foreach_norm(x, float("inf")),
    "square root": lambda x: torch._foreach_sqrt(torch._foreach_abs(x)),
    "clipped": lambda x: torch.nn.utils.clip_grad_norm_(x, 0.1, foreach=True),
}


@pytest.mark.parametrize("name", LISTS)
def test_operators_of_lists(name: str) -> None:
    function = LISTS[name]
    x = [torch.randn(shape) for shape in ((4, 33), (7,), ())]
    _same(compiled(function)(x), function(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8, torch.bool])
def test_diagonals_and_triangles(dtype: torch.dtype) -> None:
    def all_of(x: Tensor, y: Tensor) -> list[Tensor]:
        rows = [part for d in (0, 1, -2, 7, -9, 2**40) for part in (x.tril(d), x.triu(d), y.mT.triu(d))]
        eyes = [torch.eye(n, dtype=dtype) for n in (0, 1, 4)]
        return [*rows, *eyes, torch.eye(3, 5, dtype=dtype), torch.eye(5, 2, dtype=dtype)]

    for x, y in ((4, 4), (2, 3, 7)), ((1, 6), (2, 5, 1)), ((0, 3), (3, 2, 0)):
        given = [torch.randint(-3, 3, shape).to(dtype) for shape in (x, y)]
        torch.compiler.reset()
        for ours, eager in zip(compiled(all_of)(*given), all_of(*given), strict=True):
            _same(ours, eager, rtol=0, atol=0)
    assert not _whole()


def test_triangles_of_special_values_and_their_gradients() -> None:
    x = torch.tensor(SPECIAL[:25]).view(5, 5).requires_grad_()
    weights = torch.randn(5, 5)

    def loss(x: Tensor) -> Tensor:
        return (x.tril(1) * weights).triu(-1)

    ours, eager = compiled(loss)(x), loss(x)
    _same(ours, eager)
    seed = torch.randn(5, 5)
    _same(*(torch.autograd.grad(value, x, seed)[0] for value in (ours, eager)))
    complex_numbers = torch.randn(2, 4, 3, dtype=torch.complex64)
    _same(compiled(lambda z: z.triu(1))(complex_numbers), complex_numbers.triu(1))
