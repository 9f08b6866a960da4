"""Whole models: inference and training, values and every gradient as eager gives them."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from support.torch_compile import check_function, check_training, compiled

TOLERANCE = {"rtol": 2e-4, "atol": 2e-5}


class Perceptron(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layers = (nn.Linear(12, 32), nn.GELU(), nn.LayerNorm(32), nn.Dropout(0.2), nn.Linear(32, 5))
        self.layers = nn.Sequential(*layers)

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(self.layers(x), target)


class Convolutional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.BatchNorm2d(8)
        self.second, self.head = nn.Conv2d(8, 12, 3, groups=4), nn.Linear(12, 5)

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        x = functional.max_pool2d(functional.relu(self.norm(self.first(x))), 2)
        x = functional.adaptive_avg_pool2d(functional.silu(self.second(x)), 1).flatten(1)
        return functional.cross_entropy(self.head(x), target, label_smoothing=0.1)


class Transformer(nn.Module):
    """Two blocks with causal attention; the embedding's weight is tied to the head's."""

    def __init__(self, vocabulary: int = 31, width: int = 16, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(
            nn.ModuleDict(
                {
                    "before": nn.LayerNorm(width),
                    "qkv": nn.Linear(width, 3 * width),
                    "out": nn.Linear(width, width),
                    "after": nn.RMSNorm(width),
                    "up": nn.Linear(width, 4 * width, bias=False),
                    "down": nn.Linear(4 * width, width),
                }
            )
            for _ in range(2)
        )

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            q, k, v = block["qkv"](block["before"](x)).chunk(3, -1)
            q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in (q, k, v))
            attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + block["out"](attended.transpose(1, 2).flatten(2))
            x = x + block["down"](functional.gelu(block["up"](block["after"](x)), approximate="tanh"))
        logits = x @ self.embedding.weight.T
        return functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


MODELS = {
    "perceptron": (Perceptron, lambda: (torch.randn(6, 12), torch.randint(5, (6,)))),
    "convolutional": (Convolutional, lambda: (torch.randn(4, 3, 16, 16), torch.randint(5, (4,)))),
    "transformer": (Transformer, lambda: (torch.randint(31, (2, 9)),)),
}


@pytest.mark.parametrize("name", MODELS)
def test_training(name: str) -> None:
    make, inputs = MODELS[name]
    check_training(make(), inputs(), **TOLERANCE)


@pytest.mark.parametrize("name", MODELS)
def test_inference(name: str) -> None:
    make, inputs = MODELS[name]
    module = make().eval()
    with torch.no_grad():
        check_function(module, *inputs(), **TOLERANCE)


def test_channels_last() -> None:
    module = Convolutional().to(memory_format=torch.channels_last)
    images, target = torch.randn(4, 3, 16, 16), torch.randint(5, (4,))
    check_training(module, (images.to(memory_format=torch.channels_last), target), **TOLERANCE)


def test_bfloat16_autocast() -> None:
    class Autocast(Perceptron):
        def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return super().forward(x, target)

    check_training(Autocast(), (torch.randn(6, 12), torch.randint(5, (6,))), rtol=2e-2, atol=2e-2)


def test_activation_checkpointing() -> None:
    class Checkpointed(Perceptron):
        def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            hidden = torch.utils.checkpoint.checkpoint(self.layers[:3], x, use_reentrant=False)
            return functional.cross_entropy(self.layers[3:](hidden), target)

    check_training(Checkpointed(), (torch.randn(6, 12), torch.randint(5, (6,))), **TOLERANCE)


def test_dropout_repeats_with_the_seed_and_keeps_its_share() -> None:
    drop = compiled(lambda x: functional.dropout(x, 0.25))
    x = torch.ones(20_000)
    torch.manual_seed(7)
    first, second = drop(x), drop(x)
    torch.manual_seed(7)
    assert torch.equal(drop(x), first)
    assert not torch.equal(first, second)
    assert abs(float((first == 0).float().mean()) - 0.25) < 0.02
    assert set(first.unique().tolist()) == {0.0, float(torch.tensor(1 / 0.75))}
