"""Pipelines: channels, fusions, checkpoints, autocast, whole forwards; compiled as one graph with no recompiles."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from flagos_backend.frontends.torch import ops
from flagos_backend.frontends.torch.ops.operation import FusibleOperation


class Doubled(ops.BasicOperation):
    """A whole forward."""

    def op_forward(self, ctx: ops.OperationContext, input_: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        return input_ * 2

    def op_backward(self, ctx: ops.OperationContext, grad_output: torch.Tensor) -> Any:
        return grad_output * 2, ()


def _residual_mlp() -> ops.Sequential:
    make, add = ops.MakeExtraOutput(), ops.AddExtraInput()
    make.set_extra_output_channel(0, "residual", output_to_caller=False)
    add.set_extra_input_channel(0, "residual")
    return ops.Sequential(make, ops.RMSNorm(6), ops.Linear(6, 16), ops.SwiGLU(), ops.Linear(8, 6), add)


def _reference(module: ops.Sequential, x: torch.Tensor) -> torch.Tensor:
    w, w1, b1, w2, b2 = (p.double() for p in module.parameters())
    a, b = F.linear(F.rms_norm(x, (6,), w, 1e-5), w1, b1).chunk(2, -1)
    return x + F.linear(F.silu(a) * b, w2, b2)


@pytest.mark.parametrize("backend", [None, "eager", "aot_eager", "flagos"])
def test_residual_through_a_channel(backend: str | None) -> None:
    module = _residual_mlp()
    run: Any = module if backend is None else torch.compile(module, backend=backend, fullgraph=True)
    for _ in range(3):
        x = torch.randn(5, 6, requires_grad=True)
        y = run(x)
        y.square().sum().backward()
        a = x.detach().double().requires_grad_()
        expected = _reference(module, a)
        expected.square().sum().backward()
        torch.testing.assert_close(y.double(), expected, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(x.grad.double(), a.grad, rtol=1e-4, atol=1e-4)
    if backend is not None:
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_on_the_device() -> None:
    module = _residual_mlp()
    there = copy.deepcopy(module).to("flagos")
    x = torch.randn(5, 6)
    a, b, c = (x.clone().to(d).requires_grad_() for d in ("cpu", "flagos", "flagos"))
    compiled = torch.compile(there, backend="flagos", fullgraph=True)
    for run, t in ((module, a), (there, b), (compiled, c)):
        run(t).square().sum().backward()
    for t in (b, c):
        torch.testing.assert_close(t.grad.cpu(), a.grad, rtol=1e-4, atol=1e-4)


def test_extra_inputs_and_outputs_of_the_caller() -> None:
    module = ops.Sequential(ops.MakeExtraOutput(), ops.ConstantScale(3.0), ops.AddExtraInput())
    run = torch.compile(module, backend="flagos", fullgraph=True)
    x, e = torch.randn(4, 3, requires_grad=True), torch.randn(4, 3, requires_grad=True)
    y, extra = run(x, e)
    (y.sum() + 5 * extra.sum()).backward()
    torch.testing.assert_close(y, x * 3 + e)
    torch.testing.assert_close(extra, x)
    assert torch.equal(x.grad, torch.full((4, 3), 8.0)) and torch.equal(e.grad, torch.ones(4, 3))
    with pytest.raises(ValueError, match="1 extra inputs, got 0"):
        module(x)


def test_channels_refuse() -> None:
    make, add = ops.MakeExtraOutput(), ops.AddExtraInput()
    with pytest.raises(IndexError):
        make.set_extra_output_channel(1, "a")
    with pytest.raises(ValueError, match="non-empty"):
        add.set_extra_input_channel(0, "")
    with pytest.raises(TypeError, match="output_to_caller"):
        make.set_extra_output_channel(0, "a", output_to_caller=1)  # type: ignore[arg-type]
    add.set_extra_input_channel(0, "a")
    with pytest.raises(ValueError, match="no producer"):
        ops.OperationFuser([add])
    make.set_extra_output_channel(0, "a")
    with pytest.raises(ValueError, match="no earlier producer"):
        ops.OperationFuser([add, make])
    ops.OperationFuser([make, add])
    with pytest.raises(RuntimeError, match="captured"):
        make.set_extra_output_channel(0, "b")


def test_whole_forward_breaks_the_graph_around_itself() -> None:
    module = ops.Sequential(ops.Linear(4, 4), Doubled(), ops.GELU())
    x = torch.randn(3, 4, requires_grad=True)
    expected = module(x)
    (gradient,) = torch.autograd.grad(expected.sum(), x)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="Doubled"):
        torch.compile(module, backend="flagos", fullgraph=True)(x)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    y = torch.compile(module, backend="flagos")(x)
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(torch.autograd.grad(y.sum(), x)[0], gradient)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2


def test_checkpoint_and_frozen_parameters() -> None:
    one, other = _residual_mlp(), _residual_mlp()
    other.load_state_dict(one.state_dict())
    x = torch.randn(2, 6)
    assert torch.equal(one(x), other(x))
    for parameter in one.parameters():
        parameter.requires_grad_(False)
    assert not one(x).requires_grad
    x.requires_grad_()
    one(x).sum().backward()
    assert x.grad is not None


@pytest.mark.parametrize("compiled", [False, True])
def test_autocast(compiled: bool) -> None:
    module = ops.Sequential(ops.Linear(6, 4))
    run = torch.compile(module, backend="flagos", fullgraph=True) if compiled else module
    x = torch.randn(3, 6, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = run(x)
    y.float().sum().backward()
    assert y.dtype == torch.bfloat16
    assert {p.grad.dtype for p in (x, *module.parameters())} == {torch.float32}
    torch.testing.assert_close(y.float(), F.linear(x, *module.parameters()), rtol=3e-2, atol=3e-2)


class Twice(ops.FusedOperation):
    """Two scales as one product, forward."""

    def fuser_forward_compute(self, input_: torch.Tensor, **kwargs: Any) -> Any:
        return input_ * (self.basic_ops[0].scale * self.basic_ops[1].scale), [(), ()], [(), ()]

    def fuser_forward_save_ctx(self, *args: Any, **kwargs: Any) -> None:
        return None


@pytest.fixture
def registered() -> Iterator[None]:
    def fuse(found: list[FusibleOperation], *, recipe: Any) -> list[FusibleOperation]:
        if len(found) == 2 and all(isinstance(op, ops.ConstantScale) for op in found):
            return [Twice(found)]
        return found

    ops.register_forward_fusion(fuse, prepend=True)
    yield
    ops.OperationFuser.forward_fusion_functions.remove(fuse)
    ops.OperationFuser.registrations += 1


def test_registered_fusion(registered: None) -> None:
    module = ops.Sequential(ops.ConstantScale(2.0), ops.ConstantScale(4.0))
    x = torch.randn(3, requires_grad=True)
    torch.compile(module, backend="flagos", fullgraph=True)(x).sum().backward()
    assert torch.equal(x.grad, torch.full((3,), 8.0))
    assert [type(op) for op, _ in module._module_groups[0]._forward_ops] == [Twice]
    assert len(module._module_groups[0]._backward_ops) == 2


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("middle", ["bias", "scale", None])
def test_linear_with_what_follows(middle: str | None, compiled: bool) -> None:
    between = {"bias": [ops.Bias(5)], "scale": [ops.ConstantScale(0.5)], None: []}[middle]
    module = ops.Sequential(ops.BasicLinear(4, 5), *between, ops.AddExtraInput())
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter)
    run = torch.compile(module, backend="flagos", fullgraph=True) if compiled else module
    tensors = [torch.randn(3, 2, 4, requires_grad=True), torch.randn(3, 2, 5, requires_grad=True)]
    y = run(*tensors)
    y.square().sum().backward()
    wide = [t.detach().double().requires_grad_() for t in (*tensors, *module.parameters())]
    expected = wide[0] @ wide[2].T * (0.5 if middle == "scale" else 1) + (wide[3] if middle == "bias" else 0) + wide[1]
    expected.square().sum().backward()
    torch.testing.assert_close(y.double(), expected, rtol=1e-4, atol=1e-4)
    for ours, theirs in zip((*tensors, *module.parameters()), wide, strict=True):
        torch.testing.assert_close(ours.grad.double(), theirs.grad, rtol=1e-4, atol=1e-4)
    kind = ops.ForwardLinearScaleAdd if middle == "scale" else ops.ForwardLinearBiasAdd
    assert [type(op) for op, _ in module._module_groups[0]._forward_ops] == [kind]
