"""What attention and RMSNorm become, forward and backward, on the host and on flagos; PyTorch eager is the oracle."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.testing import assert_close

from flagos_backend.codegen.triton.tiling import supports
from flagos_backend.compile.compiler import CompiledProgram, compile_program
from flagos_backend.frontends.torch.compile import executable, report
from flagos_backend.fusion.fuse import fuse
from flagos_backend.fusion.merge import merge
from flagos_backend.fusion.policy import ACCELERATOR
from flagos_backend.loop_ir.flat import flatten
from flagos_backend.loop_ir.region import Region

DEVICES = ["cpu", "flagos"]
FORWARD = "aten._scaled_dot_product_flash_attention_for_cpu.default"
BACKWARD = "aten._scaled_dot_product_flash_attention_for_cpu_backward.default"
#: Heads of the query, heads of the key, channels of the value, and the options.
WHOLE: dict[str, tuple[int, int, int, dict[str, Any]]] = {
    "plain": (4, 4, 16, {}),
    "causal": (4, 4, 16, {"is_causal": True}),
    "scaled": (4, 4, 16, {"scale": 0.3}),
    "mask of truth values": (4, 4, 16, {"attn_mask": torch.ones(8, 8).tril(3).bool()}),
    "mask of numbers": (4, 4, 16, {"attn_mask": torch.linspace(-1, 1, 64).reshape(8, 8)}),
    "grouped queries": (4, 2, 16, {"enable_gqa": True}),
    "one key for all, causal": (4, 1, 16, {"enable_gqa": True, "is_causal": True}),
}


def gradients(function: Callable[..., Tensor], inputs: Sequence[Tensor], device: str) -> list[Tensor]:
    """The result and the gradients by the inputs."""
    leaves = [x.to(device).requires_grad_() for x in inputs]
    result = function(*leaves)
    return [t.detach().cpu() for t in (result, *torch.autograd.grad(result.square().sum(), leaves))]


def attention(device: str, options: dict[str, Any]) -> Callable[..., Tensor]:
    moved = {name: value.to(device) if isinstance(value, Tensor) else value for name, value in options.items()}
    return lambda q, k, v: functional.scaled_dot_product_attention(q, k, v, **moved)


def whole_calls() -> list[dict[str, int]]:
    return [dict(known.whole) for known in report.reports()]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", WHOLE)
def test_attention_is_one_call_each_way(case: str, device: str) -> None:
    heads, key_heads, channels, options = WHOLE[case]
    inputs = [torch.randn(2, heads, 8, 16), torch.randn(2, key_heads, 8, 16), torch.randn(2, key_heads, 8, channels)]
    run = torch.compile(attention(device, options), backend="flagos", options={"fallback": "error"})
    assert_close(gradients(run, inputs, device), gradients(attention("cpu", options), inputs, "cpu"))
    assert whole_calls() == [{FORWARD: 1}, {BACKWARD: 1}]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "dims", [(4, 8, 16, 16), (2, 4, 8, 16, 12)], ids=["without a batch", "other channels of the value"]
)
def test_other_attention_is_its_parts(dims: tuple[int, ...], device: str) -> None:
    """As PyTorch takes it apart for the host; none of the parts is refused."""
    *batch, channels, of_value = dims
    inputs = [torch.randn(*batch, channels), torch.randn(*batch, channels), torch.randn(*batch, of_value)]
    run = torch.compile(attention(device, {}), backend="flagos", options={"fallback": "error"})
    assert_close(gradients(run, inputs, device), gradients(attention("cpu", {}), inputs, "cpu"))
    # From 2.15 on PyTorch has attention without a batch in one piece on the host.
    in_one = [{FORWARD: 1}, {BACKWARD: 1}] if len(dims) == 4 and device == "cpu" else [{}, {}]
    assert whole_calls() in ([{}, {}], in_one)


@pytest.mark.parametrize("device", DEVICES)
def test_attention_with_dropout(device: str) -> None:
    """Values are identity, so that the result is the weights: those that stay are scaled by 2, about half do."""
    q, k = torch.randn(2, 4, 32, 32).to(device), torch.randn(2, 4, 32, 32).to(device)
    v = torch.eye(32).expand(2, 4, 32, 32).to(device)
    run = torch.compile(attention(device, {"dropout_p": 0.5}), backend="flagos", options={"fallback": "error"})
    weights, kept = functional.scaled_dot_product_attention(q, k, v).cpu(), run(q, k, v).cpu()
    assert_close(kept[kept != 0], 2 * weights[kept != 0], rtol=1e-4, atol=1e-6)
    assert 0.4 < (kept != 0).double().mean() < 0.6


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch) -> list[CompiledProgram]:
    """What was compiled, as the backend sees it."""
    seen: list[CompiledProgram] = []
    original = executable.Executable.compile

    def compile_(context: Any, source: bytes) -> executable.Executable:
        seen.append(compile_program(source, "test", can_call_host=True))
        return original(context, source)

    monkeypatch.setattr(executable.Executable, "compile", compile_)
    return seen


def kernels(program: CompiledProgram) -> int:
    """What an accelerator would launch for it."""
    flat = flatten(program.module.entry)
    items = merge(flat, fuse(flat, ACCELERATOR), supports).items
    assert all(isinstance(item, Region) for item in items)
    return len(items)


@pytest.mark.parametrize("device", DEVICES)
def test_rms_norm_is_native_and_one_kernel(device: str, programs: list[CompiledProgram]) -> None:
    """PyTorch takes it apart for devices other than CUDA; here the parts become one again."""
    inputs = [torch.randn(4, 8, 64), torch.randn(64)]

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return functional.rms_norm(x, (64,), weight, 1e-5)

    run = torch.compile(norm, backend="flagos", options={"fallback": "error"})
    assert_close(gradients(run, inputs, device), gradients(norm, inputs, "cpu"), rtol=1e-4, atol=1e-5)
    assert whole_calls() == [{}, {}]
    forward, backward = programs
    for program in programs:
        assert program.native is not None and not program.native.calls
    assert kernels(forward) == 1
    assert kernels(backward) <= 2  # rows are reduced for the gradient of the input, columns for that of the weight
