"""Every operation and every fusion as one graph, forward and backward, by every backend; eager code is the oracle.

All pipelines are one graph of one module, so that a backend is asked once.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from flagos_backend.frontends.torch import ops

Tensors = list[torch.Tensor]


def _x(*shape: int) -> Callable[[], torch.Tensor]:
    return lambda: torch.randn(*shape)


def _residual(*between: torch.nn.Module) -> ops.Sequential:
    make, add = ops.MakeExtraOutput(), ops.AddExtraInput()
    make.set_extra_output_channel(0, "residual", output_to_caller=False)
    add.set_extra_input_channel(0, "residual")
    return ops.Sequential(make, *between, add)


_ACTIVATIONS = (ops.GELU, ops.QGELU, ops.ReLU, ops.SReLU, ops.SiLU)
_GATED = (ops.GLU, ops.GEGLU, ops.QGEGLU, ops.ReGLU, ops.SReGLU, ops.SwiGLU, ops.SiTUGLU, ops.ClampedSwiGLU)
_SCALED = (ops.ScaledSReLU, ops.ScaledSwiGLU, ops.ScaledSiTUGLU, ops.ScaledClampedQGeGLU)
Case = tuple[Callable[[], torch.nn.Module], tuple[Callable[[], torch.Tensor], ...]]


def _splits() -> torch.Tensor:
    cuts = torch.randint(0, 7, (2,)).sort().values.tolist()
    return torch.tensor([cuts[0], cuts[1] - cuts[0], 6 - cuts[1]])


CASES: dict[str, Case] = {
    "identity": (ops.Identity, (_x(6, 8),)),
    "reshape": (lambda: ops.Reshape((3, -1)), (_x(6, 8),)),
    "scale": (lambda: ops.ConstantScale(-0.3), (_x(6, 8),)),
    "bias": (lambda: ops.Bias(8), (_x(6, 8),)),
    "dropout of nothing": (lambda: ops.Dropout(0.0), (_x(6, 8),)),
    "quantize": (ops.Quantize, (_x(6, 8),)),
    "layer norm": (lambda: ops.LayerNorm(8), (_x(6, 8),)),
    "rms norm": (lambda: ops.RMSNorm((8,), zero_centered_gamma=True), (_x(6, 8),)),
    "l2": (ops.L2Normalization, (_x(6, 8),)),
    "basic linear": (lambda: ops.BasicLinear(8, 4), (_x(6, 8),)),
    "linear": (lambda: ops.Linear(8, 4), (_x(2, 3, 8),)),
    "grouped linear": (lambda: ops.GroupedLinear(3, 8, 4), (_x(6, 8), _splits)),
    "grouped linear, scaled bias": (lambda: ops.GroupedLinear(3, 8, 4, scale_bias=True), (_x(6, 8), _splits, _x(6))),
    "add": (ops.AddExtraInput, (_x(6, 8), _x(6, 8))),
    "add in place": (lambda: ops.AddExtraInput(in_place=True), (_x(6, 8), _x(6, 8))),
    "split": (ops.MakeExtraOutput, (_x(6, 8),)),
    "split in place": (lambda: ops.MakeExtraOutput(in_place=True), (_x(6, 8),)),
    "float8 cache": (lambda: ops.SiLU(cache_quantized_input=True), (_x(6, 8),)),
    "linear, add": (lambda: ops.Sequential(ops.Linear(8, 4), ops.AddExtraInput()), (_x(6, 8), _x(6, 4))),
    "linear, scale, add": (
        lambda: ops.Sequential(ops.BasicLinear(8, 4), ops.ConstantScale(0.5), ops.AddExtraInput()),
        (_x(6, 8), _x(6, 4)),
    ),
    "linear, activation": (lambda: ops.Sequential(ops.Linear(8, 4), ops.GELU()), (_x(6, 8),)),
    "split, linear": (lambda: ops.Sequential(ops.MakeExtraOutput(), ops.BasicLinear(8, 4)), (_x(6, 8),)),
    "linear, scale": (lambda: ops.Sequential(ops.BasicLinear(8, 4), ops.ConstantScale(-2.5)), (_x(6, 8),)),
    "split, norm": (lambda: ops.Sequential(ops.MakeExtraOutput(), ops.RMSNorm(8)), (_x(6, 8),)),
    "layer norm MLP": (
        lambda: ops.Sequential(ops.LayerNorm(8), ops.Linear(8, 16), ops.GELU(), ops.Linear(16, 8)),
        (_x(6, 8),),
    ),
    "residual MLP": (
        lambda: _residual(ops.RMSNorm(8), ops.Linear(8, 16), ops.SwiGLU(), ops.Linear(8, 8)),
        (_x(6, 8),),
    ),
    "grouped MLP": (
        lambda: ops.Sequential(ops.GroupedLinear(3, 8, 16), ops.ScaledSwiGLU(), ops.GroupedLinear(3, 8, 8)),
        (_x(6, 8), _splits, _x(6), _splits),
    ),
    **{kind.__name__: (kind, (_x(6, 8),)) for kind in (*_ACTIVATIONS, *_GATED)},
    **{kind.__name__: (kind, (_x(6, 8), _x(6))) for kind in _SCALED},
}


#: Inductor compiles C++ for each kernel: it gets pipelines that hold the rest.
_FEW = (
    "linear, scale, add",
    "split, norm",
    "layer norm MLP",
    "residual MLP",
    "grouped MLP",
    "float8 cache",
    "split in place",
)


class _All(torch.nn.Module):
    """Every pipeline on its own inputs, and all their outputs."""

    def __init__(self, cases: dict[str, Case]) -> None:
        super().__init__()
        self.made = [(make(), len(inputs)) for make, inputs in cases.values()]
        self.pipelines = torch.nn.ModuleList(
            module if isinstance(module, ops.Sequential) else ops.Sequential(module) for module, _ in self.made
        )

    def forward(self, inputs: list[Tensors]) -> list[Tensors]:
        results: list[Tensors] = []
        for pipeline, given in zip(self.pipelines, inputs, strict=True):
            result = pipeline(*given)
            results.append(list(result) if isinstance(result, tuple) else [result])
        return results


def _inputs(cases: dict[str, Case]) -> list[Tensors]:
    made = [[make() for make in inputs] for _, inputs in cases.values()]
    return [[t.requires_grad_() if t.is_floating_point() else t for t in row] for row in made]


def _copies(inputs: list[Tensors]) -> list[Tensors]:
    return [[t.detach().clone().requires_grad_(t.requires_grad) for t in row] for row in inputs]


def _backward(outputs: list[Tensors], grads: list[Tensors]) -> None:
    flat = [t for row in outputs for t in row]
    torch.autograd.backward(flat, [t for row in grads for t in row])


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor", "flagos"])
def test_one_graph(backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    cases = {name: CASES[name] for name in _FEW} if backend == "inductor" else CASES
    module = _All(cases)
    compiled = torch.compile(module, backend=backend, fullgraph=True)
    for _ in range(2):
        inputs = _inputs(cases)
        ours, theirs = _copies(inputs), _copies(inputs)
        expected = module(theirs)
        grads = [[torch.randn_like(t) for t in row] for row in expected]
        _backward(expected, grads)
        references = [p.grad for p in module.parameters()]
        module.zero_grad()
        found = compiled(ours)
        _backward(found, grads)
        parameters = [p.grad for p in module.parameters()]
        module.zero_grad()
        for name, row, other in zip(cases, found, expected, strict=True):
            torch.testing.assert_close(row, other, rtol=1e-4, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}")
        # In place, eager code changed its own copy of the extra input and of nothing else.
        for name, row, other in zip(cases, ours, theirs, strict=True):
            for a, b in zip(row, other, strict=True):
                assert (a.grad is None) == (b.grad is None), name
                if a.grad is not None:
                    torch.testing.assert_close(
                        a.grad, b.grad, rtol=1e-4, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}"
                    )
        for (name, _), a, b in zip(module.named_parameters(), parameters, references, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4, msg=lambda text, name=name: f"{name}: {text}")
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert not torch._dynamo.utils.counters["recompiles"]


def test_sizes_that_change() -> None:
    module = ops.Sequential(ops.LayerNorm(8), ops.Linear(8, 16), ops.SwiGLU(), ops.Linear(8, 8))
    compiled = torch.compile(module, backend="flagos", fullgraph=True, dynamic=True)
    for rows in (6, 3, 11):
        a = torch.randn(rows, 8, requires_grad=True)
        b = a.detach().clone().requires_grad_()
        compiled(a).square().sum().backward()
        module(b).square().sum().backward()
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-5)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
