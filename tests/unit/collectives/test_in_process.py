"""The in-process communicator: rendezvous, repeated rendezvous, failures, missing participants."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from flagos_backend.collectives import InProcessCommunicator, Reducer, Rendezvous
from flagos_backend.errors import CollectiveAborted, CollectiveTimeout
from support.devices import on_each


def everything(contributions: Sequence[Any]) -> list[tuple[Any, ...]]:
    return [tuple(contributions)] * len(contributions)


def test_everybody_gets_all_contributions_in_the_order_of_the_group() -> None:
    communicator = InProcessCommunicator()
    participants = (2, 0, 1)
    results = on_each(3, lambda p: communicator.exchange(Rendezvous("c", participants, p), f"from {p}", everything))
    assert results == [("from 2", "from 0", "from 1")] * 3


def test_one_participant_alone_does_not_wait() -> None:
    assert InProcessCommunicator().exchange(Rendezvous("c", (5,), 5), "alone", everything) == ("alone",)


def test_rendezvous_repeat_and_groups_do_not_mix() -> None:
    communicator = InProcessCommunicator()

    def work(p: int) -> list[Any]:
        group = (0, 1) if p < 2 else (2, 3)
        return [
            communicator.exchange(Rendezvous("loop", group, p), (p, iteration), everything) for iteration in range(200)
        ]

    for p, iterations in enumerate(on_each(4, work)):
        first = p // 2 * 2
        assert iterations == [((first, iteration), (first + 1, iteration)) for iteration in range(200)]


def test_combine_runs_once() -> None:
    communicator = InProcessCommunicator()
    calls = []

    def combine(contributions: Sequence[Any]) -> Sequence[Any]:
        calls.append(threading.get_ident())
        return contributions

    on_each(4, lambda p: communicator.exchange(Rendezvous("c", (0, 1, 2, 3), p), p, combine))
    assert len(calls) == 1


def test_a_failure_wakes_those_who_wait_and_refuses_those_who_come() -> None:
    communicator = InProcessCommunicator()

    def work(p: int) -> Any:
        if p == 1:
            communicator.abort(13, "device 1 ran out of luck")
            return None
        return communicator.exchange(Rendezvous("c", (0, 1, 2), p), p, everything)

    first, _, third = on_each(3, work)
    for error in (first, third):
        assert isinstance(error, CollectiveAborted)
        assert "device 1 ran out of luck" in str(error)
    with pytest.raises(CollectiveAborted):
        communicator.exchange(Rendezvous("later", (0, 1), 1), None, everything)


def test_a_failing_combine_fails_everybody() -> None:
    communicator = InProcessCommunicator()

    def combine(contributions: Sequence[Any]) -> Sequence[Any]:
        raise ArithmeticError("no sum")

    outcomes = on_each(3, lambda p: communicator.exchange(Rendezvous("c", (0, 1, 2), p), p, combine))
    assert sorted(type(outcome).__name__ for outcome in outcomes) == [
        "ArithmeticError",
        "CollectiveAborted",
        "CollectiveAborted",
    ]
    assert all("no sum" in str(outcome) for outcome in outcomes)


@pytest.mark.parametrize("fails", [False, True])
def test_nobody_leaves_while_contributions_are_read(fails: bool) -> None:
    """They are lent: who leaves may take the memory back."""
    communicator = InProcessCommunicator()
    reading, aborted = threading.Event(), threading.Event()
    seen: list[bool] = []

    def combine(contributions: Sequence[Any]) -> Sequence[Any]:
        reading.set()
        assert aborted.wait(60)
        time.sleep(0.2)  # whoever the failure woke is gone by now, if it may be
        reading.clear()
        if fails:
            raise ValueError("no sum")
        return everything(contributions)

    def work(p: int) -> Any:
        if p == 2:
            assert reading.wait(60)
            communicator.abort(13, "another device failed")
            aborted.set()
            return None
        try:
            return communicator.exchange(Rendezvous("c", (0, 1), p), p, combine)
        finally:
            seen.append(reading.is_set())

    outcomes = on_each(3, work)
    assert seen == [False, False]
    assert all(isinstance(outcome, Exception) if fails else outcome == (0, 1) for outcome in outcomes[:2])


def test_a_timeout_names_who_is_missing() -> None:
    communicator = InProcessCommunicator(timeout=0.2)
    outcomes = on_each(2, lambda p: communicator.exchange(Rendezvous("%all-reduce.7", (0, 1, 2, 3), p), p, everything))
    kinds = {type(outcome) for outcome in outcomes}
    assert CollectiveTimeout in kinds
    assert kinds <= {CollectiveTimeout, CollectiveAborted}
    timeout = next(outcome for outcome in outcomes if isinstance(outcome, CollectiveTimeout))
    assert "%all-reduce.7" in str(timeout)
    assert "[2, 3]" in str(timeout)


def test_all_reduce_reductions_in_the_order_of_ranks_and_alike_everywhere() -> None:
    communicator = InProcessCommunicator()
    values = [torch.tensor([1e8], dtype=torch.float32), torch.tensor([1.0]), torch.tensor([-1e8]), torch.tensor([1.0])]
    participants = (3, 1, 0, 2)
    add = Reducer(torch.add)
    results = on_each(4, lambda p: communicator.all_reduce(Rendezvous("c", participants, p), [values[p]], add)[0])
    expected = ((values[3] + values[1]) + values[0]) + values[2]
    assert all(result.equal(expected) for result in results)
    assert len({result.data_ptr() for result in results}) == 4


def test_a_barrier_is_passed_by_all_or_by_none(rng: np.random.Generator) -> None:
    """Whenever the launch is aborted: at one of these times, while some are there and others are not."""
    for late, delay in zip(rng.integers(0, 3, 200), rng.uniform(0, 4e-4, 200), strict=True):
        communicator = InProcessCommunicator()

        def work(
            p: int, communicator: InProcessCommunicator = communicator, late: int = late, delay: float = delay
        ) -> bool:
            time.sleep(2e-4 if p == late else delay if p == 3 else 0)
            if p == 3:
                communicator.abort(13, "device 3 ran out of luck")
                return True
            try:
                communicator.barrier(Rendezvous("c", (0, 1, 2), p))
            except CollectiveAborted:
                return False
            return True

        assert len(set(on_each(4, work)[:3])) == 1
    assert on_each(3, lambda p: InProcessCommunicator().barrier(Rendezvous("c", (p,), p))) == [None] * 3
