"""Each operator, on fresh inputs: FlagGems computed it, and it is what float64 PyTorch on the host gives."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from flagos_backend.torch.gems import gems

aten = torch.ops.aten
F32, F16, I64 = torch.float32, torch.float16, torch.int64


class Draw:
    """Tensors of the host."""

    def __init__(self, rng: np.random.Generator) -> None:
        self._rng = rng

    def __call__(self, *dims: int, dtype: torch.dtype = F32) -> torch.Tensor:
        return torch.from_numpy(self._rng.standard_normal(dims)).to(dtype)

    def positive(self, *dims: int) -> torch.Tensor:
        return torch.from_numpy(self._rng.uniform(0.1, 2.0, dims)).to(F32)

    def index(self, below: int, *dims: int) -> torch.Tensor:
        return torch.from_numpy(self._rng.integers(0, below, dims))

    def mask(self, *dims: int) -> torch.Tensor:
        return self.index(2, *dims).bool()


# FlagGems' names of operators, and a call of each: (operator, arguments).
Call = tuple[Callable[..., Any], tuple[Any, ...]]


def of(name: str, overload: str, *operands: Callable[[Draw], Any]) -> Callable[[Draw], Call]:
    """A call of an operator on operands that are drawn."""
    operator = getattr(getattr(aten, name), overload)
    return lambda d: (operator, tuple(operand(d) for operand in operands))


def normal(d: Draw) -> torch.Tensor:
    return d(4, 6)


def positive(d: Draw) -> torch.Tensor:
    return d.positive(4, 6)


CASES: dict[str, Callable[[Draw], Call]] = {
    **{
        name: of(name, "default", normal)
        for name in (
            *("abs", "acos", "atan", "ceil", "celu", "cos", "cosh", "elu", "erf", "exp", "exp2", "expm1", "isinf"),
            *("isnan", "logical_not", "logit", "neg", "reciprocal", "relu", "sigmoid", "silu", "sin", "softplus"),
            *("tan", "tanh"),
        )
    },
    **{name: of(name, "default", positive) for name in ("log", "log10", "rsqrt", "sqrt")},
    "bitwise_not": lambda d: (aten.bitwise_not.default, (d.index(99, 4, 6),)),
    "gelu": lambda d: (aten.gelu.default, (d(4, 6),)),
    "gelu, by tanh": lambda d: (lambda x: aten.gelu.default(x, approximate="tanh"), (d(4, 6),)),
    # ---- of two ----
    **{
        f"{name}.Tensor": of(name, "Tensor", normal, normal)
        for name in ("add", "sub", "mul", "div", "eq", "ne", "lt", "le", "gt", "ge")
    },
    **{f"{name}.Scalar": of(name, "Scalar", normal, lambda d: 0.5) for name in ("eq", "lt", "gt", "ne", "le", "ge")},
    "add.Tensor, broadcast": lambda d: (aten.add.Tensor, (d(4, 6), d(1, 6))),
    "sub.Tensor, strided": lambda d: (aten.sub.Tensor, (d(6, 4).t(), d(4, 12)[:, ::2])),
    "maximum": lambda d: (aten.maximum.default, (d(4, 6), d(4, 6))),
    "minimum": lambda d: (aten.minimum.default, (d(4, 6), d(4, 6))),
    "pow.Tensor_Scalar": lambda d: (aten.pow.Tensor_Scalar, (d.positive(4, 6), 1.5)),
    "pow.Tensor_Tensor": lambda d: (aten.pow.Tensor_Tensor, (d.positive(4, 6), d(4, 6))),
    "bitwise_and.Tensor": lambda d: (aten.bitwise_and.Tensor, (d.index(99, 4, 6), d.index(99, 4, 6))),
    "bitwise_or.Tensor": lambda d: (aten.bitwise_or.Tensor, (d.index(99, 4, 6), d.index(99, 4, 6))),
    "logical_and": lambda d: (aten.logical_and.default, (d.mask(4, 6), d.mask(4, 6))),
    "logical_or": lambda d: (aten.logical_or.default, (d.mask(4, 6), d.mask(4, 6))),
    "logical_xor": lambda d: (aten.logical_xor.default, (d.mask(4, 6), d.mask(4, 6))),
    "lerp.Scalar": lambda d: (aten.lerp.Scalar, (d(4, 6), d(4, 6), 0.3)),
    "addcmul": lambda d: (aten.addcmul.default, (d(4, 6), d(4, 6), d(4, 6))),
    "addcdiv": lambda d: (aten.addcdiv.default, (d(4, 6), d(4, 6), d.positive(4, 6))),
    "masked_fill.Scalar": lambda d: (aten.masked_fill.Scalar, (d(4, 6), d.mask(4, 6), 7.0)),
    "gelu_backward": lambda d: (aten.gelu_backward.default, (d(4, 6), d(4, 6))),
    "sigmoid_backward": lambda d: (aten.sigmoid_backward.default, (d(4, 6), d.positive(4, 6))),
    "tanh_backward": lambda d: (aten.tanh_backward.default, (d(4, 6), d(4, 6))),
    "threshold_backward": lambda d: (aten.threshold_backward.default, (d(4, 6), d(4, 6), 0.1)),
    # ---- reductions ----
    "sum": lambda d: (aten.sum.default, (d(4, 6),)),
    "sum.dim_IntList": lambda d: (aten.sum.dim_IntList, (d(4, 6), [1])),
    "mean": lambda d: (aten.mean.default, (d(4, 6),)),
    "mean.dim": lambda d: (aten.mean.dim, (d(4, 6), [0], True)),
    "prod": lambda d: (aten.prod.default, (d.positive(4, 6),)),
    "amax": lambda d: (aten.amax.default, (d(4, 6), [1])),
    "any": lambda d: (aten.any.default, (d.mask(4, 6),)),
    "all": lambda d: (aten.all.default, (d.mask(4, 6),)),
    "any.dim": lambda d: (aten.any.dim, (d.mask(4, 6), 1)),
    "all.dim": lambda d: (aten.all.dim, (d.mask(4, 6), 1)),
    "count_nonzero": lambda d: (aten.count_nonzero.default, (d.index(3, 4, 6),)),
    "cumsum": lambda d: (aten.cumsum.default, (d(4, 6), 1)),
    "linalg_vector_norm": lambda d: (aten.linalg_vector_norm.default, (d(4, 6), 2.0, [1])),
    "_softmax": lambda d: (aten._softmax.default, (d(4, 6), 1, False)),
    "_log_softmax": lambda d: (aten._log_softmax.default, (d(4, 6), 1, False)),
    "native_layer_norm": lambda d: (aten.native_layer_norm.default, (d(4, 16), [16], d(16), d(16), 1e-5)),
    "native_group_norm": lambda d: (aten.native_group_norm.default, (d(2, 4, 5), d(4), d(4), 2, 4, 5, 2, 1e-5)),
    # ---- products ----
    "mm": lambda d: (aten.mm.default, (d(8, 5), d(5, 7))),
    "mm, of float16": lambda d: (aten.mm.default, (d(8, 5, dtype=F16), d(5, 7, dtype=F16))),
    "addmm": lambda d: (aten.addmm.default, (d(7), d(8, 5), d(5, 7))),
    "bmm": lambda d: (aten.bmm.default, (d(2, 8, 5), d(2, 5, 7))),
    "mv": lambda d: (aten.mv.default, (d(8, 5), d(5))),
    "dot": lambda d: (aten.dot.default, (d(9), d(9))),
    # ---- movement ----
    "index_select": lambda d: (aten.index_select.default, (d(4, 6), 0, d.index(4, 3))),
    "index_select, strided": lambda d: (aten.index_select.default, (d(6, 4).t(), 0, d.index(4, 6)[::2])),
    "gather": lambda d: (aten.gather.default, (d(4, 6), 1, d.index(6, 4, 3))),
    "scatter.src": lambda d: (aten.scatter.src, (d(4, 6), 1, torch.tensor([[2, 5], [0, 1]]), d(2, 2))),
    "embedding": lambda d: (aten.embedding.default, (d(9, 8), d.index(9, 3))),
    "cat": lambda d: (aten.cat.default, ([d(4, 3), d(4, 5)], 1)),
    "stack": lambda d: (aten.stack.default, ([d(4, 3), d(4, 3)], 0)),
    "repeat": lambda d: (aten.repeat.default, (d(4, 6), [2, 1])),
    "triu": lambda d: (aten.triu.default, (d(4, 6), 1)),
    "tril": lambda d: (aten.tril.default, (d(4, 6), 0)),
    "constant_pad_nd": lambda d: (aten.constant_pad_nd.default, (d(4, 6), [1, 2], 0.5)),
    "_to_copy": lambda d: (lambda x: aten._to_copy.default(x, dtype=F16), (d(4, 6),)),
}
# What guards or the interpreter (flip and where: FlagGems asks for a chip) keep from FlagGems is no case.
_TOLERANCE = {F32: 2e-5, F16: 2e-2}


@pytest.fixture(scope="module")
def turned_on() -> Iterator[Any]:
    with gems() as active:
        yield active


@pytest.mark.parametrize("case", CASES)
def test_operator(case: str, turned_on: Any, rng: np.random.Generator, device: torch.device) -> None:
    function, arguments = CASES[case](Draw(rng))
    name = case.partition(",")[0]
    before = turned_on.reports()[name].flaggems
    found = function(*tree_map_only(torch.Tensor, lambda t: t.to(device), arguments))
    report = turned_on.reports()[name]
    assert report.flaggems == before + 1, report

    expected = function(*arguments)
    exact = function(*tree_map_only(torch.Tensor, lambda t: t.double() if t.is_floating_point() else t, arguments))
    for ours, theirs, truth in zip(*map(tree_leaves, (found, expected, exact)), strict=True):
        assert ours.device == device and ours.dtype == theirs.dtype and ours.shape == theirs.shape
        assert ours.stride() == theirs.stride()
        if ours.is_floating_point():
            tolerance = _TOLERANCE[ours.dtype]
            torch.testing.assert_close(
                ours.cpu().double(), truth.double(), rtol=tolerance, atol=tolerance, equal_nan=True
            )
        else:
            assert torch.equal(ours.cpu(), theirs)


def test_there_are_sixty() -> None:
    assert len({case.partition(",")[0] for case in CASES}) >= 60
