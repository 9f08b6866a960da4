"""What MkDocs calls while it builds the site: its files are the repository's pages and what they link to.

A page keeps its place in the repository, so a relative link leads to the same file in both. A page or a heading that is
not there is a warning of MkDocs', which `mkdocs build --strict` fails for; so is a linked file that is not there.
"""

from __future__ import annotations

import posixpath
import re
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

_LINK = re.compile(r"(?<!!)\[([^\]]*)\]\(([^)\s#]+)(#[^)\s]*)?\)")
_IMAGE = re.compile(r"!\[([^\]]*)\]\(([^)\s#]+)\)")
_CODE = re.compile(r"(```.*?```|`[^`\n]*`)", re.DOTALL)
_INNER_LIST = re.compile(r"^ {2,3}(?=[-*] |\d+\. )", re.MULTILINE)
_LIST_AFTER_TEXT = re.compile(r"^((?![-*] |\d+\. |[ |#]).+\n)(?=(?:- |\d+\. ))", re.MULTILINE)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Headings are named as GitHub names them, whose names the links have."""
    config.mdx_configs["toc"] = {"slugify": slug, "permalink": False}
    return config


def slug(heading: str, separator: str) -> str:
    """GitHub's name of a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", separator)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """The theme's files, every page of the repository, and every file that a page links to."""
    root = _root(config)
    for file in list(files.documentation_pages()):
        files.remove(file)
    pages = _tracked(root, "*.md")
    linked = sorted({target for name in pages for target in _targets(name, (root / name).read_text("utf-8"))})
    for name in pages + [name for name in linked if name not in pages and (root / name).is_file()]:
        files.append(File.generated(config, name, abs_src_path=str(root / name)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links to folders lead to their README, or are words where there is none. Lists are as GitHub reads them: with no
    empty line before them, and inner ones indented by two."""
    root, name = _root(config), page.file.src_uri

    def link(match: re.Match[str]) -> str:
        words, target, anchor = match[1], match[2], match[3] or ""
        path = posixpath.normpath(posixpath.join(posixpath.dirname(name), target))
        if "://" in target or not (root / path).is_dir():
            return match[0]
        readme = posixpath.join(target, "README.md")
        return f"[{words}]({readme}{anchor})" if (root / path / "README.md").is_file() else words

    parts = _CODE.split(markdown)  # at odd places code
    parts[0::2] = [_LINK.sub(link, part) for part in parts[0::2]]
    text = "".join(parts)
    blocks = re.split(r"(```.*?```)", text, flags=re.DOTALL)
    blocks[0::2] = [_LIST_AFTER_TEXT.sub(r"\1\n", _INNER_LIST.sub("    ", block)) for block in blocks[0::2]]
    return "".join(blocks)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """A bar in a table's code has a backslash before it in the source, which GitHub takes away."""
    return re.sub(r"<code>[^<]*</code>", lambda match: match[0].replace("\\|", "|"), html)


def _root(config: Mapping[str, Any]) -> Path:
    return Path(str(config["config_file_path"])).resolve().parent


def _tracked(root: Path, pattern: str) -> list[str]:
    """Pages that git has or would take: nothing that was built or installed."""
    command = ["git", "-C", str(root), "ls-files", "-z", "--cached", "--others", "--exclude-standard", pattern]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return sorted(
        {name for name in done.stdout.split("\0") if (root / name).is_file() and not name.startswith(".")} - {""}
    )


def _targets(name: str, text: str) -> Iterable[str]:
    """What a page links to or shows in the repository, as names from its root."""
    words = "".join(_CODE.split(text)[0::2])
    for pattern in (_LINK, _IMAGE):
        for match in pattern.finditer(words):
            if "://" not in match[2]:
                yield posixpath.normpath(posixpath.join(posixpath.dirname(name), match[2]))
