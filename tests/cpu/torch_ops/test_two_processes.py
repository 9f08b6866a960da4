"""Fusible operations divided among two processes."""

from __future__ import annotations

import pytest

from support.processes import Outcomes


@pytest.mark.parametrize(
    "check", ["divided_layers", "divided_layers_and_sequences", "collectives_alone", "refused_divisions"]
)
def test_two_processes(outcomes: Outcomes, check: str) -> None:
    outcomes.expect(check, 2)
