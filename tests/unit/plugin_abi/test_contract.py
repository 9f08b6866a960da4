"""CONTRACT.md: numbered without gaps, and every duty has a consequence and tests that exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from plugin_abi.errors import RefusalCode

ROOT = Path(__file__).parents[3]
TEXT = (ROOT / "plugin_abi" / "CONTRACT.md").read_text("utf-8")
DUTIES = re.findall(r"^### ([BL]\d+)\. (.*)\n((?:(?!^##).*\n)*)", TEXT, re.MULTILINE)


def _tests(path: str) -> set[str]:
    tree = ast.parse((ROOT / path).read_text("utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("side", ["B", "L"])
def test_duties_are_numbered_without_gaps(side: str) -> None:
    numbers = [int(name[1:]) for name, _, _ in DUTIES if name[0] == side]
    assert numbers == list(range(1, len(numbers) + 1)) and len(numbers) > 10


@pytest.mark.parametrize(
    ("name", "body"), [(name, body) for name, _, body in DUTIES], ids=[name for name, *_ in DUTIES]
)
def test_every_duty_has_a_consequence_and_tests_that_exist(name: str, body: str) -> None:
    assert len(re.findall(r"^- Otherwise: \S", body, re.MULTILINE)) == 1
    (line,) = re.findall(r"^- Tests: (.*)$", body, re.MULTILINE)
    named = re.findall(r"`([^`:]+)::([^`]+)`", line)
    assert named and line.count("`") == 2 * len(named)
    for path, test in named:
        assert test in _tests(path), f"{name} names {path}::{test}, which does not exist"


def test_every_code_that_the_contract_names_exists() -> None:
    named = {code for group in re.findall(r"refused \(([A-Z0-9_, ]+)\)", TEXT) for code in group.split(", ")}
    assert len(named) > 10 and named <= {code.name for code in RefusalCode}
