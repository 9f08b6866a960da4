"""Worker of the vLLM suite, in an environment that has vLLM. A test: a model generates greedily in one mode of
compiling, and what it says is compared with eager vLLM's."""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import json
import random
import sys
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
import vllm
from vllm.distributed.parallel_state import cleanup_dist_env_and_memory
from vllm.model_executor.model_loader import dummy_loader

from tools.conformance.records import Status
from tools.conformance.worker import serve

_STEPS: Final = 64
#: In float32.
ALLOWED: Final = 1e-4
_RANKED: Final = 5
#: Sizes of prompts: one token, odd ones, and more together than one step takes.
_PROMPTS: Final = (1, 3, 17, 40, 70)
_REPEATS: Final = 3
#: The mode in which it is vLLM's runner of models that calls torch.compile, not the model.
_STOCK: Final = 1
_SIZES: Final[dict[str, Any]] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "vocab_size": 512,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "float32",
}
_KINDS: Final[dict[str, dict[str, Any]]] = {
    "llama": {"architectures": ["LlamaForCausalLM"], "hidden_act": "silu"},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "hidden_act": "silu"},
    "mixtral": {
        "architectures": ["MixtralForCausalLM"],
        "hidden_act": "silu",
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    },
    "gemma": {
        "architectures": ["GemmaForCausalLM"],
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": "gelu_pytorch_tanh",
        "tie_word_embeddings": True,
    },
}


class NotApplicableError(Exception):
    """vLLM compiles nothing."""


@dataclass(frozen=True, slots=True)
class Generated:
    """``ranked``: the log-probabilities of the likeliest tokens of each step, by prompt. ``start``: seconds of the
    processor until the first answer was there; ``rate``: tokens in a second of it, later."""

    tokens: list[list[int]]
    ranked: list[list[dict[int, float]]]
    start: float
    rate: float


@contextlib.contextmanager
def _weights() -> Iterator[None]:
    """Dummy weights of a size that lets layers differ and attend: vLLM's own are near nothing, and alike by shape."""
    stock, seeds = dummy_loader.initialize_single_dummy_weight, itertools.count()
    dummy_loader.initialize_single_dummy_weight = lambda tensor: stock(tensor, -0.25, 0.25, next(seeds))
    try:
        yield
    finally:
        dummy_loader.initialize_single_dummy_weight = stock


def _generate(folder: Path, model: str, **configuration: Any) -> Generated:
    path = folder / model
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(_SIZES | {"model_type": model} | _KINDS[model]))
    torch._dynamo.reset()
    begin = time.process_time()
    limits = {"max_model_len": 256, "max_num_seqs": 8, "max_num_batched_tokens": 128, "enable_prefix_caching": False}
    with _weights():
        language_model = vllm.LLM(
            str(path),
            load_format="dummy",
            skip_tokenizer_init=True,
            dtype="float32",
            seed=0,
            **limits,
            **configuration,
        )
    tokens = random.Random(model)
    size = _SIZES["vocab_size"]
    prompts = [{"prompt_token_ids": [tokens.randrange(3, size) for _ in range(length)]} for length in _PROMPTS]
    asked = vllm.SamplingParams(temperature=0, max_tokens=_STEPS, ignore_eos=True, logprobs=_RANKED, detokenize=False)
    answers = [answer.outputs[0] for answer in language_model.generate(prompts, asked, use_tqdm=False)]
    start, least = time.process_time() - begin, float("inf")
    for _ in range(_REPEATS):
        begin = time.process_time()
        language_model.generate(prompts, asked, use_tqdm=False)
        least = min(least, time.process_time() - begin)
    del language_model
    gc.collect()
    cleanup_dist_env_and_memory()
    ranked = [[{t: entry.logprob for t, entry in step.items()} for step in answer.logprobs] for answer in answers]
    return Generated([list(answer.token_ids) for answer in answers], ranked, start, len(_PROMPTS) * _STEPS / least)


def _compare(ours: Generated, expected: Generated) -> None:
    for number, (mine, theirs) in enumerate(zip(ours.tokens, expected.tokens, strict=True)):
        if mine != theirs:
            step = next(n for n in range(_STEPS) if mine[n] != theirs[n])
            raise AssertionError(f"prompt {number} has other tokens from step {step} on")
    # A token of the last rank may be another where two are equal but for roundings.
    steps = zip(itertools.chain(*ours.ranked), itertools.chain(*expected.ranked), strict=True)
    apart = max(abs(mine[token] - theirs[token]) for mine, theirs in steps for token in mine.keys() & theirs.keys())
    if not apart <= ALLOWED:
        raise AssertionError(f"log-probabilities are {apart:.3g} apart, and {ALLOWED} allowed")
    said = set(itertools.chain(*expected.tokens))
    if len(said) < len(_PROMPTS):
        raise AssertionError(f"all prompts go on with {sorted(said)}, which compares nothing")


def _refuse_callbacks(mode: int, *, compiles: bool) -> None:
    from flagos_backend.frontends.torch.compile import report

    graphs = report.reports()
    if mode == _STOCK and not graphs:
        raise NotApplicableError("vLLM's runner of models on the CPU compiles nothing in mode 1, with any compiler")
    if compiles and not graphs:
        raise AssertionError("flagos compiled nothing")
    if called := [str(graph) for graph in graphs if graph.fallback]:
        raise AssertionError(f"operators are called back: {called}")


def _run(folder: Path, name: str) -> None:
    model, mode, which = name.split(" ", 2)
    flagos = which != "inductor"
    compilation: dict[str, Any] = {"mode": int(mode.removeprefix("mode-"))}
    if not flagos:
        compilation["backend"] = "inductor"
    expected = _eager(folder, model)
    if flagos:
        from flagos_backend.frontends.torch.compile import report

        report.clear()
    ours = _generate(folder, model, compilation_config=compilation)
    with (folder / "figures.jsonl").open("a") as file:
        measured = {"name": name, "start": ours.start, "rate": ours.rate, "eager rate": expected.rate}
        file.write(json.dumps(measured) + "\n")
    _compare(ours, expected)
    if flagos:
        _refuse_callbacks(compilation["mode"], compiles=which == "first start")


@functools.cache
def _eager(folder: Path, model: str) -> Generated:
    return _generate(folder, model, enforce_eager=True)


def main() -> None:
    folder = Path(sys.argv[1])

    def run(name: str) -> tuple[Status, str]:
        try:
            _run(folder, name)
        except NotApplicableError as error:
            return Status.NOT_APPLICABLE, str(error)
        except Exception as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            place = f"{Path(where.filename).name}:{where.lineno}"
            return Status.FAILED, f"{type(error).__name__}: {error} ({place})"[:1500]
        return Status.PASSED, ""

    serve(run, lambda: None)


if __name__ == "__main__":
    main()
