"""Parts of a page that programs write, between two marks."""

from __future__ import annotations

from pathlib import Path


def marks(name: str, writer: str) -> tuple[str, str]:
    """Those of the part ``name``; ``writer``: the command that writes it."""
    return f"<!-- {name}: written by {writer} -->", f"<!-- end of {name} -->"


def replace(page: Path, begin: str, end: str, part: str) -> None:
    """Writes ``part``, whole lines, between the marks of ``page``. ValueError without them."""
    text = page.read_text(encoding="utf-8")
    if begin not in text or end not in text:
        raise ValueError(f"{page} has no place for the figures; put the lines {begin!r} and {end!r} where they belong")
    before, _, rest = text.partition(begin)
    after = rest.partition(end)[2]
    page.write_text(f"{before}{begin}\n{part}{end}{after}", encoding="utf-8")
