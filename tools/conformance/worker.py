"""What a worker process of a suite does: reads names of tests, answers each with a line of JSON. For worker_pool.py."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable

from tools.conformance.results import Status


def serve(run: Callable[[str], tuple[Status, str]]) -> None:
    """Answers until there are no more names; ``run`` gives a test's status and, if it did not pass, why."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever is printed by a test must not look like an answer
    for line in sys.stdin:
        start = time.perf_counter()
        status, message = run(line.rstrip("\n"))
        seconds = round(time.perf_counter() - start, 3)
        print(json.dumps({"status": status, "message": message, "seconds": seconds}), file=answers, flush=True)
