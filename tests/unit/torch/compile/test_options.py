"""mode= and options= of torch.compile: what is known, and what is refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from flagos_backend.frontends.torch.compile.errors import UnknownOption
from flagos_backend.frontends.torch.compile.options import MODES, CompileOptions, Fallback, read_options


def test_nothing_given_is_the_default() -> None:
    assert read_options(None, None) == read_options("default", {}) == CompileOptions()


@pytest.mark.parametrize("mode", MODES)
def test_pytorchs_modes(mode: str) -> None:
    assert read_options(mode, None) == CompileOptions()


def test_values() -> None:
    given = read_options(None, {"fallback": "error", "max_specializations": 3, "excess_precision": True})
    assert given == CompileOptions(Fallback.ERROR, 3, excess_precision=True)


@pytest.mark.parametrize(
    ("mode", "options", "named"),
    [
        ("fast", None, "'fast'"),
        (None, {"fallbak": "error"}, "'fallbak'"),
        (None, {"fallback": "never"}, "'never'"),
        (None, {"max_specializations": 0}, "max_specializations = 0"),
        (None, {"max_specializations": True}, "max_specializations = True"),
        (None, {"max_specializations": "3"}, "max_specializations = '3'"),
        (None, {"excess_precision": 1}, "excess_precision = 1"),
    ],
    ids=str,
)
def test_unknown_ones(mode: str | None, options: dict[str, Any] | None, named: str) -> None:
    with pytest.raises(UnknownOption) as caught:
        read_options(mode, options)
    assert named in str(caught.value)
