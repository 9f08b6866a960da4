"""Libraries that train and load models, on the device, with tiny models of random weights."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"  # read when the libraries are imported

import torch

from flagos_backend.frontends.torch import autoload

assert autoload.enable() == ""
transformers = pytest.importorskip("transformers", reason="needs transformers", exc_type=ImportError)


@pytest.fixture
def device() -> torch.device:
    return torch.device("flagos", 0)


@pytest.fixture
def model() -> torch.nn.Module:
    """A language model with random weights."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    tokens = {"vocab_size": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    made: torch.nn.Module = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **tokens))
    return made


@pytest.fixture
def saved(model: torch.nn.Module, tmp_path: Path) -> Path:
    """The model's folder."""
    folder = tmp_path / "model"
    model.save_pretrained(folder)  # type: ignore[operator]
    return folder
