"""The demo's PyTorch part: trains a small GPT-2 of the transformers library with torch.compile(backend="flagos") and
with PyTorch's own CPU in one process. Run through tools/demo. Exits with 1 if a loss does not fall or the curves part.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import transformers

import gpt2
from demo_report import Training, compare, conclude
from flagos_backend.frontends.torch.compile.report import reports

TOLERANCE = 1e-3
"""Largest difference of the two losses: kernels that sum in another order part a little, and AdamW spreads that."""

WARMUP = 20
"""Steps until the learning rate is the whole one."""

FALL = 1.0
"""The loss must fall by this much, in nats per byte; it starts near ln 256 = 5.5."""


def model(config: gpt2.Config) -> torch.nn.Module:
    """GPT-2 with random weights and dropout, over bytes."""
    torch.manual_seed(0)
    tokens = {"vocab_size": config.vocabulary, "bos_token_id": 0, "eos_token_id": 0}
    sizes = {"n_embd": config.width, "n_layer": config.layers, "n_head": config.heads, "n_positions": config.context}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**tokens, **sizes)).train()


def train(module: torch.nn.Module, call: Callable[..., Any], batches: Sequence[np.ndarray]) -> Training:
    """One step of AdamW for each batch; the first one compiles, where there is anything to compile.

    As GPT-2 is trained, slowly at first and with clipped gradients: without, rounding alone parts the losses, PyTorch's
    own in float32 from float64 by up to 5e-2.
    """
    optimizer = torch.optim.AdamW(module.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=1 / WARMUP, total_iters=WARMUP)
    losses, times = [], []
    torch.manual_seed(1)
    for batch in batches:
        tokens = torch.from_numpy(batch).long()
        began = time.perf_counter()
        loss = call(input_ids=tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        times.append(time.perf_counter() - began)
    step = statistics.median(times[1:])
    return Training(np.array(losses), max(times[0] - step, 0.0), step)


def show_programs() -> None:
    """Prints what each graph became."""
    for report in reports():
        rest = report.fallback + report.outside
        print(
            f"  {report.name}: {report.lowered.total()} nodes lowered to HLO, {report.whole.total()} left whole"
            f" ({_most(report.whole)}), {rest.total()} without a lowering{f' ({_most(rest)})' if rest else ''}"
        )


def _most(counts: Counter[str]) -> str:
    names = [f"{count} {name.removeprefix('aten.').removesuffix('.default')}" for name, count in counts.most_common(4)]
    return ", ".join([*names, "..."] if len(counts) > 4 else names)


def main() -> int:
    """Runs the demo; 1 if anything is not as it should be."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=40)
    options = parser.parse_args()
    config = gpt2.Config(layers=3, width=128, context=128, batch=8)
    batches = [batch[:, :-1] for batch in gpt2.batches(config, options.steps)]
    module = model(config)
    twin = copy.deepcopy(module)
    parameters = sum(parameter.numel() for parameter in module.parameters())
    print(
        f"{type(module).__name__}, {config.layers} layers, width {config.width}, {parameters} parameters, dropout; "
        f"{options.steps} steps of {config.batch} × {config.context} bytes\n"
        f"transformers {transformers.__version__}, torch {torch.__version__}"
    )
    ours = train(module, torch.compile(module, backend="flagos"), batches)
    theirs = train(twin, twin, batches)
    theirs = Training(theirs.losses, 0.0, theirs.step_time)  # eager compiles nothing: its first step is just slower
    problems = compare(ours, theirs, "PyTorch CPU", fall=FALL, tolerance=TOLERANCE)
    print("What its graphs became on flagos (flagos_backend.frontends.torch.compile.report):")
    show_programs()
    return conclude(problems)


if __name__ == "__main__":
    sys.exit(main())
