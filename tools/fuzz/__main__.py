"""Command line of the fuzzer."""

from __future__ import annotations

import argparse
import collections
import datetime
import importlib.metadata
import json
import os
import platform
import sys
import time
from pathlib import Path

from flagos_backend.importer.export import export_module
from flagos_backend.ir.hlo import Module
from tools.fuzz.program import random_program
from tools.fuzz.session import Session
from tools.fuzz.shrink import Shrinker
from tools.fuzz.verdict import Kind, Verdict


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.fuzz", description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="of the first program; the next has the next seed")
    parser.add_argument("--count", type=int, default=100, help="programs (default: %(default)s)")
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds before a program counts as hung")
    parser.add_argument("--no-shrink", action="store_true", help="report failures as they are")
    parser.add_argument("--out", type=Path, help="write the counts and what failed to this JSON file")
    options = parser.parse_args()
    session = Session(options.timeout)
    kinds: collections.Counter[Kind] = collections.Counter()
    failures: list[dict[str, object]] = []
    began = time.perf_counter()
    for number in range(options.count):
        seed = options.seed + number
        verdict = session.judge_seed(seed)
        kinds[verdict.kind] += 1
        if verdict.is_failure:
            failures.append({"seed": seed, "kind": verdict.kind, "message": verdict.message})
            _report(seed, verdict, session, shrink=not options.no_shrink)
        if sys.stderr.isatty():
            print(f"\r{number + 1} of {options.count}, {len(failures)} failed", end="", file=sys.stderr, flush=True)
    session.close()
    seconds = time.perf_counter() - began
    print(
        f"{options.count} programs in {seconds:.0f} s: " + ", ".join(f"{n} {kind}" for kind, n in kinds.most_common())
    )
    if options.out is not None:
        result = {**_origin(), "seconds": round(seconds), "verdicts": kinds, "failures": failures}
        options.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return 1 if failures else 0


def _report(seed: int, verdict: Verdict, session: Session, *, shrink: bool) -> None:
    print(f"seed {seed}: {verdict.kind}: {verdict.message}", flush=True)
    program = random_program(seed)
    module = program.module
    if shrink:
        module = Shrinker(session, seed, verdict.kind).shrink(program.blocks)
        print(f"smallest form: {session.judge_module(module, seed).message}")
    print(_text(module), flush=True)


def _text(module: Module) -> str:
    """HLO as XLA prints it, which its parser reads again."""
    from jaxlib import _hlo  # type: ignore[attr-defined]

    return str(_hlo.HloModule.from_serialized_hlo_module_proto(export_module(module)).to_string())


def _origin() -> dict[str, object]:
    names = ("jax", "jaxlib", "torch", "numpy")
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "command": " ".join(["python -m tools.fuzz", *sys.argv[1:]]),
        "hardware": f"{os.cpu_count()} cores, {platform.machine()}",
        "versions": {"python": platform.python_version()} | {n: importlib.metadata.version(n) for n in names},
    }


if __name__ == "__main__":
    raise SystemExit(main())
