"""Programs of JAX whose accelerators belong to two processes, one each."""

from __future__ import annotations

import pytest

from support.processes import Outcomes


@pytest.mark.parametrize(
    "check",
    ["devices", "collectives", "launches_repeat", "a_loop", "training_steps", "launches_keep_their_order"],
)
def test_two_processes(outcomes: Outcomes, check: str) -> None:
    outcomes.expect(check, 2)


def test_a_peer_that_ends(outcomes: Outcomes) -> None:
    """Process 1 does; process 0 hears of it."""
    outcomes.expect("a_peer_that_ends", 1)
