"""What PyTorch runs between programs, in several threads."""

from __future__ import annotations

import operator
import threading
from typing import Any

import pytest
from torch.fx import Graph, GraphModule

from flagos_backend.frontends.torch.compile.segments import Segment, run_segments


def test_threads_have_values_of_their_own() -> None:
    meet = threading.Barrier(2)

    def plus_one(x: int) -> int:
        meet.wait(30)
        return x + 1

    graph = Graph()
    x = graph.placeholder("x")
    y = graph.call_function(plus_one, (x,))
    z = graph.call_function(operator.neg, (y,))
    graph.output((z,))
    whole = GraphModule({}, graph)
    segment = Segment(whole, (x,), (z,), decisive=y, frees=(x,))
    run = run_segments(whole, [segment], lambda graph: pytest.fail("nothing is compiled"))
    found: dict[int, list[Any]] = {}
    threads = [threading.Thread(target=lambda n: found.update({n: run([n])}), args=(number,)) for number in (1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {1: [-2], 5: [-6]}
