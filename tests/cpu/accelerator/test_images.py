"""Convolutional networks of PyTorch on a simulated accelerator: their images lie there with the channels last. Against
eager PyTorch in float64."""

from __future__ import annotations

import copy
from collections.abc import Callable
from math import prod

import pytest
import torch
from torch import nn

from flagos_backend.compile.compiler import CompiledProgram
from flagos_backend.frontends.torch.compile.backend import flagos
from flagos_backend.ir.opcode import Opcode
from plugin_abi.host import Context, Executable
from support.compiled_programs import compiled_program, plan_of

FLAGOS = torch.device("flagos")
PRECISION = {torch.float32: 1e-4, torch.bfloat16: 4e-2, torch.float64: 1e-10}


@pytest.fixture(autouse=True)
def fresh() -> None:
    torch.compiler.reset()


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[CompiledProgram]:
    """The programs that the test has compiled."""
    found: list[CompiledProgram] = []
    original = Executable.compile

    def compile(context: Context, program: bytes) -> Executable:
        executable = original(context, program)
        found.append(compiled_program(executable))
        return executable

    monkeypatch.setattr(Executable, "compile", compile)
    return found


def nest_dims(program: CompiledProgram) -> list[tuple[int, ...]]:
    """Over what the program's generated kernels run."""
    return [step.nest.dims for step in plan_of(program).steps if step.nest is not None]


def opcodes_of(program: CompiledProgram) -> set[Opcode]:
    """Of what the program's library calls and kernels compute, as the passes left it."""
    return {instruction.opcode for instruction in program.module.entry.instructions}


class Residual(nn.Module):
    def __init__(self, channels: int, groups: int = 1) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1, groups=groups, bias=False)
        self.norm = nn.BatchNorm2d(channels)
        self.second = nn.Conv2d(channels, channels, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.second(self.norm(self.first(x)).relu()) + x).relu()


def network(*body: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), *body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5))


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "residual": lambda: network(nn.MaxPool2d(3, 2, 1), Residual(8), Residual(8)),
    "groups": lambda: network(Residual(8, groups=2), Residual(8, groups=8)),
    "pooling": lambda: network(nn.AvgPool2d(2), nn.Conv2d(8, 8, 3, dilation=2, padding=2), nn.AdaptiveAvgPool2d(2)),
    "transposed": lambda: network(nn.ConvTranspose2d(8, 8, 3, 2, 1, output_padding=1), nn.GELU()),
    "layers of another kind": lambda: network(nn.GroupNorm(2, 8), nn.Upsample(scale_factor=2), nn.Conv2d(8, 8, 2)),
}


def compare(model: nn.Module, x: torch.Tensor, training: bool, dtype: torch.dtype) -> None:
    model.train(training)
    exact = copy.deepcopy(model).double()
    ours = model.to(dtype).to(FLAGOS)
    compiled = torch.compile(ours, backend=flagos)
    given, wide = x.to(dtype).to(FLAGOS).requires_grad_(training), x.to(dtype).double().requires_grad_(training)
    with torch.set_grad_enabled(training):
        result, expected = compiled(given), exact(wide)
    precision = PRECISION[dtype]
    torch.testing.assert_close(result.cpu().double(), expected, rtol=precision, atol=precision)
    if not training:
        return
    gradient = torch.randn(expected.shape)
    result.backward(gradient.to(dtype).to(FLAGOS))
    expected.backward(gradient.to(dtype).double())
    pairs = [(given, wide), *zip(ours.parameters(), exact.parameters(), strict=True)]
    for mine, theirs in pairs:
        assert mine.grad is not None
        assert theirs.grad is not None
        bound = 10 * precision * max(1.0, theirs.grad.abs().max().item())
        torch.testing.assert_close(mine.grad.cpu().double(), theirs.grad, rtol=0, atol=bound)


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("training", [False, True])
def test_networks(name: str, training: bool) -> None:
    compare(NETWORKS[name](), torch.randn(2, 3, 13, 9), training, torch.float32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_types(dtype: torch.dtype) -> None:
    compare(NETWORKS["residual"](), torch.randn(2, 3, 13, 9), False, dtype)


@pytest.mark.parametrize("dimensions", [1, 3])
@pytest.mark.parametrize("training", [False, True])
def test_other_ranks(dimensions: int, training: bool) -> None:
    layer = {1: nn.Conv1d, 3: nn.Conv3d}[dimensions]
    model = nn.Sequential(layer(2, 4, 3, padding=1), nn.ReLU(), layer(4, 3, 1, stride=2))
    compare(model, torch.randn(2, 2, 5, 6, 4)[(..., *(0,) * (3 - dimensions))], training, torch.float32)


def test_images_that_come_channels_last() -> None:
    x = torch.randn(2, 3, 13, 9).contiguous(memory_format=torch.channels_last)
    compare(NETWORKS["residual"]().to(memory_format=torch.channels_last), x, True, torch.float32)


def test_images_of_one_channel_and_of_none() -> None:
    compare(
        nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Conv2d(4, 1, 1)), torch.randn(2, 1, 5, 5), True, torch.float32
    )
    compare(nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU()), torch.randn(0, 3, 5, 5), False, torch.float32)


def test_one_kernel_between_convolutions(made: list[CompiledProgram]) -> None:
    """Beside it only those that lay the weights and the images out, which is once, and norms' factors."""
    model = nn.Sequential(*(Residual(8) for _ in range(3))).eval().requires_grad_(False)
    torch.compile(model.to(FLAGOS), backend=flagos)(torch.randn(2, 8, 6, 5, device=FLAGOS))
    (program,) = made
    calls = [
        step for step in plan_of(program).steps if step.instruction and step.instruction.opcode is Opcode.CUSTOM_CALL
    ]
    assert len(calls) == 6, program.explain()
    # One to lay out what comes in, one behind each convolution; the last one lays out what goes out.
    assert 6 <= sum(prod(dims) == 2 * 8 * 6 * 5 for dims in nest_dims(program)) <= 1 + 6 + 1
    assert "batch_norm" not in program.explain()


def test_results_lie_as_eager_ones_do() -> None:
    """Also those that the gradients need: only what nobody else sees is kept otherwise."""
    model = nn.ModuleList([nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3)])

    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        first = model[0](x).relu()
        return first, model[1](first).sigmoid()

    x = torch.randn(2, 3, 8, 7)
    expected = function(x)
    model.to(FLAGOS)
    ours = torch.compile(function, backend=flagos)(x.to(FLAGOS))
    for mine, theirs in zip(ours, expected, strict=True):
        assert mine.stride() == theirs.stride()
        torch.testing.assert_close(mine.cpu(), theirs, rtol=1e-4, atol=1e-5)


def test_gradients_find_images_as_convolutions_read_them(made: list[CompiledProgram]) -> None:
    """What is kept for them crosses the border of the two programs without being laid out."""
    model = nn.Sequential(*(Residual(8) for _ in range(3))).to(FLAGOS)
    x = torch.randn(2, 8, 6, 5, device=FLAGOS)
    torch.compile(model, backend=flagos)(x).sum().backward()
    forward, backward = made
    channels_first = (2, 8, 6, 5)
    assert nest_dims(backward).count(channels_first) <= 1, backward.explain()
    assert nest_dims(forward).count(channels_first) <= 2, forward.explain()


POOLS: dict[str, nn.Module] = {
    "windows": nn.MaxPool2d(2),
    "overlapping": nn.MaxPool2d(3, 2, 1),
    "that leave a rest": nn.MaxPool2d((2, 3), (3, 2)),
    "that hang over": nn.MaxPool2d(3, 2, ceil_mode=True),
    "with gaps": nn.MaxPool2d(2, 1, (1, 0), dilation=(3, 2)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", POOLS)
def test_maxima_of_windows_are_a_kernel_of_ours(name: str, dtype: torch.dtype, made: list[CompiledProgram]) -> None:
    pool = POOLS[name]
    for x in (torch.randn(2, 3, 11, 13), torch.randn(3, 8, 9)):
        x[..., 4, 5], x[..., 0, 0] = torch.nan, -torch.inf
        expected = pool(x.to(dtype))
        torch.testing.assert_close(
            torch.compile(pool, backend=flagos)(x.to(dtype).to(FLAGOS)).cpu(), expected, rtol=0, atol=0, equal_nan=True
        )
        opcodes = opcodes_of(made[-1])
        assert Opcode.REDUCE_WINDOW in opcodes and Opcode.CUSTOM_CALL not in opcodes, made[-1].explain()


def test_pools_of_which_places_are_asked_stay_whole(made: list[CompiledProgram]) -> None:
    pool, x = nn.MaxPool2d(3, 2, 1, return_indices=True), torch.randn(2, 3, 11, 13)
    ours = torch.compile(pool, backend=flagos)(x.to(FLAGOS))
    for mine, theirs in zip(ours, pool(x), strict=True):
        torch.testing.assert_close(mine.cpu(), theirs, rtol=0, atol=0)
    opcodes = opcodes_of(made[-1])
    assert Opcode.CUSTOM_CALL in opcodes and Opcode.REDUCE_WINDOW not in opcodes, made[-1].explain()
