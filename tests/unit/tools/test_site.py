"""The documentation site: broken links stop it, and its pages need no network."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[3]


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """Pages of a small repository, with the site's configuration."""
    configuration = (_ROOT / "mkdocs.yml").read_text().partition("nav:\n  - ")[0]
    (tmp_path / "mkdocs.yml").write_text(configuration)
    for folder in ("tools", "docs", "folder/inner"):
        (tmp_path / folder).mkdir(parents=True)
    shutil.copy(_ROOT / "tools" / "site_hook.py", tmp_path / "tools")
    (tmp_path / "README.md").write_text("# Home\n\n[page](docs/page.md#what-is-it--why)\n")
    (tmp_path / "folder" / "README.md").write_text("# Folder\n\n[home](../README.md)\n")
    (tmp_path / "folder" / "code.py").write_text("answer = 42\n")
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    return tmp_path


def build(repository: Path, page: str) -> tuple[int, str]:
    """The exit status of a strict build with docs/page.md, and what it said."""
    (repository / "docs" / "page.md").write_text(page)
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(repository / "site")]
    done = subprocess.run(command, cwd=repository, capture_output=True, text=True, timeout=120)
    return done.returncode, done.stderr


def test_links_lead_where_they_lead_in_the_repository(repository: Path) -> None:
    links = "- [a](../folder/code.py)\n- [b](../folder) [c](../folder/inner) `[d](e)`\n"
    text = f"# Page\n## What is it, & why?\nNow:\n{links}  - inner\n\n| a |\n|---|\n| `b\\|c` |\n"
    status, said = build(repository, text)
    assert status == 0, said
    assert (repository / "site" / "folder" / "code.py").read_text() == "answer = 42\n"
    built = (repository / "site" / "docs" / "page.html").read_text()
    assert '<li><a href="../folder/code.py">a</a></li>' in built
    assert '<li><a href="../folder/index.html">b</a> c <code>[d](e)</code><ul>' in built
    assert "<li>inner</li>" in built
    assert "<td><code>b|c</code></td>" in built
    pages = [path.read_text() for path in (repository / "site").rglob("*.html")]
    assert len(pages) == 4  # with that of error 404
    for page in pages:
        loaded = re.findall(r"<(?:script|link|img|iframe)\b[^>]*(?:src|href)=\"([^\"]*)\"", page)
        assert loaded
        assert [name for name in loaded if "//" in name] == []
    for style in (repository / "site" / "css").glob("*.css"):
        assert not re.search(r"(?:url\(|@import)\s*[\"']?(?:https?:)?//", style.read_text())


def test_broken_links_stop_the_build(repository: Path) -> None:
    targets = ["none.md", "../folder/none.py", "../none/", "../none", "../README.md#none", "#none"]
    links = " ".join(f"[broken]({target})" for target in targets)
    status, said = build(repository, f"# What is it, & why?\n\n{links}\n")
    assert status != 0
    assert [target for target in targets if f" link '{target}'" not in said] == []


def test_the_home_page_has_to_find_its_heading(repository: Path) -> None:
    status, said = build(repository, "# Another heading\n")
    assert status != 0
    assert "#what-is-it--why" in said
