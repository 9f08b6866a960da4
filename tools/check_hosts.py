"""Checks that no tracked file names a package registry: where packages come from is the installing machine's choice."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

_NAMES = (
    ("pypi", "org"),
    ("pythonhosted", "org"),
    ("pytorch", "org/whl"),
    ("anaconda", "org"),
    ("huggingface", "co"),
    ("ghcr", "io"),
    ("docker", "io"),
    ("quay", "io"),
    ("nvcr", "io"),
    ("nvidia", "com/compute"),
    ("resource.flagos", "net"),
    ("npmjs", "org"),
    ("crates", "io"),
)
_HOST = re.compile("|".join(re.escape(f"{name}.{domain}") for name, domain in _NAMES) + r"|--(extra-)?index-" + "url")


def main() -> int:
    """Prints each place that names a registry; 1 if there is one."""
    root = Path(__file__).resolve().parent.parent
    tracked = subprocess.run(["git", "-C", str(root), "ls-files", "-z"], capture_output=True, text=True, check=True)
    found = 0
    for name in filter(None, tracked.stdout.split("\0")):
        path = root / name
        if not path.is_file():
            continue
        for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), 1):
            if match := _HOST.search(line):
                print(f"{name}:{number}: names {match[0]}; leave the choice of registry to pip's own configuration")
                found += 1
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
