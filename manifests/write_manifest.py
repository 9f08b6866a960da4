"""Describes a built library in a manifest: the template beside this file, the build's facts, the library's own facts.

The build runs it after linking. It needs nothing but the standard library and the source tree that it lies in.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from plugin_abi.elf import ElfFile
from plugin_abi.elf_format import ElfError
from plugin_abi.errors import Refusal
from plugin_abi.libraries import Resolution, current_linker, resolve
from plugin_abi.manifest import parse_manifest
from plugin_abi.policy import load_time_code

TEMPLATE = Path(__file__).resolve().parent / "flagos.json.in"
HEADER = Path(__file__).resolve().parents[1] / "plugin_abi" / "include" / "flagos" / "plugin_abi.h"
_PLACEHOLDER = re.compile(r"@([A-Z0-9_]+)@")


def abi_version(header: str) -> str:
    """The plugin ABI of a header's text, as manifests write it."""
    numbers = dict(re.findall(r"^#define FLAGOS_ABI_(MAJOR|MINOR) ([0-9]+)$", header, re.MULTILINE))
    return f"{numbers['MAJOR']}.{numbers['MINOR']}"


def variables(facts: dict[str, str | int], library: Path, output: Path) -> dict[str, str]:
    """What the template's placeholders stand for; manifests/README.md lists them."""
    data = library.read_bytes()
    elf = ElfFile(data)
    # Of another machine's libraries this one cannot say where they will be found.
    here = elf.machine == os.uname().machine
    dependencies = resolve(elf, library, current_linker()) if here else Resolution({}, ())
    version = abi_version(HEADER.read_text(encoding="utf-8"))
    path = os.path.relpath(library.resolve(), output.resolve().parent)
    return {
        "VERSION": str(facts["version"]),
        # A bare name would be the dynamic linker's to find.
        "LIBRARY_PATH": path if "/" in path else f"./{path}",
        "LIBRARY_ARCH": elf.machine,
        "ABI_MIN": version,
        "ABI_MAX": version,
        "GIT_REVISION": str(facts["git_revision"]),
        "COMPILER": str(facts["compiler"]),
        "CXX11_ABI": {1: "true", 0: "false", -1: "null"}[int(facts["cxx11_abi"])],
        "GLIBC": str(facts["glibc"]),
        "SHA256": hashlib.sha256(data).hexdigest(),
        "STATIC_INITIALIZERS": str(len(load_time_code(elf, dependencies))),
    }


def render(template: str, values: dict[str, str]) -> str:
    """Fill a template in. Raises SystemExit for a placeholder that has no value."""

    def value(match: re.Match[str]) -> str:
        if match[1] not in values:
            known = ", ".join(sorted(values))
            raise SystemExit(f"write_manifest: the template names @{match[1]}@; known are {known}")
        return values[match[1]]

    manifest = json.loads(_PLACEHOLDER.sub(value, template))
    if not manifest["built_with"].get("git_revision"):
        # A tree that equals no commit has no revision to state.
        manifest["built_with"].pop("git_revision", None)
    return json.dumps(manifest, indent=2) + "\n"


def main() -> int:
    """Command line; see CMakeLists.txt."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--template", type=Path, default=TEMPLATE)
    parser.add_argument("--facts", type=Path, required=True, help="JSON of tools/build_facts.py")
    parser.add_argument("--library", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    facts = json.loads(options.facts.read_text(encoding="utf-8"))
    try:
        values = variables(facts, options.library, options.output)
    except ElfError as error:
        raise SystemExit(f"write_manifest: {options.library} is no library: {error}; build it again") from error
    text = render(options.template.read_text(encoding="utf-8"), values)
    checked = parse_manifest(text.encode(), options.output)
    if isinstance(checked, Refusal):
        raise SystemExit(f"write_manifest: the result is no valid manifest: {checked}")
    options.output.parent.mkdir(parents=True, exist_ok=True)
    # Renamed into place: a process that starts meanwhile reads the old file or the new one, never half of one.
    temporary = options.output.with_suffix(".tmp")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(options.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
