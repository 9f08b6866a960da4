"""The programs of torch_speed.py, at two scales: of bfloat16 on accelerators, of float32 on hosts."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

from .programs import Scale
from .torch_models import Gpt2, LlamaBlock, resnet18

# Runs once; what it returns is compared with eager's.
Step = Callable[[], torch.Tensor | Sequence[torch.Tensor]]


@dataclass(frozen=True)
class Program:
    """``make`` builds the program on a device around a compiler of functions and modules, random inputs included.
    ``bytes_moved``, ``flops``: the least there is to do. ``precision``: largest difference from eager's result,
    relative to its largest magnitude."""

    name: str
    make: Callable[[torch.device, Callable[..., Callable[..., torch.Tensor]]], Step]
    bytes_moved: float = 0.0
    flops: float = 0.0
    precision: float = 2e-2


def _rows(
    name: str, function: Callable[..., torch.Tensor], dtype: torch.dtype, *shapes: tuple[int, ...], backward: bool
) -> Program:
    """A function of arrays; with ``backward`` its gradients, for a random one of its result."""

    def make(device: torch.device, compiler: Callable[..., Callable[..., torch.Tensor]]) -> Step:
        torch.manual_seed(0)
        arrays = [torch.randn(shape, device=device, dtype=dtype, requires_grad=backward) for shape in shapes]
        gradient, run = torch.randn(shapes[0], device=device, dtype=dtype), compiler(function)
        if not backward:
            return lambda: run(*arrays)
        return lambda: torch.autograd.grad(run(*arrays), arrays, gradient)[0]

    whole, rest = math.prod(shapes[0]), sum(map(math.prod, shapes[1:]))
    # Backward as well: the array is read again, with the gradient of the result, and a gradient is written.
    moved = dtype.itemsize * ((5 if backward else 2) * whole + rest)
    return Program(f"{name} {shapes[0][0]}x{shapes[0][1]}", make, float(moved))


def _cross_entropy(rows: int, vocabulary: int, dtype: torch.dtype) -> Program:
    def make(device: torch.device, compiler: Callable[..., Callable[..., torch.Tensor]]) -> Step:
        torch.manual_seed(0)
        logits = torch.randn(rows, vocabulary, device=device, dtype=dtype, requires_grad=True)
        labels = torch.randint(vocabulary, (rows,), device=device)
        run = compiler(lambda x, y: functional.cross_entropy(x.float(), y))
        return lambda: torch.autograd.grad(run(logits, labels), [logits])[0]

    return Program(f"cross-entropy and gradient {rows}x{vocabulary}", make, 3.0 * dtype.itemsize * rows * vocabulary)


def _inference(
    name: str, model: Callable[[], nn.Module], shape: tuple[int, ...], flops: float, dtype: torch.dtype
) -> Program:
    def make(device: torch.device, compiler: Callable[..., Callable[..., torch.Tensor]]) -> Step:
        torch.manual_seed(0)
        module = model().to(device, dtype).eval()
        x, run = torch.randn(shape, device=device, dtype=dtype), compiler(module)

        def step() -> torch.Tensor:
            with torch.no_grad():
                return run(x)

        return step

    return Program(name, make, flops=flops)


def _training(
    name: str, layers: int, batch: int, length: int, width: int, vocabulary: int, dtype: torch.dtype
) -> Program:
    """GPT-2 with fused AdamW, which runs eagerly for everyone."""

    def make(device: torch.device, compiler: Callable[..., Callable[..., torch.Tensor]]) -> Step:
        torch.manual_seed(0)
        model = Gpt2(layers, width, width // 64, vocabulary).to(device, dtype)
        # So slow that the one batch is not learned: squares of gradients of what it lacks would soon be subnormal
        # numbers, with which a host's optimizer takes several times as long as all else.
        optimizer = torch.optim.AdamW(model.parameters(), 1e-7, fused=True)
        tokens, run = torch.randint(vocabulary, (batch, length), device=device), compiler(model)

        def step() -> torch.Tensor:
            loss = run(tokens)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        return step

    weights = 12.0 * layers * width**2 + vocabulary * width
    flops = 6.0 * batch * length * (weights + layers * length * width)
    return Program(f"{name} {batch}x{length}", make, flops=flops)


def _norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return functional.layer_norm(x, x.shape[-1:], weight, bias)


def _rms_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return functional.rms_norm(x, x.shape[-1:], weight)


def llama_flops(width: int, hidden: int) -> float:
    """Operations of a Llama block's products for one position, attention's scores left out."""
    return 2.0 * (4 * width**2 + 3 * width * hidden)


def programs(scale: Scale) -> list[Program]:
    """Kernels, then models."""
    return _on_accelerators() if scale is Scale.ACCELERATOR else _on_hosts()


def _kernels(dtype: torch.dtype, rows: int, width: int) -> list[Program]:
    big, row = (rows, width), (width,)
    return [
        _rows("gelu times", lambda x, y: functional.gelu(x) * y, dtype, big, big, backward=False),
        _rows("softmax", lambda x: x.softmax(-1), dtype, big, backward=False),
        _rows("softmax, gradient", lambda x: x.softmax(-1), dtype, big, backward=True),
        _rows("layer norm", _norm, dtype, big, row, row, backward=False),
        _rows("layer norm, gradient", _norm, dtype, big, row, row, backward=True),
        _rows("RMS norm", _rms_norm, dtype, big, row, backward=False),
    ]


def _on_accelerators() -> list[Program]:
    half, block = torch.bfloat16, llama_flops(2048, 5632)

    def llama() -> nn.Module:
        return LlamaBlock(2048, 16, 5632)

    return [
        *_kernels(half, 16384, 8192),
        _cross_entropy(8192, 32000, half),
        _inference("Llama block prefill 4x2048", llama, (4, 2048, 2048), 8192 * block, half),
        _inference("Llama block 1x128", llama, (1, 128, 2048), 128 * block, half),
        _training("GPT-2 768 x12 training", 12, 8, 1024, 768, 50304, half),
        _inference("ResNet-18 inference 64", resnet18, (64, 3, 224, 224), 64 * 3.6e9, half),
    ]


def _on_hosts() -> list[Program]:
    single, block = torch.float32, llama_flops(1024, 2816)

    def llama() -> nn.Module:
        return LlamaBlock(1024, 16, 2816)

    return [
        *_kernels(single, 2048, 4096),
        _cross_entropy(512, 32000, single),
        _inference("Llama block prefill 1x512", llama, (1, 512, 1024), 512 * block, single),
        _inference("Llama block 1x16", llama, (1, 16, 1024), 16 * block, single),
        _training("GPT-2 256 x4 training", 4, 2, 256, 256, 5000, single),
        _inference("ResNet-18 inference 2", resnet18, (2, 3, 224, 224), 2 * 3.6e9, single),
    ]
