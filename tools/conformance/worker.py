"""What a worker process of a suite does: reads names of tests, answers each with a line of JSON. For worker_pool.py."""

from __future__ import annotations

import itertools
import json
import os
import sys
import time
from collections.abc import Callable

from tools.conformance.records import Status


def serve(run: Callable[[str], tuple[Status, str]], probe: Callable[[], object]) -> None:
    """Answers until there are no more names; ``run`` gives a test's status and, if it did not pass, why.

    ``probe`` computes something on the device, and raises where that is no longer possible: an accelerator that has
    faulted fails whatever this process asks of it from then on. The test before that is a crash, and the last.
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever is printed by a test must not look like an answer
    for line in sys.stdin:
        start = time.perf_counter()
        status, message = run(line.rstrip("\n"))
        lost = "" if status is Status.PASSED else _lost(probe)
        if lost:
            status, message = Status.CRASHED, f"{lost}\n{message}"
        seconds = round(time.perf_counter() - start, 3)
        answer = {"status": status, "message": message, "seconds": seconds, "last": bool(lost)}
        print(json.dumps(answer), file=answers, flush=True)
        if lost:
            os._exit(0)  # what would be cleaned up is on a device that does not answer


def _lost(probe: Callable[[], object]) -> str:
    try:
        probe()
    except Exception as error:  # in whatever words
        return f"the device is lost: {type(error).__name__}: {error}"[:500]
    return ""


def evenly(count: int, wanted: int) -> list[int]:
    """Up to ``wanted`` of the numbers below ``count``, evenly spread, the first among them."""
    step = max(count / wanted, 1)
    return [int(number * step) for number in itertools.takewhile(lambda n: n * step < count, range(wanted))]
