"""Command line of the fuzzer of hostile bytes."""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import sys
import time
from pathlib import Path
from typing import Final

from tools.fuzz.hostile.session import Account, Session
from tools.fuzz.hostile.worker import TARGETS

#: After how many inputs of a target the file of results is written: one that is ended early holds what was run.
_PART: Final = 10_000


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.fuzz.hostile", description=__doc__)
    parser.add_argument("targets", nargs="*", metavar="target", help=f"of {', '.join(TARGETS)}; all without")
    parser.add_argument("--seed", type=int, default=0, help="of the first input; the next has the next seed")
    parser.add_argument("--count", type=int, default=1000, help="inputs of each target (default: %(default)s)")
    parser.add_argument("--show", action="store_true", help="write the input of the seed to the output, run nothing")
    parser.add_argument("--out", type=Path, help="write what came of them to this JSON file, beside what it holds")
    options = parser.parse_args()
    if unknown := sorted(set(options.targets) - set(TARGETS)):
        parser.error(f"no target {', '.join(unknown)}; they are {', '.join(TARGETS)}")
    if options.show:
        sys.stdout.buffer.write(TARGETS[options.targets[0]].input(options.seed))
        return 0
    failed = False
    with Session() as session:
        for name in options.targets or TARGETS:
            began, account, done = time.perf_counter(), Account(), 0
            while done < options.count:
                part = min(_PART, options.count - done)
                account.merge(session.run(name, options.seed + done, part))
                done += part
                seconds = time.perf_counter() - began
                if options.out is not None:
                    _keep(options.out, name, options.seed, done, seconds, account)
            _print(name, options.count, seconds, account)
            failed |= bool(account.findings)
    return int(failed)


def _print(name: str, count: int, seconds: float, account: Account) -> None:
    print(
        f"{name}: {count} inputs in {seconds:.0f} s, the worst {account.seconds:.2f} s and {account.megabytes:.0f} MB"
    )
    print("  " + ", ".join(f"{n} {outcome}" for outcome, n in account.outcomes.most_common()))
    for finding in account.findings:
        print(f"  seed {finding.seed}: {finding.kind}: {finding.message}", flush=True)


def _keep(path: Path, name: str, seed: int, count: int, seconds: float, account: Account) -> None:
    kept = json.loads(path.read_text("utf-8")) if path.exists() else {}
    versions = {n: importlib.metadata.version(n) for n in ("torch", "numpy", "protobuf", "jaxlib")}
    kept[name] = {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "command": f"python -m tools.fuzz.hostile {name!r} --seed {seed} --count {count}",
        "hardware": f"{os.cpu_count()} cores, {platform.machine()}",
        "versions": {"python": platform.python_version(), "glibc": platform.libc_ver()[1], **versions},
        "inputs": count,
        "seconds": round(seconds),
        "most for one input": {"CPU seconds": round(account.seconds, 3), "megabytes": round(account.megabytes)},
        "outcomes": dict(account.outcomes.most_common()),
        "findings": [[f.seed, f.kind, f.message] for f in account.findings],
    }
    path.write_text(json.dumps(kept, indent=2) + "\n", "utf-8")


if __name__ == "__main__":
    raise SystemExit(main())
