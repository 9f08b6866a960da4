"""A Triton kernel of one's own in a program that flagos compiles: an operator of torch.library, with its gradient.

    pip install 'flagos[gpu]'
    python custom_kernel.py                       # on an accelerator
    TRITON_INTERPRET=1 python custom_kernel.py    # without one, through Triton's interpreter

flagos does not know the operator: PyTorch runs it on the program's own tensors, between what flagos compiles.
"""

from __future__ import annotations

import os

import torch
import triton
import triton.language as tl

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"


@triton.jit
def swiglu_kernel(gate, up, out, count, block: tl.constexpr):
    offsets = tl.program_id(0) * block + tl.arange(0, block)
    mask = offsets < count
    x = tl.load(gate + offsets, mask)
    tl.store(out + offsets, x / (1 + tl.exp(-x)) * tl.load(up + offsets, mask), mask)


@torch.library.custom_op("example::swiglu", mutates_args=())
def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """gate * sigmoid(gate) * up, of equal shapes."""
    gate, up = gate.contiguous(), up.contiguous()
    out = torch.empty_like(gate)
    swiglu_kernel[(triton.cdiv(out.numel(), 1024),)](gate, up, out, out.numel(), block=1024)
    return out


@swiglu.register_fake
def _(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(gate, memory_format=torch.contiguous_format)


def swiglu_backward(ctx, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    gate, up = ctx.saved_tensors
    share = torch.sigmoid(gate)
    return gradient * up * share * (1 + gate * (1 - share)), gradient * gate * share


swiglu.register_autograd(swiglu_backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs))


class FeedForward(torch.nn.Module):
    """[n, 64] to [n, 64]."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = torch.nn.Linear(64, 128), torch.nn.Linear(64, 128), torch.nn.Linear(128, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(swiglu(self.gate(x), self.up(x)))


torch.manual_seed(0)
model, x = FeedForward().to(DEVICE), torch.randn(32, 64, device=DEVICE)
compiled = torch.compile(model, backend="flagos", fullgraph=True)

expected = model.down(torch.nn.functional.silu(model.gate(x)) * model.up(x))
gradient = torch.autograd.grad(expected.square().mean(), model.gate.weight)[0]
result = compiled(x)
result.square().mean().backward()
torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-5)
torch.testing.assert_close(model.gate.weight.grad, gradient, rtol=1e-4, atol=1e-5)
print(f"the same as PyTorch's own operators on {result.device}, values and gradients")
