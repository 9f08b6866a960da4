"""What the environment of the tests is installed from, before there is a wheel."""

from __future__ import annotations

import tomllib

import pytest

from tools.requirements import ROOT, requirements

PROJECT = {
    "dependencies": ["a>=1", "b"],
    "optional-dependencies": {"one": ["c"], "two": ["flagos[one]", "d>=2,<3"], "all": ["flagos[one,two]", "b", "e"]},
}


@pytest.mark.parametrize(
    ("extra", "expected"),
    [
        ("one", ["a>=1", "b", "c"]),
        ("two", ["a>=1", "b", "c", "d>=2,<3"]),
        ("all", ["a>=1", "b", "c", "d>=2,<3", "e"]),
    ],
)
def test_an_extra_brings_those_that_it_names(extra: str, expected: list[str]) -> None:
    assert requirements(PROJECT, extra) == expected


def test_nothing_of_this_project_is_left_to_be_found() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for extra, lines in project["optional-dependencies"].items():
        found = requirements(project, extra)
        assert not any(line.startswith("flagos") for line in found)
        assert set(project["dependencies"]) <= set(found)
        assert {line for line in lines if not line.startswith("flagos[")} <= set(found)
