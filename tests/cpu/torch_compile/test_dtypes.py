"""Dtypes that need care on the way into a program and out of it."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from support.torch_compile import assert_same, check_function, compiled


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_complex32_is_computed_by_aten_and_carried_as_bits() -> None:
    x = torch.randn(3, 4, dtype=torch.complex64).to(torch.complex32)
    y = torch.randn(3, 4, dtype=torch.complex64).to(torch.complex32)
    wide = compiled(lambda x, y: ((x * y).t() + 2, torch.stack([x, y]), x.to(torch.complex64) - 1, y == x))(x, y)
    expected = (x * y).t() + 2, torch.stack([x, y]), x.to(torch.complex64) - 1, y == x
    for ours, theirs in zip(wide, expected, strict=True):
        assert ours.dtype == theirs.dtype
        assert_same(*(t.to(torch.complex64) if t.dtype is torch.complex32 else t for t in (ours, theirs)))


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_a_constant_and_a_zero_of_complex32() -> None:
    constant = torch.tensor([1 + 2j, -0.0], dtype=torch.complex32)
    ours = compiled(lambda x: (x * constant, constant.real, constant == 0))(constant)
    for mine, theirs in zip(ours, (constant * constant, constant.real, constant == 0), strict=True):
        assert mine.dtype == theirs.dtype
        assert_same(mine.to(torch.complex64), theirs.to(torch.complex64))


def test_zeros_without_memory() -> None:
    """The derivative of sgn of real numbers is a zero tensor that has no memory of its own."""
    x = torch.randn(5, requires_grad=True)
    (gradient,) = torch.autograd.grad(compiled(torch.sgn)(x).sum(), x)
    assert_same(gradient, torch.zeros(5))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_embedding_bags(dtype: torch.dtype, mode: str) -> None:
    """What PyTorch keeps for the derivative has another size in bfloat16 than it traces."""
    table = torch.randn(7, 4).to(dtype).requires_grad_()
    rows, offsets = torch.randint(7, (5,)), torch.tensor([0, 2])
    ours, theirs = (
        call(rows, table, offsets, mode=mode) for call in (compiled(functional.embedding_bag), functional.embedding_bag)
    )
    assert_same(ours.detach(), theirs.detach())
    gradients = [torch.autograd.grad(y.sum(), table)[0] for y in (ours, theirs)]
    assert_same(*gradients)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_floats_are_rounded_after_each_operator(dtype: torch.dtype) -> None:
    x, y = torch.randn(2, 64, 257).to(dtype)
    check_function(lambda x, y: ((x * y + x) * y - x * 0.3 + y) / y, x, y, rtol=0, atol=0)


_KINDS = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int8, torch.int32, torch.int64, torch.bool]


@pytest.mark.parametrize("kind", [k for k in _KINDS if k is not torch.bool], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("dims", [(), (1,), (257,), (8, 33)], ids=str)
def test_half_floats_by_tensors_without_dimensions(
    dims: tuple[int, ...], dtype: torch.dtype, kind: torch.dtype
) -> None:
    """ATen multiplies and divides by them as by numbers, unrounded, and rounds them everywhere else."""
    x, y = torch.randn(dims).to(dtype), (torch.rand(()) * 99 + 1).to(kind)
    check_function(lambda x, y: (x * y, x / y, y * x, y / x, x + y, y - x), x, y, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", _KINDS, ids=str)
@pytest.mark.parametrize("other", [0.1, 2.328622817993164, 100, -7, 7e4, float("nan"), *_KINDS], ids=str)
def test_what_is_compared_is_rounded_first(other: float | torch.dtype, dtype: torch.dtype) -> None:
    """To the type that both are promoted to, in which a number or a tensor without dimensions may be as another."""
    x = torch.randn(64).mul(20).to(dtype)
    if isinstance(other, torch.dtype):
        few, many = torch.tensor(2.328622817993164).to(other), torch.randn(64).mul(20).to(other)
        values = (few, many)
        x[::3] = few.to(dtype)
    else:
        values = (other,)
        if dtype.is_floating_point or isinstance(other, int):
            x[::3] = other
    for y in values:
        check_function(lambda x, y: (x < y, x == y, x >= y, x != y), x, y, rtol=0, atol=0)


@pytest.mark.parametrize("operand", [torch.tensor([100001]), torch.tensor(100001), torch.tensor([[0.7]])], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("dims", [(), (1,), (2, 3)], ids=str)
def test_half_floats_by_tensors_of_one_element(
    dims: tuple[int, ...], dtype: torch.dtype, operand: torch.Tensor
) -> None:
    check_function(lambda x, y: (x * y, x / y), torch.randn(dims).to(dtype), operand, rtol=0, atol=0)


@pytest.mark.parametrize("source", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("kind", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool], ids=str)
def test_floats_that_are_copied_to_integers(kind: torch.dtype, source: torch.dtype) -> None:
    """What is out of range becomes what eager mode makes of it."""
    values = torch.tensor(
        [-1.0, -1.5, 300.0, 3e4, 7e4, 3e10, torch.inf, -torch.inf, torch.nan, 2.5, -0.0], dtype=source
    )

    def copied(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        z = x.clone()
        z[:] = y
        return x.clone().copy_(y), z

    check_function(copied, torch.zeros(values.shape, dtype=kind), values, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("threshold", [0.1, 0.3, 0.7])
def test_gradients_of_thresholds(threshold: float, dtype: torch.dtype) -> None:
    x = torch.full((3,), threshold, dtype=dtype, requires_grad=True)
    ours, theirs = (f(x, threshold, 0.0).sum() for f in (compiled(functional.threshold), functional.threshold))
    assert_same(*(torch.autograd.grad(y, x)[0] for y in (ours, theirs)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("source", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_sums_in_half_floats_are_of_what_is_rounded(source: torch.dtype, dtype: torch.dtype) -> None:
    x = torch.tensor([[1e5], [-1e5]]).to(source)
    check_function(lambda x: x.sum(0, dtype=dtype), x, rtol=0, atol=0)
    # Few enough for each to be told apart from its neighbour.
    check_function(lambda x: x.sum(1, dtype=dtype), torch.randn(300, 2).to(source), rtol=0, atol=0)


def test_doubles_become_half_floats_by_way_of_float32() -> None:
    steps = 2.0 ** -torch.arange(8, 40, dtype=torch.float64)
    x = torch.cat([torch.randn(5000, dtype=torch.float64), 1 + 2**-11 + steps, 1 + 2**-9 + steps, 65519.999999 - steps])
    check_function(lambda x: (x.to(torch.float16), x.to(torch.bfloat16), x.half() + 1), x, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_square_roots_of_all_half_floats(dtype: torch.dtype) -> None:
    """Alone, and beside an operator that makes a plan of the program."""
    x = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(dtype)
    check_function(lambda x: x.sqrt(), x, rtol=0, atol=0)
    check_function(lambda x: (x.sqrt(), x**0.5, x.sort().values), x, rtol=0, atol=0)


_REFUSED = {
    "gelu of integers": lambda x: functional.gelu(x.int()),
    "softmax of integers": lambda x: functional.softmax(x.int(), 0),
    "log-softmax of integers": lambda x: functional.log_softmax(x.int(), 0),
    "a difference of booleans": lambda x: (x > 0) - x,
    "a number less booleans": lambda x: 1 - (x > 0),
    "relu of booleans": lambda x: torch.relu(x > 0),
    "filled": lambda x: torch.full_like(x.half(), 70000.0),
    "filled in place": lambda x: x.half().fill_(70000.0),
    "padded": lambda x: functional.pad(x.half(), (1, 1), value=70000.0),
    "filled by a mask": lambda x: x.half().masked_fill(x > 0, 1 << 20),
    "filled with a tensor": lambda x: x.half().masked_fill(x > 0, torch.tensor(70000.0)),
    "bytes filled": lambda x: x.to(torch.int8).masked_fill(x > 0, torch.tensor(100001)),
}


@pytest.mark.parametrize("name", _REFUSED)
def test_what_eager_mode_refuses_is_refused(name: str) -> None:
    x = torch.tensor([-1.0, 2.0, 3.0])
    with pytest.raises(RuntimeError):
        _REFUSED[name](x)
    with pytest.raises(RuntimeError):
        compiled(_REFUSED[name])(x)


def test_sums_without_nan_of_no_dimensions_are_of_all() -> None:
    x = torch.randn(2, 3)
    x[0, 1] = torch.nan
    check_function(lambda x: (torch.nansum(x, dim=()), torch.nansum(x, dim=(), keepdim=True), torch.nansum(x)), x)


@pytest.mark.parametrize("sizes", [(17, 8, 8), (32, 64, 48), (5, 300, 3), (40, 0, 8)], ids=str)
@pytest.mark.parametrize("transposed", [False, True])
def test_products_of_bytes(sizes: tuple[int, int, int], transposed: bool) -> None:
    rows, contracted, columns = sizes
    x = torch.randint(-128, 128, (rows, contracted), dtype=torch.int8)
    y = torch.randint(-128, 128, (columns, contracted) if transposed else (contracted, columns), dtype=torch.int8)
    x[:1], y[:1] = -128, -128
    check_function(lambda x, y: torch._int_mm(x, y.t() if transposed else y) * 2, x, y, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_16_bits_are_rounded_one_by_one_unless_they_may_keep_digits(dtype: torch.dtype) -> None:
    x, y, z = (torch.randn(1000).to(dtype) for _ in range(3))
    options = {"excess_precision": True}
    rounded, wide = (compiled(lambda x, y, z: x * y + z, options=o)(x, y, z) for o in (None, options))
    assert_same(rounded, x * y + z, rtol=0, atol=0)
    assert_same(wide, (x.float() * y.float() + z.float()).to(dtype), rtol=0, atol=0)
    assert not torch.equal(rounded, wide)
