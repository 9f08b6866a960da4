"""Attention as the transformers library writes it out for PyTorch is one kernel of ours on an accelerator."""

from __future__ import annotations

import copy
import importlib
from typing import Any

import pytest
import torch

from flagos_backend.torch.compile.backend import flagos
from plugin_abi.host import Artifact, Context, Executable

transformers = pytest.importorskip("transformers", reason="the transformers library is not installed")

FLAGOS = torch.device("flagos")
B, H, K, T, D = 2, 4, 2, 40, 16
CAP = 1.5


def additive_mask(query: torch.Tensor) -> torch.Tensor:
    visible = torch.ones(T, T, dtype=torch.bool, device=query.device).tril()
    nothing = torch.zeros((), dtype=query.dtype, device=query.device)
    return torch.where(visible, nothing, torch.finfo(query.dtype).min)[None, None]


class Attention(torch.nn.Module):
    """eager_attention_forward of a model of the library, causal."""

    num_key_value_groups = H // K

    def __init__(self, name: str, options: dict[str, Any]) -> None:
        super().__init__()
        self.sinks = torch.nn.Parameter(torch.randn(H))
        self.compute = importlib.import_module(f"transformers.models.{name}.modeling_{name}").eager_attention_forward
        self.options = options

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return self.compute(self, q, k, v, additive_mask(q), scaling=0.3, **self.options)[0]


MODELS: dict[str, tuple[dict[str, Any], str]] = {
    "llama": ({}, "scale=0.3 upper=0"),
    "gemma2": ({"softcap": CAP}, f"scale=0.3 cap={CAP} upper=0"),
    "gpt_oss": ({}, "scale=0.3 sink=hy upper=0"),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_eager_attention_is_one_kernel(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Executable] = []
    original = Executable.compile

    def compile_(context: Context, program: bytes) -> Executable:
        made.append(original(context, program))
        return made[-1]

    monkeypatch.setattr(Executable, "compile", compile_)
    options, expected = MODELS[name]
    args = [torch.randn(B, heads, T, D).to(dtype) for heads in (H, K, K)]
    model = Attention(name, options).to(dtype).eval()
    exact = copy.deepcopy(model).double()(*(x.double() for x in args))
    torch.compiler.reset()
    with torch.no_grad():
        ours = torch.compile(model.to(FLAGOS), backend=flagos, fullgraph=True)(*(x.to(FLAGOS) for x in args)).cpu()
    precision = 1e-5 if dtype is torch.float32 else 1e-2
    torch.testing.assert_close(ours.double(), exact.detach(), rtol=precision, atol=precision)
    (program,) = made
    explanation = program.artifact(Artifact.EXPLANATION).decode()
    assert f"bhytd,bhsd,bhse->bthye {expected}" in explanation, explanation
    assert "triton.attention" in explanation, explanation
    assert f",{T},{T}]" not in explanation, explanation
