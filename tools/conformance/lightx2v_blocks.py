"""Transformer blocks of LightX2V's WAN models with random weights, in stock operators and in ours."""

from __future__ import annotations

import importlib
import sys
import types
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

import flagos_backend.frontends.lightx2v as front_end
from flagos_backend.frontends.lightx2v import functions
from tools.conformance.lightx2v import KEYS

#: What a configuration says of operators.
STOCK = {
    "self_attn_1_type": "torch_sdpa",
    "cross_attn_1_type": "torch_sdpa",
    "cross_attn_2_type": "torch_sdpa",
    "rms_norm_type": "torch",
    "layer_norm_type": "torch",
    "rope_type": "torch_complex_rope",
}
OURS = {
    "self_attn_1_type": "flagos_flash_attn",
    "cross_attn_1_type": "flagos_flash_attn",
    "cross_attn_2_type": "flagos_flash_attn",
    "rms_norm_type": "flagos_rms_norm",
    "layer_norm_type": "flagos_layer_norm",
    "rope_type": "flagos_rope",
    "dit_quantized": True,
}
_BYTES = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}
_IMAGE_TOKENS, _TEXT_TOKENS = 257, 32


def import_lightx2v(checkout: Path) -> None:
    """Makes what blocks are made of importable: the platform is chosen as LightX2V does, but its pipeline, which needs
    decoders of video, is left out. Nothing is pinned, for which a torch without accelerators has no memory."""
    sys.path.insert(0, str(checkout))
    empty = torch.empty
    torch.empty = lambda *sizes, pin_memory=False, **options: empty(*sizes, **options)  # type: ignore[assignment]
    front_end.register()  # before it, as for versions without entry points
    importlib.import_module("lightx2v_platform.set_ai_device")
    package = types.ModuleType("lightx2v")
    package.__path__ = [str(checkout / "lightx2v")]
    sys.modules["lightx2v"] = package
    importlib.import_module("lightx2v.common.ops")


def configuration(task: str, scheme: str | None, width: int, **more: Any) -> dict[str, Any]:
    """``scheme``: None for stock operators."""
    heads = 12 if width == 1536 else 4
    base = {
        "task": task,
        "model_cls": "wan2.1",
        "seq_parallel": False,
        "num_layers": 1,
        "num_heads": heads,
        "dim": width,
        "modulate_type": "torch",
        "cpu_offload": False,
        "parallel": False,
    }
    own = STOCK if scheme is None else {**OURS, "dit_quant_scheme": KEYS[scheme]}
    return {**base, **own, **more}


def weights(task: str, width: int, block: int = 0) -> dict[str, Tensor]:
    """Random bf16 weights of one block under LightX2V's names, as large as WAN's own initial ones."""
    found: dict[str, Tensor] = {}
    root = f"blocks.{block}"

    def linear(name: str, inputs: int, outputs: int) -> None:
        found[f"{root}.{name}.weight"] = torch.randn(outputs, inputs) * (2 / (inputs + outputs)) ** 0.5
        found[f"{root}.{name}.bias"] = torch.randn(outputs) * 0.1

    images = ("k_img", "v_img") if task == "i2v" else ()
    for attention, projections in (("self_attn", "qkvo"), ("cross_attn", (*"qkvo", *images))):
        for projection in projections:
            linear(f"{attention}.{projection}", width, width)
        for norm in ("norm_q", "norm_k", *(("norm_k_img",) if attention == "cross_attn" and images else ())):
            found[f"{root}.{attention}.{norm}.weight"] = 1 + torch.randn(width) * 0.1
    found[f"{root}.norm3.weight"] = 1 + torch.randn(width) * 0.1
    found[f"{root}.norm3.bias"] = torch.randn(width) * 0.1
    linear("ffn.0", width, 4 * width)
    linear("ffn.2", 4 * width, width)
    found[f"{root}.modulation"] = torch.randn(1, 6, width) * width**-0.5
    return {name: weight.bfloat16() for name, weight in found.items()}


def quantized(found: dict[str, Tensor], scheme: str) -> dict[str, Tensor]:
    """A checkpoint of a scheme: matrices as 8-bit numbers, with a scale for each output channel."""
    if scheme not in _BYTES:
        return dict(found)
    made = dict(found)
    for name, weight in found.items():
        if weight.ndim == 2:
            made[name], made[f"{name}_scale"] = functions.quantize_rows(weight, _BYTES[scheme])
    return made


class Block:
    """One block and what it is called with."""

    def __init__(
        self, config: dict[str, Any], checkpoint: dict[str, Tensor], index: int = 0, infer: Any = None
    ) -> None:
        made = importlib.import_module("lightx2v.models.networks.wan.weights.transformer_weights")
        runner = importlib.import_module("lightx2v.models.networks.wan.infer.transformer_infer")
        self.config = config
        self.weights = made.WanTransformerAttentionBlock(index, config["task"], config.get("dit_quant_scheme"), config)
        self.weights.load(dict(checkpoint))
        self.weights.to_cuda()
        self.infer = runner.WanTransformerInfer(config) if infer is None else infer
        self.infer.scheduler, self.infer.block_idx = None, index

    def __call__(self, inputs: Inputs, *, compiled: bool = False) -> Tensor:
        """What the block makes of copies of ``inputs``, in which it writes."""
        x = inputs.x.clone()
        rope = self.weights.compute_phases[0].rope
        self.infer.cos_sin = rope.prepare_freqs(inputs.frequencies, rotary_dim=inputs.frequencies.shape[-1] * 2)
        self.infer.rope_positions = rope.prepare_positions(self.infer.cos_sin)
        self.infer.reset_infer_states(x, inputs.context)
        before = SimpleNamespace(
            x=x, embed0=inputs.embedding, context=inputs.context, grid_sizes=None, adapter_args={"hints": []}
        )
        self.infer.use_compile = compiled
        with torch.no_grad():
            result: Tensor = self.infer.run_block(self.infer.block_idx, self.weights, x, before)
        return result


class Inputs:
    """Random inputs of a block. ``embedding``: of the time step."""

    def __init__(self, task: str, tokens: int, width: int) -> None:
        head = width // (12 if width == 1536 else 4)
        context = _TEXT_TOKENS + (_IMAGE_TOKENS if task == "i2v" else 0)
        self.x = torch.randn(tokens, width).bfloat16()
        self.context = torch.randn(context, width).bfloat16()
        self.frequencies = torch.polar(torch.ones(tokens, 1, head // 2), torch.rand(tokens, 1, head // 2) * 6)
        self.embedding = torch.empty(0)
        self.next_step(width)

    def next_step(self, width: int) -> None:
        """Another time step: other values of the same sizes."""
        self.embedding = (torch.randn(1, 6, width) * 0.3).bfloat16()


def apart(ours: Tensor, expected: Tensor) -> float:
    """The norm of the difference over the expected norm."""
    wide = expected.double()
    return float((ours.double() - wide).norm() / wide.norm())
