"""docs/errors.md, from the two catalogues of errors and nothing else: python -m tools.errors_page"""

from __future__ import annotations

import importlib
from pathlib import Path

from flagos_backend import errors
from flagos_backend.errors import CATALOGUE
from plugin_abi.errors import RefusalCode

PAGE = Path(__file__).resolve().parents[1] / "docs" / "errors.md"

_HEAD = """# Errors

<!-- Written by tools.errors_page from flagos_backend/errors.py and plugin_abi/errors.py; a test compares them. -->

Every message has its number, FLAGOS-NNN, and states what is so, where, and what to do. Words in braces are the facts of
the case.

## Errors of the backend

A program was not compiled or did not run. The framework raises its own kind of error, by the status code.
"""
_STAGES = (
    "The graph format and the importer",
    "The IR and its passes",
    "Kernels",
    "The runtime",
    "Collectives",
    "Front ends",
)
_REFUSALS = """## Refusals

A manifest or its library is not used: one line of warning, and the process goes on as if the backend were not there.
`flagos doctor` shows them all, `flagos check FILE` one. Until November 2026 they were written F100 to F506.
"""
_GROUPS = ("Manifests and the choice among them", "The library file", "The ABI", "The running frameworks", "The load")


def page() -> str:
    """The text of the page."""
    package = Path(errors.__file__).parent
    for path in sorted(package.rglob("errors.py")):  # each adds its own to the catalogue
        importlib.import_module(".".join(path.relative_to(package.parent).with_suffix("").parts))
    lines = [_HEAD]
    stage = 0
    for number, kind in sorted(CATALOGUE.items()):
        if number // 100 > stage:
            stage = number // 100
            lines.append(f"### {_STAGES[stage - 1]}\n")
        lines.append(f"#### FLAGOS-{number} {kind.__name__}\n\n{kind.code.name}. {kind.template}\n")
    lines.append(_REFUSALS)
    group = 0
    for code in RefusalCode:
        if code // 100 - 10 > group:
            group = code // 100 - 10
            lines.append(f"### {_GROUPS[group - 1]}\n")
        lines.append(f"#### FLAGOS-{int(code)} {code.name}\n\n{_sentence(code.meaning)} {_sentence(code.cure)}\n")
    return "\n".join(lines)


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
