"""What the FlagGems suite calls: the ATen operators that run while PyTorch's database of operators does, forward and
backward, on the host. Started by flaggems.py; writes the calls to a file and answers with the names of its cases."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import sys
import warnings
import zlib
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo.core import OpInfo, SampleInput
from torch.utils._pytree import tree_leaves

from flagos_backend.kernels.flaggems import loading
from tools.conformance.aten_calls import Call, Recorder, save
from tools.conformance.flaggems import case_name, prepare_device
from tools.conformance.worker import evenly

# The interpreter is slow, and kernels show on small arrays what they do wrong.
_LARGEST = 3000
# Inputs of the database, of each operator in each element type.
_INPUTS = 12


def main(path: str, device: str, seed: int, samples: int, operators: str) -> None:
    """``samples``: how many calls of each case are kept, at most. ``operators``: what names of the database contain."""
    prepare_device(device)
    torch.set_num_threads(1)  # of arrays this small others only wait
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever else is printed must not look like an answer
    names = functional()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        cases = cases_of(recorded(names, [op for op in op_db if operators in op.full_name], seed), samples)
    save(cases, path)
    reached = {call.name for calls in cases.values() for call in calls}
    print(json.dumps({"cases": list(cases), "unreached": sorted(names - reached)}), file=answers, flush=True)


def functional() -> set[str]:
    """What FlagGems has of operators that a program may call: those that write to their arguments become others."""
    return {name for name in loading.functions() if _is_functional(name)}


def _is_functional(name: str) -> bool:
    packet, _, overload = name.partition(".")
    schemas = torch._C._jit_get_schemas_for_operator(f"aten::{packet}")
    return any(schema.overload_name == overload and not schema.is_mutable for schema in schemas)


def recorded(names: set[str], operators: Sequence[OpInfo], seed: int) -> list[Call]:
    """Calls of ``names`` that inputs of ``operators`` come to, drawn from ``seed``."""
    recorder = Recorder(names, _LARGEST)
    for op in operators:
        for dtype in sorted(op.supported_dtypes("cpu"), key=str):
            _seed(zlib.crc32(f"{op.full_name} {dtype} {seed}".encode()))
            gradients = op.supports_autograd and dtype in op.supported_backward_dtypes("cpu")
            with contextlib.suppress(Exception):  # what the database or ATen refuses is no call
                # Its method of the name sets seeds of its own, and looks for a test in the stack.
                inputs = op.sample_inputs_func(op, "cpu", dtype, gradients)
                for sample in itertools.islice(inputs, _INPUTS):
                    with contextlib.suppress(Exception), recorder:
                        _run(op, sample)
    return list(recorder.calls.values())


def _seed(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def _run(op: OpInfo, sample: SampleInput) -> None:
    results = sample.output_process_fn_grad(op(sample.input, *sample.args, **sample.kwargs))
    wanted = _with_gradients((sample.input, sample.args, sample.kwargs))
    outputs = _with_gradients(results)
    if wanted and outputs:
        torch.autograd.grad(outputs, wanted, [torch.randn_like(y) for y in outputs], allow_unused=True)


def _with_gradients(values: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]


def cases_of(calls: Sequence[Call], samples: int) -> dict[str, list[Call]]:
    """Up to ``samples`` calls of each operator in each element type, evenly spread among those that there are."""
    cases: defaultdict[str, list[Call]] = defaultdict(list)
    for call in calls:
        cases[case_name(call.name, call.dtype)].append(call)
    return {name: [found[n] for n in evenly(len(found), samples)] for name, found in sorted(cases.items())}


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), sys.argv[5])
