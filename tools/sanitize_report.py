"""Judges the logs of sanitizers: every finding counts, but for memory that other libraries allocated and kept.

A C host never tears its interpreter down, so what Python and torch allocate for good is reported as leaked. A leak is
ours if our code called the allocator: the first frame that is not the allocator's lies in our library or the host.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

_OURS = re.compile(r"flagos_backend/native/|tests/cpu/native/|libflagos_backend\.so")
_ALLOCATOR = re.compile(r"__interceptor_|operator new|/libsanitizer/|libasan\.so|std::|/include/c\+\+/")
_FRAME = re.compile(r"^\s+#\d+ 0x[0-9a-f]+ (.*)$", re.MULTILINE)
_FINDING = re.compile(
    r"ERROR: (Address|Undefined)|WARNING: ThreadSanitizer|runtime error:|ThreadSanitizer:DEADLYSIGNAL"
)
_LEAKS = "ERROR: LeakSanitizer"


def leaks(log: str) -> Iterator[str]:
    """The leaks of a log whose memory our own code allocated."""
    for block in log.partition(_LEAKS)[2].split("\n\n"):
        if re.search(r"^(Direct|Indirect) leak of", block, re.MULTILINE):
            caller = next((frame for frame in _FRAME.findall(block) if not _ALLOCATOR.search(frame)), "")
            if _OURS.search(caller):
                yield block.strip()


def findings(log: str) -> Iterator[str]:
    """Everything in a log that counts."""
    before_leaks = log.partition(_LEAKS)[0]
    if _FINDING.search(before_leaks):
        yield before_leaks.strip()
    yield from leaks(log)


def main() -> int:
    """Prints what counts in the logs that are named; 1 if there is anything."""
    found = [
        finding
        for path in map(Path, sys.argv[1:])
        if path.is_file()
        for finding in findings(path.read_text(encoding="utf-8", errors="replace"))
    ]
    print("\n\n".join(found) or "  no finding")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
