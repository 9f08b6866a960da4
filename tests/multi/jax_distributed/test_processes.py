"""Programs of JAX whose accelerators belong to two processes, one each."""

from __future__ import annotations

import os
import re

import pytest

from support.processes import Outcomes


@pytest.mark.parametrize(
    "check",
    ["devices", "collectives", "launches_repeat", "a_loop", "training_steps", "launches_keep_their_order"],
)
def test_two_processes(outcomes: Outcomes, check: str) -> None:
    outcomes.expect(check, 2)


def test_a_peer_that_ends(outcomes: Outcomes) -> None:
    """Process 1 does; process 0 hears of it where the host waits for what is transported. An accelerator's transport is
    not waited for: it says so when its time is over, and the process ends, as JAX has it for all devices."""
    if os.environ["FLAGOS_DEVICE"] == "simulated":
        outcomes.expect("a_peer_that_ends", 1)
        return
    assert "a_peer_that_ends" not in outcomes.failures[0]
    assert re.search("(?i)collective timeout|collective operation timeout|FLAGOS-505", outcomes.output[0]), (
        outcomes.output[0]
    )
    assert "Terminating process because the JAX distributed service detected fatal errors" in outcomes.output[0]
