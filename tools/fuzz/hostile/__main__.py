"""Command line of the fuzzer of hostile bytes."""

from __future__ import annotations

import argparse
import collections
import contextlib
import datetime
import importlib.metadata
import json
import os
import platform
import queue
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

from tools.fuzz.hostile.session import Account, Finding, Session
from tools.fuzz.hostile.worker import TARGETS

#: After how many inputs of a target the file of results is written: one that is ended early holds what was run.
_PART: Final = 10_000


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.fuzz.hostile", description=__doc__)
    parser.add_argument("targets", nargs="*", metavar="target", help=f"of {', '.join(TARGETS)}; all without")
    parser.add_argument("--seed", type=int, default=0, help="of the first input; the next has the next seed")
    parser.add_argument("--count", type=int, default=1000, help="inputs of each target (default: %(default)s)")
    parser.add_argument("--workers", type=int, default=1, help="processes that take inputs (default: %(default)s)")
    parser.add_argument("--more", action="store_true", help="go on where the run that --out has ended, up to the count")
    parser.add_argument("--show", action="store_true", help="write the input of the seed to the output, run nothing")
    parser.add_argument("--out", type=Path, help="write what came of them to this JSON file, beside what it holds")
    options = parser.parse_args()
    if unknown := sorted(set(options.targets) - set(TARGETS)):
        parser.error(f"no target {', '.join(unknown)}; they are {', '.join(TARGETS)}")
    if options.show:
        sys.stdout.buffer.write(TARGETS[options.targets[0]].input(options.seed))
        return 0
    failed = False
    with contextlib.ExitStack() as stack:
        sessions = [stack.enter_context(Session()) for _ in range(options.workers)]
        for name in options.targets or TARGETS:
            account, done, earlier = _begun(options.out, name, options.seed) if options.more else (Account(), 0, 0.0)
            began, seconds = time.perf_counter(), earlier
            for number, part in _accounts(sessions, name, options.seed + done, options.count - done):
                account.merge(part)
                done += number
                seconds = earlier + time.perf_counter() - began
                if options.out is not None:
                    _keep(options.out, name, options.seed, done, seconds, account)
            _print(name, done, seconds, account)
            failed |= bool(account.findings)
    return int(failed)


def _accounts(sessions: list[Session], name: str, seed: int, count: int) -> Iterator[tuple[int, Account]]:
    """How many inputs, and what came of them, in the order of the seeds."""
    free: queue.SimpleQueue[Session] = queue.SimpleQueue()
    for session in sessions:
        free.put(session)

    def run(start: int) -> tuple[int, Account]:
        session, number = free.get(), min(_PART, count - start)
        try:
            return number, session.run(name, seed + start, number)
        finally:
            free.put(session)

    with ThreadPoolExecutor(len(sessions)) as pool:
        yield from pool.map(run, range(0, count, _PART))


def _begun(path: Path, name: str, seed: int) -> tuple[Account, int, float]:
    """What came of the run from that seed which the file has, of how many inputs, in how many seconds."""
    kept: dict[str, Any] = json.loads(path.read_text("utf-8")).get(name, {}) if path.exists() else {}
    if kept.get("seed") != seed or kept["versions"] != _versions():
        return Account(), 0, 0.0
    most = kept["most for one input"]
    findings = [Finding(*finding) for finding in kept["findings"]]
    account = Account(collections.Counter(kept["outcomes"]), findings, most["CPU seconds"], most["megabytes"])
    return account, kept["inputs"], kept["seconds"]


def _versions() -> dict[str, str]:
    versions = {n: importlib.metadata.version(n) for n in ("torch", "numpy", "protobuf", "jaxlib")}
    return {"python": platform.python_version(), "glibc": platform.libc_ver()[1], **versions}


def _print(name: str, count: int, seconds: float, account: Account) -> None:
    print(
        f"{name}: {count} inputs in {seconds:.0f} s, the worst {account.seconds:.2f} s and {account.megabytes:.0f} MB"
    )
    print("  " + ", ".join(f"{n} {outcome}" for outcome, n in account.outcomes.most_common()))
    for finding in account.findings:
        print(f"  seed {finding.seed}: {finding.kind}: {finding.message}", flush=True)


def _keep(path: Path, name: str, seed: int, count: int, seconds: float, account: Account) -> None:
    kept = json.loads(path.read_text("utf-8")) if path.exists() else {}
    kept[name] = {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "command": f"python -m tools.fuzz.hostile {name!r} --seed {seed} --count {count}",
        "hardware": f"{os.cpu_count()} cores, {platform.machine()}",
        "versions": _versions(),
        "seed": seed,
        "inputs": count,
        "seconds": round(seconds),
        "most for one input": {"CPU seconds": round(account.seconds, 3), "megabytes": round(account.megabytes)},
        "outcomes": dict(account.outcomes.most_common()),
        "findings": [[f.seed, f.kind, f.message] for f in account.findings],
    }
    path.write_text(json.dumps(kept, indent=2) + "\n", "utf-8")


if __name__ == "__main__":
    raise SystemExit(main())
