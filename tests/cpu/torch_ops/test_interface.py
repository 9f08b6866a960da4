"""What the interface promises beside values: memory, main_grad, buffers, replaced members, collectives, refusals."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from flagos_backend.frontends.torch import ops


class Doubled(ops.BasicOperation):
    """A whole forward."""

    def op_forward(self, ctx: ops.OperationContext, input_: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        return input_ * 2

    def op_backward(self, ctx: ops.OperationContext, grad_output: torch.Tensor) -> Any:
        return grad_output * 2, ()


def _channel(name: str = "kept", *, to_caller: bool = False) -> tuple[ops.MakeExtraOutput, ops.AddExtraInput]:
    make, add = ops.MakeExtraOutput(), ops.AddExtraInput()
    make.set_extra_output_channel(0, name, output_to_caller=to_caller)
    add.set_extra_input_channel(0, name)
    return make, add


@pytest.mark.parametrize("to_caller", [False, True])
def test_channels_around_a_whole_forward(to_caller: bool) -> None:
    make, add = _channel(to_caller=to_caller)
    module = ops.Sequential(ops.GELU(), make, ops.Linear(4, 4), Doubled(), ops.AddExtraInput(), ops.SiLU(), add)
    inputs = [torch.randn(3, 4, requires_grad=True), torch.randn(3, 4, requires_grad=True)]
    w, b = (p.detach().double() for p in module.parameters())
    wide = [t.detach().double().requires_grad_() for t in inputs]
    kept = F.gelu(wide[0], approximate="tanh")
    expected = F.silu(F.linear(kept, w, b) * 2 + wide[1]) + kept
    (expected.sum() + (3 * kept.sum() if to_caller else 0)).backward()
    pipelines: list[int] = []

    def counted(graph: torch.fx.GraphModule, example: list[torch.Tensor]) -> Any:
        pipelines.append(sum("autograd_function_apply" in node.name for node in graph.graph.nodes))
        return graph.forward

    for run in (module, torch.compile(module, backend=counted)):
        for t in inputs:
            t.grad = None
        result = run(*inputs)
        y = result[0] if to_caller else result
        (y.sum() + (3 * result[1].sum() if to_caller else 0)).backward()
        torch.testing.assert_close(y.double(), expected, rtol=1e-4, atol=1e-5)
        for ours, theirs in zip(inputs, wide, strict=True):
            torch.testing.assert_close(ours.grad.double(), theirs.grad, rtol=1e-4, atol=1e-5)
    # One before the whole forward, one behind it; between the breaks is a graph of nothing.
    assert [count for count in pipelines if count] == [1, 1]


@pytest.mark.parametrize("how", ["item", "insert", "delete", "attribute", "append"])
def test_compiled_container_notices_replaced_members(how: str) -> None:
    module = ops.Sequential(ops.ConstantScale(2.0), ops.GELU(), ops.ConstantScale(3.0))
    run = torch.compile(module, backend="aot_eager", fullgraph=True)
    x = torch.randn(5)
    torch.testing.assert_close(run(x), F.gelu(x * 2, approximate="tanh") * 3)
    change: dict[str, Callable[[], Any]] = {
        "item": lambda: module.__setitem__(1, ops.SiLU()),
        "insert": lambda: module.insert(1, ops.ReLU()),
        "delete": lambda: module.__delitem__(0),
        "attribute": lambda: setattr(module, "1", torch.nn.Tanh()),
        "append": lambda: module.append(ops.ConstantScale(-1.0)),
    }
    change[how]()
    gelu = F.gelu(x * 2, approximate="tanh")
    expected = {
        "item": F.silu(x * 2) * 3,
        "insert": F.gelu(F.relu(x * 2), approximate="tanh") * 3,
        "delete": F.gelu(x, approximate="tanh") * 3,
        "attribute": torch.tanh(x * 2) * 3,
        "append": gelu * -3,
    }[how]
    torch.testing.assert_close(run(x), expected)
    torch.testing.assert_close(module(x), expected)


@pytest.mark.parametrize("needs", ["nothing", "input", "parameters"])
def test_compiled_where_not_all_needs_a_gradient(needs: str) -> None:
    module = ops.Sequential(ops.ConstantScale(2.0), ops.GELU(), ops.Linear(4, 4), ops.SiLU())
    module.requires_grad_(needs == "parameters")
    run = torch.compile(module, backend="flagos", fullgraph=True)
    x = torch.randn(3, 4, requires_grad=needs == "input")
    with torch.no_grad():
        expected = F.silu(F.linear(F.gelu(x * 2, approximate="tanh"), *module.parameters()))
        torch.testing.assert_close(run(x), expected)
    y = run(x)
    torch.testing.assert_close(y.detach(), expected)
    assert y.requires_grad == (needs != "nothing")
    if y.requires_grad:
        y.sum().backward()
        found = [t.grad for t in (x, *module.parameters()) if t.requires_grad]
        module.zero_grad()
        x.grad = None
        module(x).sum().backward()
        torch.testing.assert_close(found, [t.grad for t in (x, *module.parameters()) if t.requires_grad])


def test_in_place_is_the_memory_of_the_caller() -> None:
    x, e = torch.randn(3, 4), torch.randn(3, 4)
    before = e.clone()
    y = ops.AddExtraInput(in_place=True)(x, e)
    assert y.data_ptr() == e.data_ptr()
    torch.testing.assert_close(e, before + x)
    y, extra = ops.MakeExtraOutput(in_place=True)(x)
    assert y.data_ptr() == extra.data_ptr() == x.data_ptr()
    y, extra = ops.MakeExtraOutput()(x)
    assert extra.data_ptr() != x.data_ptr()


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("grouped", [False, True])
def test_main_grad(grouped: bool, overwrite: bool) -> None:
    module: Any = (
        ops.GroupedLinear(2, 4, 3, bias=False, accumulate_into_main_grad=True)
        if grouped
        else ops.Linear(4, 3, bias=False, accumulate_into_main_grad=True)
    )
    plain: Any = ops.GroupedLinear(2, 4, 3, bias=False) if grouped else ops.Linear(4, 3, bias=False)
    plain.load_state_dict(module.state_dict())
    x = torch.randn(5, 4)
    extra = [torch.tensor([2, 3])] if grouped else []
    with pytest.raises(RuntimeError, match="main_grad"):
        module(x, *extra).sum().backward()
    for parameter in module.parameters():
        parameter.main_grad = torch.full_like(parameter, 0.5)
        parameter.overwrite_main_grad = overwrite
        parameter.grad_added_to_main_grad = False
    for run in (module, torch.compile(ops.Sequential(module), backend="aot_eager")):
        before = [parameter.main_grad.clone() for parameter in module.parameters()]
        run(x, *extra).square().sum().backward()
        plain.zero_grad()
        plain(x, *extra).square().sum().backward()
        for ours, old, theirs in zip(module.parameters(), before, plain.parameters(), strict=True):
            torch.testing.assert_close(ours.main_grad, theirs.grad if overwrite else old + theirs.grad)
            assert ours.grad_added_to_main_grad and not ours.grad.any()
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="main_grad"):
        torch.compile(ops.Sequential(module), backend="aot_eager", fullgraph=True)(x, *extra)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("sizes", [[3, 0, 4], [0, 0, 7], [0, 0, 0]])
def test_grouped_linear(sizes: list[int], dtype: torch.dtype) -> None:
    op = ops.GroupedLinear(3, 4, 5, scale_bias=True, dtype=dtype)
    x = torch.randn(sum(sizes), 4, dtype=dtype, requires_grad=True)
    scales = torch.randn(sum(sizes), dtype=dtype, requires_grad=True)
    y = op(x, torch.tensor(sizes), scales)
    grad = torch.randn_like(y)
    y.backward(grad)
    wide = [t.detach().double().requires_grad_() for t in (x, scales, *op.weights(), *op.biases())]
    parts = zip(wide[0].split(sizes), wide[1].split(sizes), wide[2:5], wide[5:], strict=True)
    expected = torch.cat([F.linear(rows, w) + factors[:, None] * b for rows, factors, w, b in parts])
    expected.backward(grad.double())
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 6e-2, torch.float16: 1e-2}[dtype]
    torch.testing.assert_close(y.double(), expected, rtol=tolerance, atol=tolerance)
    for ours, theirs in zip((x, scales, *op.weights(), *op.biases()), wide, strict=True):
        wanted = torch.zeros_like(theirs) if theirs.grad is None else theirs.grad
        torch.testing.assert_close(ours.grad.double(), wanted, rtol=tolerance, atol=tolerance)


def test_grouped_linear_refuses() -> None:
    op = ops.GroupedLinear(2, 4, 3)
    x = torch.randn(5, 4)
    good = torch.tensor([2, 3])
    for bad, message in (
        (lambda: op(x, torch.tensor([2, 2])), "not the 5 rows"),
        (lambda: op(x, torch.tensor([6, -1])), "not the 5 rows"),
        (lambda: op(x, torch.tensor([5])), "2 sizes of groups"),
        (lambda: op(x, torch.tensor([2.0, 3.0])), "int32 or int64"),
        (lambda: op(x[:, :3], good), "4 features"),
        (lambda: op(x, good, output=torch.empty(5, 4)), "output must be of shape"),
        (lambda: op(x, good, output=torch.empty(5, 3, dtype=torch.float64)), "contiguous"),
        (lambda: ops.GroupedLinear(0, 4, 3), "positive num_groups"),
    ):
        with pytest.raises(ValueError, match=message):
            bad()
    with pytest.raises(TypeError, match="keywords"):
        op(x, good, out=x)
    for name in ("delay_wgrad_compute", "single_grouped_weight", "single_grouped_bias"):
        with pytest.raises(NotImplementedError, match=name):
            ops.GroupedLinear(2, 4, 3, **{name: True})


def test_keywords_of_a_call() -> None:
    op = ops.GroupedLinear(2, 4, 3)
    module = ops.Sequential(ops.ConstantScale(1.0), op)
    x, splits, out = torch.randn(5, 4), torch.tensor([2, 3]), torch.empty(5, 3)
    for key in (op, 1):
        y = module(x, splits, op_kwargs={key: {"output": out}})
        assert y.data_ptr() == out.data_ptr()
        torch.testing.assert_close(y, op(x, splits))
    with pytest.raises(ValueError, match="not in this container"):
        module(x, splits, op_kwargs={ops.GELU(): {}})
    with pytest.raises(ValueError, match="no basic operation"):
        ops.Sequential(ops.Linear(4, 4))(x, op_kwargs={0: {}})
    with pytest.raises(TypeError, match="takes no keyword"):
        module(x, splits, op_kwargs={0: {"output": out}})


def test_refusals_of_linear() -> None:
    with pytest.raises(NotImplementedError, match="Userbuffers"):
        ops.BasicLinear(4, 4, userbuffers_options={"comm_name": "fc1"})
    with pytest.raises(ValueError, match="tensor_parallel_mode"):
        ops.BasicLinear(4, 4, tensor_parallel_mode="rows")
    with pytest.raises(RuntimeError, match="init_process_group"):
        ops.BasicLinear(4, 4, tensor_parallel_mode="row")
    with pytest.raises(RuntimeError, match="init_process_group"):
        ops.AllReduce()
    with pytest.raises(ValueError, match="4 features"):
        ops.BasicLinear(4, 4)(torch.randn(3, 5))
    with pytest.raises(ValueError, match="Bias of 4"):
        ops.Bias(4)(torch.randn(3, 1))
    with pytest.raises(TypeError, match="stands for basic operations, got Linear"):
        ops.FusedOperation([ops.Linear(4, 4)])  # type: ignore[list-item]
    linear = ops.Linear(4, 4, bias=False)
    with pytest.raises(ValueError, match="bias=True"):
        linear.register_parameter("bias", torch.nn.Parameter(torch.zeros(4)))
    linear.weight = torch.nn.Parameter(torch.eye(4))
    x = torch.randn(3, 4)
    torch.testing.assert_close(linear(x), x)
    assert list(linear.state_dict()) == ["basic_ops.0.weight"]


def test_float8_cache() -> None:
    x = torch.randn(50, 8, requires_grad=True)
    exact = x.detach().clone().requires_grad_()
    ops.GELU(cache_quantized_input=True)(x).sum().backward()
    ops.GELU()(exact).sum().backward()
    torch.testing.assert_close(x.grad, exact.grad, rtol=0.125, atol=0.0675)
    assert not torch.equal(x.grad, exact.grad)


@pytest.mark.parametrize("recompute", [False, True])
def test_activation_recompute_is_of_srelu(recompute: bool) -> None:
    assert ops.ScaledSReLU(activation_recompute_in_mlp=recompute).activation_recompute_in_mlp is recompute
    with pytest.raises(ValueError, match="does not support"):
        ops.ScaledSwiGLU(activation_recompute_in_mlp=True)


def test_backward_fusions() -> None:
    for modules, kind in (
        ((ops.MakeExtraOutput(), ops.BasicLinear(4, 4)), ops.BackwardLinearAdd),
        ((ops.BasicLinear(4, 4), ops.ConstantScale(2.0)), ops.BackwardLinearScale),
        ((ops.MakeExtraOutput(), ops.RMSNorm(4)), ops.BackwardAddRMSNorm),
    ):
        module = ops.Sequential(*modules)
        alone = [copy.deepcopy(part) for part in modules]
        x = torch.randn(3, 4, requires_grad=True)
        y = x.detach().clone().requires_grad_()
        result = module(x)
        assert [type(op) for op, _ in module._module_groups[0]._backward_ops] == [kind]
        expected: Any = alone[0](y)
        extra = expected[1:] if isinstance(expected, tuple) else ()
        expected = (alone[1](expected[0] if extra else expected), *extra)
        sum(t.square().sum() for t in (result if extra else (result,))).backward()
        sum(t.square().sum() for t in expected).backward()
        torch.testing.assert_close(x.grad, y.grad)
        for ours, part in zip(module.parameters(), (p for op in alone for p in op.parameters()), strict=True):
            torch.testing.assert_close(ours.grad, part.grad)
