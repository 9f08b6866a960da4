"""How gradients of losses and layers lie in memory, over layouts of inputs and of what comes back. PyTorch eager is the
oracle: each operator of its backward passes, and then what a compiled function returns."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses import FakeTensorMode
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from flagos_backend.frontends.torch.compile.corrections import corrected
from flagos_backend.frontends.torch.compile.decompositions import decompositions_for

Function = Callable[[Tensor, Tensor], Tensor]

_LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "row-major": lambda x: x,
    "transposed": lambda x: x.transpose(0, -1).contiguous().transpose(0, -1),
    "swapped": lambda x: x.transpose(-1, -2).contiguous().transpose(-1, -2),
    "channels_last": lambda x: x.contiguous(memory_format=torch.channels_last) if x.dim() == 4 else x,
    "sliced": lambda x: torch.stack([x, x], -1)[..., 0],
    "expanded": lambda x: x[:1].expand(x.shape),
}


def _loss(function: Callable[..., Tensor], **options: Any) -> dict[str, Function]:
    def reduced(reduction: str) -> Function:
        return lambda x, y: function(x, y, reduction=reduction, **options)

    return {f"{function.__name__} {reduction}": reduced(reduction) for reduction in ("none", "mean")}


def _binary_cross_entropy(x: Tensor, y: Tensor, reduction: str) -> Tensor:
    return functional.binary_cross_entropy(x.sigmoid(), y.sigmoid(), reduction=reduction)


def _gaussian_nll_loss(x: Tensor, y: Tensor, reduction: str) -> Tensor:
    return functional.gaussian_nll_loss(x, y, y.exp(), reduction=reduction)


def _classes(x: Tensor) -> Tensor:
    return torch.zeros([x.shape[0], *x.shape[2:]], dtype=torch.long)


_LOSSES: dict[str, Function] = {
    **_loss(functional.mse_loss),
    **_loss(functional.l1_loss),
    **_loss(functional.smooth_l1_loss),
    **_loss(functional.huber_loss),
    **_loss(functional.binary_cross_entropy_with_logits),
    **_loss(functional.poisson_nll_loss),
    **_loss(functional.kl_div),
    **_loss(_binary_cross_entropy),
    **_loss(_gaussian_nll_loss),
    "cross entropy of classes": lambda x, y: functional.cross_entropy(x, _classes(x)),
    "cross entropy of each": lambda x, y: functional.cross_entropy(x, _classes(x), reduction="none"),
    "cross entropy of weights": lambda x, y: functional.cross_entropy(x, y.softmax(1)),
    "nll": lambda x, y: functional.nll_loss(x, _classes(x)),
}
_LAYERS: dict[str, Function] = {
    **{
        function.__name__: lambda x, y, function=function: function(x)  # type: ignore[misc]
        for function in (
            functional.celu,
            functional.elu,
            functional.gelu,
            functional.hardshrink,
            functional.hardsigmoid,
            functional.hardswish,
            functional.hardtanh,
            functional.leaky_relu,
            functional.mish,
            functional.relu,
            functional.selu,
            functional.silu,
            functional.softplus,
            functional.softshrink,
            functional.tanh,
        )
    },
    "logsigmoid": lambda x, y: functional.logsigmoid(x),
    "threshold": lambda x, y: functional.threshold(x, 0.1, 2.0),
    "logit": lambda x, y: x.logit(1e-3),
    "prelu": lambda x, y: functional.prelu(x, torch.full([x.shape[1]], 0.25, requires_grad=True)),
    "glu": lambda x, y: functional.glu(x, -1),
    "softmax": lambda x, y: functional.softmax(x, 1),
    "log_softmax": lambda x, y: functional.log_softmax(x, -1),
    "layer norm": lambda x, y: functional.layer_norm(x, x.shape[-1:]),
    "group norm": lambda x, y: functional.group_norm(x, 2),
    "batch norm": lambda x, y: functional.batch_norm(x, None, None, training=True),
    "roll": lambda x, y: x.roll(1, 1),
    "xlogy": lambda x, y: torch.xlogy(x, y.exp()),
    "logaddexp": torch.logaddexp,
    "arctangent": torch.atan2,
    "greater": torch.maximum,
}
_CASES = {**_LOSSES, **_LAYERS}


def _strides(value: Any) -> list[tuple[int, ...] | None]:
    """Those that say where elements are."""
    tensors = [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
    return [
        tuple(stride for size, stride in zip(x.shape, x.stride(), strict=True) if size != 1) if x.numel() else None
        for x in tensors
    ]


class _Compared(TorchDispatchMode):
    """Compares how each operator's results lie with how a compiled graph takes them to lie."""

    def __init__(self) -> None:
        super().__init__()
        self.different: list[str] = []
        self._fake = FakeTensorMode()
        self._seen: set[tuple[Any, str]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        given = [(tuple(x.shape), x.stride()) if isinstance(x, Tensor) else x for x in tree_leaves((args, kwargs))]
        is_seen = (func, str(given)) in self._seen or not any(isinstance(x, Tensor) for x in tree_leaves(result))
        if is_seen or func._schema.is_mutable:
            return result
        self._seen.add((func, str(given)))
        with _disable_current_modes():
            taken = self._taken(func, args, kwargs)
        if _strides(taken) != _strides(result):
            self.different.append(f"{func} of {given}: {_strides(taken)} for {_strides(result)}")
        return result

    def _taken(self, func: Any, args: Any, kwargs: Any) -> Any:
        fake_args, fake_kwargs = tree_map_only(Tensor, self._fake.from_tensor, (args, kwargs))
        rule = decompositions_for([torch.empty(0)]).get(func)
        with self._fake, enable_python_dispatcher():
            taken = NotImplemented if rule is None else rule(*fake_args, **fake_kwargs)
            if taken is NotImplemented:
                taken = func(*fake_args, **fake_kwargs)
            return corrected(func, fake_args, taken)


@pytest.mark.parametrize("shape", [(4, 6), (2, 4, 4, 6)], ids=str)
@pytest.mark.parametrize("name", _CASES)
def test_operators_of_backward_passes_lie_as_the_kernels_lay_them(
    name: str, shape: tuple[int, ...], rng: np.random.Generator
) -> None:
    compared = _Compared()
    pairs = list(itertools.product(_LAYOUTS.values(), repeat=2))
    for number in rng.choice(len(pairs), 9, replace=False):
        layouts = (*pairs[number], list(_LAYOUTS.values())[rng.integers(len(_LAYOUTS))])
        x, y = (lay(torch.randn(shape)).detach().requires_grad_() for lay in layouts[:2])
        with compared:
            output = _CASES[name](x, y)
            back = layouts[2](torch.randn(output.shape)) if output.dim() > 1 else torch.randn(output.shape)
            try:
                torch.autograd.grad(output, [x, y], back, allow_unused=True)
            except RuntimeError as error:  # so says eager mode of images whose channels lie otherwise
                assert "must be contiguous" in str(error)
    assert not compared.different, "\n".join(compared.different)


@pytest.mark.parametrize("layout", ["transposed", "channels_last"])
@pytest.mark.parametrize(
    "name", ["mse_loss mean", "cross entropy of weights", "glu", "hardswish", "elu", "softplus", "log_softmax"]
)
def test_gradients_of_compiled_functions_lie_as_in_eager_mode(name: str, layout: str) -> None:
    x, y = torch.randn(2, 4, 4, 6), torch.randn(2, 4, 4, 6)
    leaves = [_LAYOUTS[layout](x).detach().requires_grad_(), _LAYOUTS["row-major"](y).requires_grad_()]

    def gradients(function: Function) -> list[Tensor]:
        loss = function(*leaves).sin().sum()
        return [g for g in torch.autograd.grad(loss, leaves, allow_unused=True) if g is not None]

    expected = gradients(_CASES[name])
    actual = gradients(torch.compile(_CASES[name], backend="flagos", fullgraph=True))
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
    assert _strides(actual) == _strides(expected)
