"""Prints what flagos and one of its extras require, a line each, from pyproject.toml: what pip can install before there
is a wheel.

    python tools/requirements.py EXTRA
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
#: How an extra names others of this project.
_OWN = re.compile(r"flagos\[([a-z,]+)\]")


def requirements(project: dict[str, Any], extra: str) -> list[str]:
    """Those of ``project``, the table of pyproject.toml, and of ``extra`` with the extras that it names, each once."""
    found = list(project["dependencies"])
    for line in project["optional-dependencies"][extra]:
        own = _OWN.fullmatch(line)
        found += [line] if own is None else [one for other in own[1].split(",") for one in requirements(project, other)]
    return list(dict.fromkeys(found))


def main() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    print(*requirements(project, sys.argv[1]), sep="\n")


if __name__ == "__main__":
    main()
