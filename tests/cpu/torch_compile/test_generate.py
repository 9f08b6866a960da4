"""Generation of the transformers library with a static cache, compiled step by step: tokens as eager gives them, and
nothing is compiled after the first two steps, for the next prompt of the same size neither."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flagos_backend.frontends.torch.compile import report

transformers = pytest.importorskip("transformers", reason="the transformers library is not installed")

SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "vocab_size": 100,
}
STEPS = 12


class Counts:
    """A streamer, which is called after each token: how many graphs Dynamo made, and we compiled, until then."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, int]] = []

    def put(self, value: torch.Tensor) -> None:
        self.seen.append((torch._dynamo.utils.counters["stats"]["unique_graphs"], len(report.reports())))

    def end(self) -> None:
        pass


def compiling() -> Any:
    config = transformers.CompileConfig(backend="flagos", mode="default")
    config._compile_all_devices = True  # the library compiles for accelerators that it knows only, unless told
    return config


def llama() -> torch.nn.Module:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))


def qwen3() -> torch.nn.Module:
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SIZES, head_dim=8))


@pytest.mark.parametrize("make", [llama, qwen3])
def test_nothing_is_compiled_after_two_steps(make: Any) -> None:
    torch._dynamo.utils.counters.clear()
    model = make().eval()
    asked = {"do_sample": False, "max_new_tokens": STEPS, "min_new_tokens": STEPS, "pad_token_id": 0}
    compiled = {"cache_implementation": "static", "compile_config": compiling()}
    made = []
    for _ in range(2):
        prompt, counts = torch.randint(3, 100, (1, 7)), Counts()
        expected = model.generate(prompt, **asked)
        assert torch.equal(model.generate(prompt, **asked, **compiled, streamer=counts), expected)
        assert len(counts.seen) == STEPS + 1  # the prompt comes first
        made.append(counts.seen)
    (_, _, _, after_two, *later), again = made
    assert after_two[0] >= 1 and after_two[1] >= 1
    assert {*later, *again} == {after_two}
