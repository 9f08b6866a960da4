"""Functional collectives as part of programs, and the parallel models that are made of them."""

from __future__ import annotations

import pytest

from support.processes import Outcomes


@pytest.mark.parametrize(
    "check",
    [
        "every_collective_is_part_of_the_program",
        "reductions_of_many_dtypes",
        "coalesced_collectives",
        "parts_of_different_sizes_are_called_back",
        "collectives_in_subgroups",
        "a_result_that_only_one_process_uses",
        "tensors_of_the_device",
    ],
)
def test_collectives(outcomes: Outcomes, check: str) -> None:
    outcomes.expect(check, 3)


@pytest.mark.parametrize(
    "check",
    [
        "tensor_parallel_mlp",
        "sequence_parallel_mlp",
        "distributed_data_parallel",
        "distributed_data_parallel_with_reductions_in_the_graph",
        "fully_sharded_blocks",
        "dtensor",
    ],
)
def test_parallel_models(outcomes: Outcomes, check: str) -> None:
    outcomes.expect(check, 3)


@pytest.mark.parametrize("check", ["a_group_that_is_gone", "a_peer_that_hangs"])
def test_errors(outcomes: Outcomes, check: str) -> None:
    outcomes.expect(check, 3)


def test_a_peer_that_ends(outcomes: Outcomes) -> None:
    """Process 2 does; the others hear of it."""
    outcomes.expect("a_peer_that_ends", 2)
