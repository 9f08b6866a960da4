"""Where the arrays of two captures lie, with graphs that record nothing: plans run on the host instead."""

from __future__ import annotations

import contextlib
import gc
import itertools
import weakref
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from flagos_backend.compile.plan_builder import build_plan
from flagos_backend.devices.device_lock import device_lock
from flagos_backend.errors import CaptureRefused
from flagos_backend.importer import import_module
from flagos_backend.kernels.reference.registry import Run
from flagos_backend.runtime.accelerator import capture as capture_module
from flagos_backend.runtime.accelerator import memory as memory_module
from flagos_backend.runtime.accelerator.capture import ATTEMPTS, Attempt, Captures, capture
from flagos_backend.runtime.accelerator.conditional import ConditionalRecorder, NativeConditionals
from flagos_backend.runtime.accelerator.graphs import GraphRecorder, GraphReplay, NativeReplays
from flagos_backend.runtime.accelerator.memory import GraphMemory, shared_memory
from flagos_backend.runtime.plan import Plan
from support.against_xla import hlo_of_text

TEXT = """
ENTRY main {
  x = f32[3,5] parameter(0)
  y = f32[512] parameter(1)
  z = f32[0] parameter(2)
  sum = f32[3,5] add(x, x)
  zero = s32[] constant(0)
  one = f32[1] constant({1})
  updated = f32[512] dynamic-update-slice(y, one, zero)
  ROOT both = (f32[3,5], f32[512], f32[0]) tuple(sum, updated, z)
}"""


class _Graph:
    """Stands for torch.cuda.CUDAGraph."""

    open = 0
    made = 0
    # Graphs in whose memory a workspace of BLAS lies, as the one stream here keeps it.
    workspaces: ClassVar[list[int]] = []

    def __init__(self, keep_graph: bool = False) -> None:
        type(self).made += 1
        self.number = self.made
        self.memory = (0, 0)

    def capture_begin(self, pool: tuple[int, int] | None = None, *, capture_error_mode: str) -> None:
        type(self).open += 1
        self.memory = pool or (1, self.number)
        self.found = list(self.workspaces)
        self.workspaces.append(self.number)

    def capture_end(self) -> None:
        type(self).open -= 1

    def raw_cuda_graph(self) -> int:
        assert not self.found, "a product was given another graph's workspace"
        return self.number

    def pool(self) -> tuple[int, int]:
        raise RuntimeError("torch knows none of a graph whose capture did not end")


class _Stream:
    cuda_stream = 0

    def synchronize(self) -> None:
        pass


class _Pools:
    """Stands for torch's allocator: a segment for each pool, and how many have it. A pool that nobody has is gone."""

    def __init__(self) -> None:
        self.made = 0
        self.uses: dict[tuple[int, int], int] = {}

    def handle(self) -> tuple[int, int]:
        self.made += 1
        return 0, self.made

    def begin(self, device: int, pool: tuple[int, int]) -> None:
        assert self.uses.get(pool) != 0, "torch refuses a pool that nobody has"
        self.uses[pool] = self.uses.get(pool, 0) + 1

    def release(self, device: int, pool: tuple[int, int]) -> None:
        assert self.uses[pool] > 0
        self.uses[pool] -= 1

    def snapshot(self) -> list[dict[str, object]]:
        return [
            {"device": 0, "segment_pool_id": pool, "address": 1000 * pool[1], "total_size": 10} for pool in self.uses
        ]


@pytest.fixture
def pools() -> _Pools:
    return _Pools()


@pytest.fixture
def host_graphs(monkeypatch: pytest.MonkeyPatch, pools: _Pools) -> None:

    monkeypatch.setattr(_Graph, "made", 0)
    monkeypatch.setattr(_Graph, "open", 0)
    monkeypatch.setattr(_Graph, "workspaces", [])
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", _Graph.workspaces.clear, raising=False)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", _Graph)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", pools.handle)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: _Stream())
    monkeypatch.setattr(memory_module, "own_stream", lambda device: None)
    monkeypatch.setattr(memory_module, "_spare", {})
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "memory_snapshot", pools.snapshot)
    monkeypatch.setattr(torch._C, "_cuda_beginAllocateCurrentThreadToPool", pools.begin, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", lambda device, pool: None, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_releasePool", pools.release, raising=False)


DEVICE = torch.device("cpu", 0)


def plan_of(text: str, donated: tuple[int, ...] = (1,)) -> Plan:
    return build_plan(import_module(hlo_of_text(text)).entry, donated)


def captured(text: str) -> Captures:
    with torch.inference_mode():
        return capture(plan_of(text), Run(device=DEVICE))


@pytest.mark.usefixtures("host_graphs")
def test_every_array_moves_by_a_distance_of_its_own() -> None:
    captures = captured(TEXT)
    assert [num_bytes for _, _, num_bytes in captures.arrays] == [60, 2048, 0, 60, 2048, 0]
    distances = [second - first for first, second, _ in captures.arrays]
    assert len(set(distances)) == len(distances) and 0 not in distances
    assert all(address % 256 == captures.arrays[0][0] % 256 for pair in captures.arrays for address in pair[:2])


@pytest.mark.usefixtures("host_graphs")
def test_a_result_over_an_argument_is_told_from_one_that_is_copied() -> None:
    captures = captured(TEXT)
    assert captures.first.overwritten == (-1, 1, -1)


@pytest.mark.usefixtures("host_graphs")
def test_memory_of_the_captures_own_is_told_apart_by_their_pools() -> None:
    captures = captured(TEXT)
    assert captures.graphs == ((1, ((1000, 10),), ()), (2, ((2000, 10),), ()), (3, ((3000, 10),), ()))


@pytest.mark.usefixtures("host_graphs")
def test_no_workspace_is_left_behind() -> None:
    captured(TEXT)
    assert _Graph.made == 3 and not _Graph.workspaces


@pytest.mark.usefixtures("host_graphs")
def test_a_capture_that_breaks_is_ended_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def argument_or_copy(*_: object) -> int:
        raise RuntimeError("not while capturing\nand more")

    monkeypatch.setattr(capture_module, "_argument_or_copy", argument_or_copy)
    with pytest.raises(CaptureRefused, match=r"RuntimeError: not while capturing\. They run"):
        captured(TEXT)
    assert _Graph.open == 0


@pytest.mark.usefixtures("host_graphs")
def test_a_capture_that_does_not_begin_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    begin, left = _Graph.capture_begin, [RuntimeError("already capturing")]

    def refuses(self: _Graph, *arguments: Any, **keywords: Any) -> None:
        if left:
            raise left.pop()
        begin(self, *arguments, **keywords)

    monkeypatch.setattr(_Graph, "capture_begin", refuses)
    with pytest.raises(CaptureRefused, match=r"RuntimeError: already capturing"):
        captured(TEXT)


@pytest.mark.usefixtures("host_graphs")
@pytest.mark.parametrize("times", [1, 2])
def test_memory_that_runs_out_is_given_back_once(monkeypatch: pytest.MonkeyPatch, times: int) -> None:
    argument_or_copy, given_back = capture_module._argument_or_copy, []
    left = [torch.OutOfMemoryError("60 GiB")] * times

    def runs_out(*arguments: Any) -> int:
        if left:
            raise left.pop()
        return argument_or_copy(*arguments)

    def nothing_new(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("not even a byte")

    monkeypatch.setattr(capture_module, "_argument_or_copy", runs_out)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: given_back.append(1))
    monkeypatch.setattr(torch, "zeros", nothing_new)  # what undoes a capture makes nothing
    if times == 1:
        captured(TEXT)
    else:
        with pytest.raises(CaptureRefused, match="60 GiB"):
            captured(TEXT)
    assert given_back == [1] and _Graph.open == 0


BROKEN = "CUDA error: operation failed due to a previous error during capture"


@pytest.mark.usefixtures("host_graphs")
@pytest.mark.parametrize("times", [1, 2])
def test_what_another_thread_breaks_is_captured_again_once(monkeypatch: pytest.MonkeyPatch, times: int) -> None:
    argument_or_copy, left = capture_module._argument_or_copy, [RuntimeError(BROKEN)] * times

    def broken(*arguments: Any) -> int:
        if left:
            raise left.pop()
        return argument_or_copy(*arguments)

    monkeypatch.setattr(capture_module, "_argument_or_copy", broken)
    if times == 1:
        assert captured(TEXT).first.overwritten == (-1, 1, -1)
    else:
        with pytest.raises(CaptureRefused, match="previous error during capture"):
            captured(TEXT)
    assert _Graph.open == 0


@pytest.mark.usefixtures("host_graphs")
def test_a_capture_that_does_not_end_is_undone(monkeypatch: pytest.MonkeyPatch, pools: _Pools) -> None:
    """torch would go on allocating to its pool, and give no memory back any more."""
    end, ended = _Graph.capture_end, []

    def does_not_end(self: _Graph) -> None:
        end(self)
        if self.number == 1:
            raise RuntimeError(BROKEN)

    monkeypatch.setattr(_Graph, "capture_end", does_not_end)
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", lambda device, pool: ended.append(pool), raising=False)
    captures = captured(TEXT)
    assert captures.first.overwritten == (-1, 1, -1) and captures.graphs[0][0] == 3  # after the one that was undone
    assert [pool for pool in ended if pool == captures.first.memory.pool.handle] == 2 * [(0, 1)]  # made, undone


@pytest.mark.usefixtures("host_graphs")
def test_nobody_measures_while_a_program_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    argument_or_copy, held = capture_module._argument_or_copy, []
    monkeypatch.setattr(
        capture_module, "_argument_or_copy", lambda *_: held.append(device_lock.locked()) or argument_or_copy(*_)
    )
    captured(TEXT)
    assert held and all(held) and not device_lock.locked()


@pytest.mark.usefixtures("host_graphs")
def test_another_capture_lies_where_the_first_did_with_its_temporaries_elsewhere() -> None:
    captures, memory = captured(TEXT), GraphMemory(DEVICE)
    with torch.inference_mode():
        again = captures.capture_in(memory)
    assert again.memory is memory and again.overwritten == captures.first.overwritten
    assert again.native() == (4, ((4000, 10),), ())


@pytest.mark.usefixtures("host_graphs")
def test_another_capture_over_other_arguments_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    captures = captured(TEXT)
    monkeypatch.setattr(capture_module, "run_into", lambda *_: (-1, -1, -1))
    with pytest.raises(CaptureRefused, match="over other arguments"):
        captures.capture_in(GraphMemory(DEVICE))


HALVED = """
half { x = f32[3] parameter(0)
  h = f32[3] constant({0.5, 0.5, 0.5})
  ROOT y = f32[3] multiply(x, h) }
same { ROOT x = f32[3] parameter(0) }
ENTRY main { k = pred[] parameter(0)
  x = f32[3] parameter(1)
  ROOT y = f32[3] conditional(k, x, x), true_computation=half, false_computation=same }"""


@pytest.mark.usefixtures("host_graphs")
def test_bodies_are_told_with_their_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each capture has nodes of its own; the bodies of graphs that share memory do so too."""
    numbers = itertools.count(1)

    def opened(*_: int) -> tuple[int, int, int]:
        number = next(numbers)
        return number, 10 * number, 100 * number

    monkeypatch.setattr(memory_module, "own_stream", lambda device: SimpleNamespace(cuda_stream=next(numbers) + 1000))
    native = NativeConditionals(0, lambda accelerator: None, opened, lambda *_: None)
    memory = GraphMemory(DEVICE)  # the first pool
    with torch.inference_mode():
        captures = capture(plan_of(HALVED, ()), Run(device=DEVICE), native)
        again = [captures.capture_in(memory).native() for _ in range(2)]
    owned = [owned for _, owned, _ in (*captures.graphs, *again)]
    # Each of the three has a pool, and one that is made when there is a body.
    assert owned == [((1000 * n, 10), (1000 * n + 1000, 10)) for n in (2, 4, 6)] + 2 * [((1000, 10), (8000, 10))]
    nodes = [nodes for _, _, nodes in (*captures.graphs, *again)]
    assert [len(each) for each in nodes] == [2] * 5
    assert len({node for each in nodes for node in each}) == 10


PARTS = """
ENTRY main {
  x = f32[1024] parameter(0)
  y = f32[128] parameter(1)
  part = f32[128] slice(x), slice={[128:256]}
  ROOT both = (f32[128], f32[128]) tuple(part, y)
}"""


@pytest.mark.usefixtures("host_graphs")
def test_a_part_of_an_argument_is_no_other_argument() -> None:
    """Arguments lie 512 bytes apart in the memory that they are captured over."""
    with torch.inference_mode():
        captures = capture(plan_of(PARTS, (0, 1)), Run(device=DEVICE))
    assert captures.first.overwritten == (-1, 1)


@pytest.mark.usefixtures("host_graphs")
def test_a_capture_that_breaks_names_its_step() -> None:
    text = "x = f32[3] parameter(0)\n y = f32[3] abs(x)\n ROOT z = f32[3] sine(y)"
    module = import_module(hlo_of_text(f"ENTRY main {{ {text} }}"))
    with torch.inference_mode():
        plan = build_plan(module.entry)

        def fails(*_: object) -> None:
            raise RuntimeError("waits")

        broken = replace(plan, steps=(plan.steps[0], replace(plan.steps[1], kernel=fails)))
        with pytest.raises(CaptureRefused, match=r"waits in #\d = z: f32\[3\] sine") as refused:
            capture(broken, Run(device=torch.device("cpu", 0)))
    assert refused.value.step == 1


@pytest.mark.usefixtures("host_graphs")
@pytest.mark.parametrize("attempt", ATTEMPTS, ids=str)
def test_places_do_not_depend_on_the_iterations(attempt: Attempt) -> None:
    order, _ = attempt
    with torch.inference_mode():
        captures = capture(plan_of(TEXT), Run(device=DEVICE), attempt=attempt)
    # The number of a graph says when it was captured.
    assert [handle for handle, _, _ in captures.graphs] == [order.index(number) + 1 for number in range(3)]
    assert captures.first.overwritten == (-1, 1, -1)


class _Native:
    """Stands for the native side. ``refused``: proofs, and replays of graphs of these numbers."""

    def __init__(self, proofs: int = 0, graphs: tuple[int, ...] = ()) -> None:
        self.refused, self.graphs = proofs, graphs
        self.compared: list[tuple[Any, ...]] = []
        self.replayed: list[int] = []

    def compare(
        self, accelerator: int, graphs: tuple[Any, ...], arrays: tuple[Any, ...], stand_ins: tuple[Any, ...]
    ) -> object:
        self.compared.append(graphs)
        if len(self.compared) <= self.refused:
            raise RuntimeError("node 7 depends on where the arrays are")
        return object()

    def make(self, proof: object, graph: tuple[Any, ...]) -> tuple[object, int, int]:
        if graph[0] in self.graphs:
            raise RuntimeError(f"node 3 of graph {graph[0]} is not what it was")
        self.replayed.append(graph[0])
        return object(), 5, 3

    def recorder(self) -> GraphRecorder:
        def refuses(accelerator: int) -> None:
            raise RuntimeError("an old driver")

        conditionals = NativeConditionals(0, refuses, lambda *_: (0, 0, 0), lambda *_: None)
        recorder = GraphRecorder(
            NativeReplays(self.compare, self.make, lambda *_: None, lambda *_: None), conditionals, Run(device=DEVICE)
        )
        assert recorder.no_conditionals == "an old driver"
        return recorder

    def record(self, text: str = TEXT) -> GraphReplay:
        with torch.inference_mode():
            return self.recorder()(plan_of(text))


@pytest.mark.usefixtures("host_graphs")
@pytest.mark.parametrize("refusals", [0, 1, 2, 3, 4])
def test_what_cannot_be_patched_is_captured_by_longer_moves_and_in_other_orders(refusals: int) -> None:
    native = _Native(proofs=refusals)
    if refusals < len(ATTEMPTS):
        assert str(native.record()) == "a graph of 5 nodes with 3 addresses"
    else:
        with pytest.raises(CaptureRefused, match="node 7 depends"):
            native.record()
    assert len(native.compared) == min(refusals + 1, len(ATTEMPTS))


@pytest.mark.usefixtures("host_graphs")
def test_graphs_of_programs_share_memory_while_there_is_one(pools: _Pools) -> None:
    """It is the last that a program makes, after those of the three captures that are compared, which go."""
    native = _Native()
    replays = [native.record(text) for text in (TEXT, PARTS)]
    assert native.replayed == [4, 8]
    in_use = {pool: uses for pool, uses in pools.uses.items() if uses}
    assert in_use == {(0, 4): 1} and shared_memory(DEVICE).segments() == ((4000, 10),)
    del replays[0]
    assert pools.uses[0, 4] == 1
    del replays[0]
    gc.collect()
    assert not any(pools.uses.values())
    native.record()
    assert pools.made == 5 + 4 + 5


@pytest.mark.usefixtures("host_graphs")
def test_what_is_not_proven_of_the_shared_one_stays_in_memory_of_its_own(pools: _Pools) -> None:
    native = _Native(graphs=(4,))
    kept = native.record()
    reason = "node 3 of graph 4 is not what it was"
    assert str(kept) == f"a graph of 5 nodes with 3 addresses, in memory of its own ({reason})"
    assert native.replayed == [1] and [pool for pool, uses in pools.uses.items() if uses] == [(0, 1)]
    with pytest.raises(CaptureRefused, match="node 3 of graph 18 is"):
        _Native(graphs=(5, 8, 9, 12, 13, 16, 18, 20)).record()  # each attempt's fourth, then its first


@pytest.mark.usefixtures("host_graphs")
def test_a_fourth_capture_that_breaks_leaves_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    def runs_out(*arguments: Any) -> tuple[int, ...]:
        if _Graph.made > 3:
            raise torch.OutOfMemoryError("60 GiB")
        return run_into(*arguments)

    run_into = capture_module.run_into
    monkeypatch.setattr(capture_module, "run_into", runs_out)
    native = _Native()
    assert str(native.record()).endswith(", in memory of its own (OutOfMemoryError: 60 GiB)")
    assert native.replayed == [1]


@pytest.mark.usefixtures("host_graphs")
def test_captures_that_were_compared_give_their_memory_back(monkeypatch: pytest.MonkeyPatch, pools: _Pools) -> None:
    """While something allocates to a pool, so that torch gives back nothing else."""
    left: list[dict[tuple[int, int], int]] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: left.append(dict(pools.uses)))
    replay = _Native().record()
    assert left == [{(0, 1): 0, (0, 2): 0, (0, 3): 0, (0, 4): 1, (0, 5): 2}] and pools.uses[0, 5] == 0
    del replay


@pytest.mark.usefixtures("host_graphs")
def test_a_program_without_temporaries_needs_no_fourth_capture(pools: _Pools, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "memory_snapshot", list)
    native = _Native()
    assert str(native.record()) == "a graph of 5 nodes with 3 addresses"
    assert native.replayed == [1] and _Graph.made == 3


@pytest.mark.usefixtures("host_graphs")
@pytest.mark.parametrize("is_lost", [True, False], ids=["lost", "ended"])
def test_a_graph_with_a_lost_body_is_never_destroyed(monkeypatch: pytest.MonkeyPatch, is_lost: bool) -> None:
    """The driver would destroy the body a second time. Its memory is given back all the same."""
    released, graphs = [], []

    def breaks(plan: Plan, run: Run, arrays: Any) -> tuple[int, ...]:
        assert isinstance(run.conditionals, ConditionalRecorder)
        run.conditionals.has_lost_body = is_lost
        raise RuntimeError("invalidated")

    begin = _Graph.capture_begin

    def noted(self: _Graph, *arguments: Any, **keywords: Any) -> None:
        graphs.append(weakref.ref(self))
        begin(self, *arguments, **keywords)

    monkeypatch.setattr(capture_module, "run_into", breaks)
    monkeypatch.setattr(_Graph, "capture_begin", noted)
    monkeypatch.setattr(torch._C, "_cuda_releasePool", lambda device, pool: released.append(pool), raising=False)
    native = NativeConditionals(0, lambda accelerator: None, lambda *_: (0, 0, 0), lambda *_: None)
    with torch.inference_mode(), pytest.raises(CaptureRefused, match="invalidated"):
        capture(plan_of(TEXT), Run(device=DEVICE), native)
    gc.collect()
    assert (graphs[0]() is not None) is is_lost
    assert released == [(0, 1)] * (2 if is_lost else 1)  # the graph's, and that of who made the pool


def test_memory_is_given_back_while_nobody_captures(host_graphs: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """While any thread does, torch keeps it."""
    alone = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: alone.append(device_lock.locked()))
    memory_module.give_back(DEVICE)
    assert alone == [True] and not device_lock.locked()


@pytest.mark.parametrize("count", [1, 2, 55, 1000])
def test_the_first_moves_are_within_little_memory(count: int, rng: np.random.Generator) -> None:
    """And those that follow are of a megabyte and more, while there are few arrays."""
    sizes = [int(size) for size in rng.integers(0, 8 << 20, count)]
    first, second = capture_module._places(sizes, ATTEMPTS[0][1])
    ends = [place + size for place, size in zip(second, sizes, strict=True)]
    assert max(ends) <= max(sizes) + (32 << 20) + count * 512
    for _, moved_bytes in ATTEMPTS[1:]:
        first, second = capture_module._places(sizes, moved_bytes)
        least = min(after - before for before, after in zip(first, second, strict=True))
        assert least >= count * min(1 << 20, (256 << 20) // (4 * count))


def test_no_other_order_of_the_moves_needs_less_memory(rng: np.random.Generator) -> None:
    count = 5
    sizes = [int(size) for size in rng.integers(0, 8 << 20, count)]
    first, second = capture_module._places(sizes, 256 << 20)
    moves = [after - before for before, after in zip(first, second, strict=True)]
    assert len(set(moves)) == count
    # Beyond what the distance of two arrays changes by.
    assert min(moves) > max(moves) - min(moves)

    def end(order: Sequence[int]) -> int:
        return max(place + moves[n] + size for place, n, size in zip(first, order, sizes, strict=True))

    assert end(range(count)) == max(place + size for place, size in zip(second, sizes, strict=True))
    assert end(range(count)) <= min(map(end, itertools.permutations(range(count)))) + count * 512
