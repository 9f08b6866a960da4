"""The models of the model suite: small configurations with random weights of the transformers and timm libraries."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

_VOCABULARY = 100
_SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "vocab_size": _VOCABULARY,
}
_GROUPED = {**_SIZES, "num_key_value_heads": 2}
_ENCODER_DECODER = {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "vocab_size": _VOCABULARY,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
}


@dataclass(frozen=True)
class Model:
    """``inputs``: keyword arguments of the module, whose result is a loss, or has one as ``loss``."""

    library: str
    make: Callable[[], torch.nn.Module]
    inputs: Callable[[], dict[str, Any]]


def _of_transformers(architecture: str, configuration: str, sizes: Mapping[str, Any]) -> torch.nn.Module:
    import transformers

    return getattr(transformers, architecture)(getattr(transformers, configuration)(**sizes))


class _Classifier(torch.nn.Module):
    """A timm model with the loss of a classification."""

    def __init__(self, name: str, settings: Mapping[str, Any]) -> None:
        super().__init__()
        declare_torchvision_operators()
        import timm

        self.model = timm.create_model(name, num_classes=10, **settings)

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(self.model(images), labels)


# Declarations end with the object that made them.
_declared: list[torch.library.Library] = []


def declare_torchvision_operators() -> None:
    """timm imports torchvision, whose operators are built for PyTorch with CUDA: beside another they are missing,
    and its import fails. No model here calls them. Beside PyTorch with CUDA they are there, and stay torchvision's."""
    if not _declared and not torch.version.cuda:
        library = torch.library.Library("torchvision", "FRAGMENT")
        for name in ("nms", "qnms"):
            if not hasattr(torch.ops.torchvision, name):
                library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _declared.append(library)


def without_dropout(module: torch.nn.Module) -> None:
    """Takes dropout out of a model: an accelerator's generator drops other elements than the CPU's."""
    for part in module.modules():
        if isinstance(part, torch.nn.Dropout):
            part.p = 0.0
        for owner in filter(None, (part, getattr(part, "config", None))):
            for name in [name for name, value in vars(owner).items() if "drop" in name and isinstance(value, float)]:
                setattr(owner, name, 0.0)


def _tokens() -> dict[str, Any]:
    ids = torch.randint(3, _VOCABULARY, (2, 9))
    return {"input_ids": ids, "labels": ids}


def _images() -> dict[str, Any]:
    return {"pixel_values": torch.randn(2, 3, 32, 32), "labels": torch.tensor([0, 1])}


def _sound() -> dict[str, Any]:
    return {"input_features": torch.randn(2, 16, 40), "labels": torch.randint(3, _VOCABULARY, (2, 7))}


def _pairs() -> dict[str, Any]:
    ids = torch.randint(3, _VOCABULARY, (2, 9))
    return {"input_ids": ids, "pixel_values": torch.randn(2, 3, 32, 32), "return_loss": True}


def _labelled(size: int) -> dict[str, Any]:
    return {"images": torch.randn(2, 3, size, size), "labels": torch.tensor([3, 7])}


_Row = tuple[str, str, Mapping[str, Any], Callable[[], dict[str, Any]]]
_VISION = {name: size for name, size in _SIZES.items() if name != "vocab_size"}
_TRANSFORMERS: dict[str, _Row] = {
    "gpt2": (
        "GPT2LMHeadModel",
        "GPT2Config",
        {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": _VOCABULARY},
        _tokens,
    ),
    "llama": ("LlamaForCausalLM", "LlamaConfig", _GROUPED, _tokens),
    "mistral": ("MistralForCausalLM", "MistralConfig", {**_GROUPED, "sliding_window": 4}, _tokens),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", _GROUPED, _tokens),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", {**_GROUPED, "head_dim": 8}, _tokens),
    "gemma": ("GemmaForCausalLM", "GemmaConfig", {**_GROUPED, "head_dim": 8}, _tokens),
    "gemma2": ("Gemma2ForCausalLM", "Gemma2Config", {**_GROUPED, "head_dim": 8}, _tokens),
    "phi": ("PhiForCausalLM", "PhiConfig", _SIZES, _tokens),
    "gpt_neox": ("GPTNeoXForCausalLM", "GPTNeoXConfig", _SIZES, _tokens),
    "mixtral": ("MixtralForCausalLM", "MixtralConfig", {**_GROUPED, "num_local_experts": 4}, _tokens),
    "bert": ("BertForMaskedLM", "BertConfig", _SIZES, _tokens),
    "roberta": ("RobertaForMaskedLM", "RobertaConfig", _SIZES, _tokens),
    "distilbert": (
        "DistilBertForMaskedLM",
        "DistilBertConfig",
        {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48, "vocab_size": _VOCABULARY},
        _tokens,
    ),
    "t5": (
        "T5ForConditionalGeneration",
        "T5Config",
        {
            "d_model": 32,
            "d_kv": 8,
            "d_ff": 48,
            "num_layers": 2,
            "num_heads": 4,
            "vocab_size": _VOCABULARY,
            "decoder_start_token_id": 0,
        },
        _tokens,
    ),
    "bart": ("BartForConditionalGeneration", "BartConfig", _ENCODER_DECODER, _tokens),
    "whisper": (
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        {**_ENCODER_DECODER, "num_mel_bins": 16, "max_source_positions": 20, "max_target_positions": 20},
        _sound,
    ),
    "vit": ("ViTForImageClassification", "ViTConfig", {**_VISION, "image_size": 32, "patch_size": 8}, _images),
    "clip": (
        "CLIPModel",
        "CLIPConfig",
        {
            "text_config": {**_SIZES, "eos_token_id": 2},
            "vision_config": {**_VISION, "image_size": 32, "patch_size": 8},
            "projection_dim": 16,
        },
        _pairs,
    ),
}
_TIMM: dict[str, tuple[dict[str, Any], int]] = {
    "resnet18": ({}, 64),
    "vit_tiny_patch16_224": ({"img_size": 32, "patch_size": 8, "depth": 2}, 32),
    "convnext_atto": ({"depths": (1, 1, 1, 1)}, 64),
    "efficientnet_b0": ({}, 64),
    "mobilenetv3_small_050": ({}, 64),
    "swin_tiny_patch4_window7_224": (
        {"img_size": 64, "window_size": 4, "depths": (1, 1), "num_heads": (2, 4), "embed_dim": 16},
        64,
    ),
}

MODELS: dict[str, Model] = {
    **{
        name: Model("transformers", functools.partial(_of_transformers, architecture, configuration, sizes), inputs)
        for name, (architecture, configuration, sizes, inputs) in _TRANSFORMERS.items()
    },
    **{
        name: Model("timm", functools.partial(_Classifier, name, settings), functools.partial(_labelled, resolution))
        for name, (settings, resolution) in _TIMM.items()
    },
}
