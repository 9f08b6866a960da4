"""Worker process of the fuzzer: reads programs, judges each, answers in JSON. A crash of either engine ends only it."""

from __future__ import annotations

import base64
import json
import os
import sys

import jax

from flagos_backend.importer import import_module
from tools.fuzz.program import arguments_of, random_program, replayed_program
from tools.fuzz.verdict import Judge


def main() -> None:
    """A request is a seed, or ``blocks`` or ``hlo`` (base64) with a seed for the arguments."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever an engine prints must not look like an answer
    jax.config.update("jax_platforms", "cpu")
    judge = Judge()
    for line in sys.stdin:
        request = json.loads(line)
        seed = request["seed"]
        if "hlo" in request:
            module = import_module(base64.b64decode(request["hlo"]))
        elif "blocks" in request:
            module = replayed_program(tuple(map(tuple, request["blocks"])), seed).module
        else:
            module = random_program(seed).module
        verdict = judge.judge(module, arguments_of(module, seed))
        print(json.dumps({"kind": verdict.kind, "message": verdict.message}), file=answers, flush=True)


if __name__ == "__main__":
    main()
