"""Worker process: gives a target its inputs and measures each. What ends it is one finding; the session starts another.

A request is a line of JSON, {"target", "seed", "count"} or {"target", "hex"}; so is the answer, an Account.
"""

from __future__ import annotations

import collections
import faulthandler
import gc
import json
import os
import resource
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any, Final

from tools.fuzz.hostile import compiling, loading
from tools.fuzz.hostile.target import ACCEPTED, Target

TARGETS: Final = {target.name: target for target in (*loading.TARGETS, *compiling.TARGETS)}
#: After how many inputs the valid ones are taken again.
_BETWEEN: Final = 250
#: What an input may take of the address space before the system refuses it: far above every bound.
_ADDRESSES: Final = 6 << 30


class _Meter:
    """CPU time and memory of this process, input by input. One that takes far too long ends the process."""

    def __init__(self) -> None:
        # "5" makes the peak of the resident memory the present one (proc(5)).
        self._reset = os.open("/proc/self/clear_refs", os.O_WRONLY)
        faulthandler.enable()
        faulthandler.register(signal.SIGPROF, all_threads=True, chain=True)
        self.seconds = self.kilobytes = 0.0

    def start(self, target: Target) -> None:
        os.write(self._reset, b"5")
        self._resident = _peak()
        signal.setitimer(signal.ITIMER_PROF, 3 * target.seconds)
        self._began = time.process_time()

    def stop(self) -> None:
        self.seconds = time.process_time() - self._began
        signal.setitimer(signal.ITIMER_PROF, 0)
        self.kilobytes = _peak() - self._resident


def _peak() -> int:
    """Resident memory at its peak, in KiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _describe(error: BaseException) -> str:
    """Its last calls, each line no longer than a line."""
    lines = "".join(traceback.format_exception(error, limit=-5)).splitlines()
    return "\n".join(line[:160] for line in lines if not line.strip().startswith("^"))


class _Judge:
    """Takes inputs and writes down what was wrong. `place`: where the number of the present one is left."""

    def __init__(self, place: Path) -> None:
        self._place = os.open(place, os.O_WRONLY | os.O_CREAT)
        self._meter = _Meter()
        self._ready: set[str] = set()

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        target = TARGETS[request["target"]]
        account: dict[str, Any] = {"outcomes": collections.Counter(), "findings": [], "seconds": 0.0, "megabytes": 0.0}
        self._prepare(target)
        if "hex" in request:
            self._take(target, bytes.fromhex(request["hex"]), 0, account)
        for number in range(request.get("count", 0)):
            seed = request["seed"] + number
            os.pwrite(self._place, seed.to_bytes(8, "little"), 0)
            self._take(target, target.input(seed), seed, account)
            if number % _BETWEEN == _BETWEEN - 1:
                self._take_valid(target, seed, account)
        self._take_valid(target, request.get("seed", 0) + request.get("count", 1) - 1, account)
        return account

    def _prepare(self, target: Target) -> None:
        """What a first use of the code costs is not what an input costs."""
        if target.name in self._ready:
            return
        for data in target.valid():
            outcome = target.take(data)
            assert outcome == ACCEPTED, f"a valid input of {target.name} is refused: {outcome}"
        self._ready.add(target.name)
        _limit_addresses()

    def _take(self, target: Target, data: bytes, seed: int, account: dict[str, Any]) -> None:
        finding, outcome = None, ""
        self._meter.start(target)
        try:
            outcome = target.take(data)
        except Exception as error:
            finding = "raised", _describe(error)
        self._meter.stop()
        megabytes = self._meter.kilobytes / 1024
        if finding is None and self._meter.seconds > target.seconds:
            finding = "slow", f"{self._meter.seconds:.1f} s of CPU time, more than {target.seconds}: {outcome}"
        if finding is None and megabytes > target.megabytes:
            finding = "large", f"{megabytes:.0f} MB, more than {target.megabytes}: {outcome}"
        account["seconds"] = max(account["seconds"], self._meter.seconds)
        account["megabytes"] = max(account["megabytes"], megabytes)
        if finding is None:
            account["outcomes"][outcome] += 1
        else:
            account["findings"].append([seed, *finding])

    def _take_valid(self, target: Target, seed: int, account: dict[str, Any]) -> None:
        """Inputs before have changed nothing: a valid one is taken as ever."""
        data = target.valid()[seed % len(target.valid())]
        try:
            outcome = target.take(data)
        except Exception as error:
            outcome = _describe(error)
        if outcome != ACCEPTED:
            account["findings"].append([seed, "afterwards", f"a valid input is refused: {outcome}"])
        gc.collect()


def _limit_addresses() -> None:
    pages = int(Path("/proc/self/statm").read_text("ascii").split()[0])
    most = pages * resource.getpagesize() + _ADDRESSES
    resource.setrlimit(resource.RLIMIT_AS, (most, resource.getrlimit(resource.RLIMIT_AS)[1]))


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever is printed must not look like an answer
    judge = _Judge(Path(sys.argv[1]))
    for line in sys.stdin:
        print(json.dumps(judge.answer(json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    main()
