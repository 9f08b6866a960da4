"""Programs of JAX whose devices belong to two processes."""

from __future__ import annotations

import pytest

from support.processes import Outcomes


@pytest.mark.parametrize(
    "check",
    [
        "devices_are_counted_over_all_processes",
        "collectives_of_shard_map",
        "collectives_of_every_dtype",
        "jit_partitions_over_processes",
        "a_train_step_with_sharded_weights",
        "many_launches_keep_their_order",
        "a_loop_around_collectives",
        "multihost_utilities",
    ],
)
def test_two_processes(outcomes: Outcomes, check: str) -> None:
    outcomes.expect(check, 2)


def test_a_peer_that_ends(outcomes: Outcomes) -> None:
    """Process 1 does; process 0 hears of it."""
    outcomes.expect("a_peer_that_ends", 1)
