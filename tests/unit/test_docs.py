"""What the documents point at is there: files, folders and headings."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[2]
_LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")
_CODE = re.compile(r"```.*?```", re.DOTALL)


def _documents() -> Iterator[Path]:
    for path in sorted(_ROOT.rglob("*.md")):
        parts = path.relative_to(_ROOT).parts
        if not any(part.startswith(".") or part in ("build", "node_modules") for part in parts):
            yield path


def _anchors(path: Path) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", _CODE.sub("", path.read_text("utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken_links(path: Path) -> list[str]:
    found = []
    for link in _LINK.findall(_CODE.sub("", path.read_text("utf-8"))):
        target, _, anchor = link.partition("#")
        if "://" in target or target.startswith("mailto:"):
            continue
        place = (path.parent / target).resolve() if target else path
        if not place.exists() or (anchor and place.suffix == ".md" and anchor not in _anchors(place)):
            found.append(link)
    return found


@pytest.mark.parametrize("path", list(_documents()), ids=lambda path: str(path.relative_to(_ROOT)))
def test_links_lead_somewhere(path: Path) -> None:
    assert broken_links(path) == []


def test_a_broken_link_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# One\n[a](page.md#one) [b](page.md#two) [c](none.md) [d](#one) `[e](f)`\n```\n[g](h)\n```\n", "utf-8"
    )
    assert broken_links(page) == ["page.md#two", "none.md", "f"]
