"""The list of tests that cannot run isolated names tests that are there, each with its cause."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from support import not_isolated

ROOT = not_isolated.FILE.parents[1]


@pytest.mark.parametrize(("name", "cause"), list(not_isolated.entries().items()))
def test_an_entry_names_a_test_and_gives_a_cause(name: str, cause: str) -> None:
    file, _, test = name.partition("::")
    functions = {node.name for node in ast.parse((ROOT / file).read_text()).body if isinstance(node, ast.FunctionDef)}
    assert test.partition("[")[0] in functions
    assert cause.strip()


def test_an_entry_holds_for_all_parameters_unless_it_names_some(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        not_isolated, "_left_out", lambda: {"tests/a.py::test_x": "all", "tests/a.py::test_y[1]": "one"}
    )
    causes = [not_isolated.cause_of(Path("a.py"), test) for test in ("test_x", "test_x[2]", "test_y[1]", "test_y[2]")]
    assert causes == ["all", "all", "one", None]
