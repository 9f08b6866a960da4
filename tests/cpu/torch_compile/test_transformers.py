"""Models of the transformers library with random weights: loss and every gradient as eager gives them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

from flagos_backend.frontends.torch.compile.backend import flagos

transformers = pytest.importorskip("transformers", reason="the transformers library is not installed")

SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "vocab_size": 100,
}


def gpt2() -> torch.nn.Module:
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=100))


def llama() -> torch.nn.Module:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, num_key_value_heads=2))


def qwen3() -> torch.nn.Module:
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SIZES, num_key_value_heads=2, head_dim=8))


def bert() -> torch.nn.Module:
    return transformers.BertForMaskedLM(transformers.BertConfig(**SIZES))


def mixtral() -> torch.nn.Module:
    config = transformers.MixtralConfig(**SIZES, num_key_value_heads=2, num_local_experts=4)
    return transformers.MixtralForCausalLM(config)


def t5() -> torch.nn.Module:
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "vocab_size": 100}
    return transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes, decoder_start_token_id=0))


def vit() -> torch.nn.Module:
    sizes = {name: size for name, size in SIZES.items() if name != "vocab_size"}
    return transformers.ViTForImageClassification(transformers.ViTConfig(**sizes, image_size=32, patch_size=8))


def tokens() -> dict[str, Any]:
    ids = torch.randint(100, (2, 9))
    return {"input_ids": ids, "labels": ids}


def without_a_cache() -> dict[str, Any]:
    """As the library's Trainer calls a model: it gives no cache, so that its mask looks for packed sequences."""
    ids = torch.randint(100, (2, 9))
    return {"input_ids": ids, "labels": ids.clone(), "use_cache": False}


def images() -> dict[str, Any]:
    return {"pixel_values": torch.randn(2, 3, 32, 32), "labels": torch.tensor([0, 1])}


@pytest.mark.parametrize(
    ("make", "inputs"),
    [
        *((gpt2, tokens), (llama, tokens), (qwen3, tokens), (bert, tokens), (mixtral, tokens), (t5, tokens)),
        *((make, without_a_cache) for make in (gpt2, llama, qwen3, mixtral)),
        (vit, images),
    ],
    ids=lambda value: value.__name__,
)
def test_training(make: Callable[[], torch.nn.Module], inputs: Callable[[], dict[str, Any]]) -> None:
    model, arguments, seed = make().train(), inputs(), int(torch.randint(2**31, ()))
    twin = copy.deepcopy(model)
    losses = []
    for run in (model, torch.compile(twin, backend=flagos)):
        torch.manual_seed(seed)
        losses.append(run(**arguments).loss)
        losses[-1].backward()
    torch.testing.assert_close(losses[1], losses[0])
    for (name, own), other in zip(model.named_parameters(), twin.parameters(), strict=True):
        if own.grad is None:
            assert other.grad is None, name
        else:
            torch.testing.assert_close(other.grad, own.grad, rtol=1e-4, atol=1e-5)
