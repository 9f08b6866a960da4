"""Loops and branches that data decides, recorded: what they leave where the next iteration looks for it, against the
same plans run on the host; and how their nodes are captured, with a driver and an allocator that only note."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from flagos_backend.compile.plan_builder import build_plan
from flagos_backend.importer import import_module
from flagos_backend.ir.types import leaves
from flagos_backend.kernels.reference.registry import Run
from flagos_backend.kernels.reference.storage import dtype_of
from flagos_backend.runtime.accelerator import memory as memory_module
from flagos_backend.runtime.accelerator.capturable import Limits, reason_against
from flagos_backend.runtime.accelerator.capture import run_into
from flagos_backend.runtime.accelerator.conditional import ConditionalRecorder, NativeConditionals
from flagos_backend.runtime.accelerator.memory import BodyMemory
from flagos_backend.runtime.accelerator.segments import divide
from flagos_backend.runtime.plan import Plan
from programs import PROGRAMS
from support.against_xla import hlo_of_text, to_storage
from support.poisoned_replays import PoisonedReplay
from support.tape import Body, Kernel, Tape


def plan_of(text: str, donated: tuple[int, ...] = ()) -> Plan:
    with torch.inference_mode():
        return build_plan(import_module(hlo_of_text(text)).entry, donated)


def loop(state: str, body: str, condition: str, around: str) -> str:
    """``state``: a tuple's type, of which body and condition have the parameter p."""
    return f"""
    body {{ p = {state} parameter(0)
      {body} }}
    condition {{ p = {state} parameter(0)
      {condition} }}
    ENTRY main {{ {around} }}"""


# A pair that changes places with what it becomes; n says how many iterations are left.
SWAPPED = loop(
    "(s32[], f32[3], f32[3])",
    """n = s32[] get-tuple-element(p), index=0
      a = f32[3] get-tuple-element(p), index=1
      b = f32[3] get-tuple-element(p), index=2
      one = s32[] constant(1)
      m = s32[] subtract(n, one)
      c = f32[3] add(a, b)
      ROOT r = (s32[], f32[3], f32[3]) tuple(m, b, c)""",
    """n = s32[] get-tuple-element(p), index=0
      zero = s32[] constant(0)
      ROOT r = pred[] compare(n, zero), direction=GT""",
    """n = s32[] parameter(0)
      x = f32[3] parameter(1)
      t = (s32[], f32[3], f32[3]) tuple(n, x, x)
      ROOT w = (s32[], f32[3], f32[3]) while(t), condition=condition, body=body""",
)
# Whether to go on is part of the state, and lies where another part of it did.
FLAGS = loop(
    "(s32[], pred[], pred[])",
    """n = s32[] get-tuple-element(p), index=0
      f = pred[] get-tuple-element(p), index=1
      g = pred[] get-tuple-element(p), index=2
      one = s32[] constant(1)
      m = s32[] subtract(n, one)
      k = pred[] compare(m, one), direction=GT
      ROOT r = (s32[], pred[], pred[]) tuple(m, g, k)""",
    "ROOT f = pred[] get-tuple-element(p), index=1",
    """n = s32[] parameter(0)
      x = f32[3] parameter(1)
      zero = s32[] constant(0)
      f = pred[] compare(n, zero), direction=GT
      t = (s32[], pred[], pred[]) tuple(n, f, f)
      ROOT w = (s32[], pred[], pred[]) while(t), condition=condition, body=body""",
)
# A body that hands on views, updates in place, and reads what never changes.
VIEWS = loop(
    "(s32[], f32[3,3], f32[3], f32[3,3])",
    """n = s32[] get-tuple-element(p), index=0
      a = f32[3,3] get-tuple-element(p), index=1
      x = f32[3] get-tuple-element(p), index=2
      q = f32[3,3] get-tuple-element(p), index=3
      one = s32[] constant(1)
      m = s32[] subtract(n, one)
      t = f32[3,3] transpose(a), dimensions={1,0}
      row = f32[1,3] reshape(x)
      u = f32[3,3] dynamic-update-slice(q, row, one, one)
      s = f32[3,3] add(u, a)
      ROOT r = (s32[], f32[3,3], f32[3], f32[3,3]) tuple(m, t, x, s)""",
    """n = s32[] get-tuple-element(p), index=0
      zero = s32[] constant(0)
      ROOT r = pred[] compare(n, zero), direction=GT""",
    """n = s32[] parameter(0)
      x = f32[3] parameter(1)
      a = f32[3,3] broadcast(x), dimensions={1}
      t = (s32[], f32[3,3], f32[3], f32[3,3]) tuple(n, a, x, a)
      ROOT w = (s32[], f32[3,3], f32[3], f32[3,3]) while(t), condition=condition, body=body""",
)
# A loop of as many iterations as the one around it has left, with a branch in each iteration.
NESTED = """
    inner_body { p = (s32[], f32[3]) parameter(0)
      n = s32[] get-tuple-element(p), index=0
      x = f32[3] get-tuple-element(p), index=1
      one = s32[] constant(1)
      m = s32[] subtract(n, one)
      y = f32[3] add(x, x)
      ROOT r = (s32[], f32[3]) tuple(m, y) }
    positive { p = (s32[], f32[3]) parameter(0)
      n = s32[] get-tuple-element(p), index=0
      zero = s32[] constant(0)
      ROOT r = pred[] compare(n, zero), direction=GT }
    less { x = f32[3] parameter(0)
      ROOT y = f32[3] negate(x) }
    more { x = f32[3] parameter(0)
      ROOT y = f32[3] multiply(x, x) }
    same { ROOT x = f32[3] parameter(0) }
    body { p = (s32[], f32[3]) parameter(0)
      n = s32[] get-tuple-element(p), index=0
      one = s32[] constant(1)
      m = s32[] subtract(n, one)
      i = (s32[], f32[3]) while(p), condition=positive, body=inner_body
      x = f32[3] get-tuple-element(i), index=1
      half = f32[] constant(0.25)
      halves = f32[3] broadcast(half), dimensions={}
      y = f32[3] multiply(x, halves)
      c = f32[3] conditional(m, y, y, y), branch_computations={less, more, same}
      ROOT r = (s32[], f32[3]) tuple(m, c) }
    ENTRY main { n = s32[] parameter(0)
      x = f32[3] parameter(1)
      t = (s32[], f32[3]) tuple(n, x)
      ROOT w = (s32[], f32[3]) while(t), condition=positive, body=body }"""
BRANCHES = """
    negated { x = f32[3] parameter(0)
      ROOT y = (f32[3], f32[3]) tuple(x, x) }
    doubled { x = f32[3] parameter(0)
      d = f32[3] add(x, x)
      ROOT y = (f32[3], f32[3]) tuple(d, x) }
    squared { x = f32[3] parameter(0)
      d = f32[3] multiply(x, x)
      ROOT y = (f32[3], f32[3]) tuple(x, d) }
    ENTRY main { n = s32[] parameter(0)
      x = f32[3] parameter(1)
      ROOT c = (f32[3], f32[3]) conditional(n, x, x, x), branch_computations={negated, doubled, squared} }"""
EITHER = """
    up { x = f32[3] parameter(0)
      ROOT y = f32[3] add(x, x) }
    down { x = f32[3] parameter(0)
      ROOT y = f32[3] negate(x) }
    ENTRY main { n = s32[] parameter(0)
      x = f32[3] parameter(1)
      zero = s32[] constant(0)
      k = pred[] compare(n, zero), direction=GT
      ROOT c = f32[3] conditional(k, x, x), true_computation=up, false_computation=down }"""
TEXTS = {
    "swapped": SWAPPED,
    "flags": FLAGS,
    "views": VIEWS,
    "nested": NESTED,
    "branches": BRANCHES,
    "either": EITHER,
}


def recorded(plan: Plan, *arguments: torch.Tensor) -> tuple[Tape, list[torch.Tensor]]:
    with torch.inference_mode(), Tape() as tape:
        return tape, plan.run(Run(conditionals=tape), list(arguments))


@pytest.mark.parametrize("donated", [(), (0, 1)])
@pytest.mark.parametrize("name", TEXTS)
def test_a_record_does_what_the_data_says(name: str, donated: tuple[int, ...], rng: np.random.Generator) -> None:
    plan = plan_of(TEXTS[name], donated)
    n, x = torch.tensor(2, dtype=torch.int32), torch.ones(3)
    tape, results = recorded(plan, n, x)
    # No iteration, one, several; more than there are branches, and fewer.
    for iterations in (3, 0, 1, 5, -1, 2):
        start = torch.from_numpy(rng.standard_normal(3).astype(np.float32))
        n.fill_(iterations)
        x.copy_(start)
        tape.play()
        with torch.inference_mode():
            expected = plan.run(Run(), [torch.tensor(iterations, dtype=torch.int32), start])
        for ours, theirs in zip(results, expected, strict=True):
            assert torch.equal(ours, theirs), (iterations, ours, theirs)


@pytest.mark.parametrize(
    "name",
    [
        "conditionals",
        "linear_algebra_in_plain_ops",
        "lstm_scan",
        "order_statistics",
        "random_distributions",
        "scan_gradient",
        "scan_with_outputs",
        "segment_sum_and_bincount",
        "while_batched",
        "while_counted_and_dynamic",
    ],
)
def test_programs_of_the_corpus(name: str) -> None:
    """As they are imported, all their loops go on as data says."""
    module = import_module(PROGRAMS[name].hlo())
    shapes = [leaf for parameter in module.entry.parameters for leaf in leaves(parameter.shape)]
    arrays = PROGRAMS[name].arguments()

    def arguments() -> list[torch.Tensor]:
        return [to_storage(np.asarray(array), shape) for array, shape in zip(arrays, shapes, strict=True)]

    with torch.inference_mode():
        plan = build_plan(module.entry)
        with Tape() as tape:
            results = plan.run(Run(conditionals=tape, asynchronous=True), arguments())
        expected = plan.run(Run(), arguments())
    assert any(isinstance(node, Body) for node in tape.nodes)
    tape.play()
    for ours, theirs in zip(results, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)


def test_the_only_branch_always_runs() -> None:
    plan = plan_of("""
    doubled { x = f32[3] parameter(0)
      ROOT d = f32[3] add(x, x) }
    ENTRY main { n = s32[] parameter(0)
      x = f32[3] parameter(1)
      ROOT c = f32[3] conditional(n, x), branch_computations={doubled} }""")
    n, x = torch.tensor(0, dtype=torch.int32), torch.ones(3)
    tape, (result,) = recorded(plan, n, x)
    for choice in (0, 1, -1):
        n.fill_(choice)
        x.fill_(choice + 2)
        tape.play()
        assert result.tolist() == [2 * choice + 4.0] * 3


# A step of training: on a condition its state is what it was, or written over.
SKIPPED = """
    updated { s = (f32[3], f32[3]) parameter(0)
      p = f32[3] get-tuple-element(s), index=0
      m = f32[3] get-tuple-element(s), index=1
      one = s32[] constant(1)
      a = f32[1] slice(p), slice={[0:1]}
      b = f32[1] slice(m), slice={[0:1]}
      c = f32[1] add(a, b)
      n = f32[3] dynamic-update-slice(m, c, one)
      q = f32[3] dynamic-update-slice(p, c, one)
      ROOT r = (f32[3], f32[3]) tuple(q, n) }
    same { ROOT s = (f32[3], f32[3]) parameter(0) }
    ENTRY main { k = pred[] parameter(0)
      p = f32[3] parameter(1)
      m = f32[3] parameter(2)
      t = (f32[3], f32[3]) tuple(p, m)
      ROOT c = (f32[3], f32[3]) conditional(k, t, t), true_computation=updated, false_computation=same }"""
# Both results of a branch are one array, or change places.
ALIKE = """
    doubled { x = f32[3] parameter(0)
      d = f32[3] add(x, x)
      ROOT r = (f32[3], f32[3]) tuple(d, d) }
    apart { x = f32[3] parameter(0)
      a = f32[3] negate(x)
      b = f32[3] sine(x)
      ROOT r = (f32[3], f32[3]) tuple(b, a) }
    ENTRY main { k = pred[] parameter(0)
      x = f32[3] parameter(1)
      c = (f32[3], f32[3]) conditional(k, x, x), true_computation=doubled, false_computation=apart
      a = f32[3] get-tuple-element(c), index=0
      b = f32[3] get-tuple-element(c), index=1
      ROOT r = (f32[3], f32[3]) tuple(b, a) }"""
INTO = {
    "either": (EITHER, (), 2),  # into one place, as kernels of the reference make their results where they like
    "branches": (BRANCHES, (), None),
    "skipped": (SKIPPED, (), None),
    "skipped in place": (SKIPPED, (1, 2), 2),  # of the element that each update writes
    "alike": (ALIKE, (), None),
}


def copies(nodes: Sequence[Kernel | Body]) -> int:
    return sum(copies(n.nodes) if isinstance(n, Body) else n.name in ("aten::copy_", "aten::clone") for n in nodes)


@pytest.mark.parametrize("name", INTO)
def test_branches_make_results_where_they_are_wanted(name: str, rng: np.random.Generator) -> None:
    """Outputs of a recording, or arguments that are given away."""
    text, donated, wanted = INTO[name]
    plan = plan_of(text, donated)
    shapes = plan.shapes_of(plan.parameters)
    arguments = [torch.zeros(shape.dims, dtype=dtype_of(shape.element_type)) for shape in shapes]
    outputs = [torch.zeros(shape.dims, dtype=dtype_of(shape.element_type)) for shape in plan.result_shapes]
    with torch.inference_mode(), Tape() as tape:
        overwritten = run_into(plan, Run(conditionals=tape), [*arguments, *outputs])
    assert overwritten == (donated or (-1,) * len(outputs))
    if wanted is not None:
        assert copies(tape.nodes) == wanted
    for choice in (0, 1, 0, 2):
        fresh = [torch.from_numpy(rng.standard_normal(3).astype(np.float32)) for _ in arguments[1:]]
        values = [torch.tensor(choice).to(arguments[0].dtype), *fresh]
        for argument, value in zip(arguments, values, strict=True):
            argument.copy_(value)
        tape.play()
        with torch.inference_mode():
            expected = plan.run(Run(), [value.clone() for value in values])
        for output, argument, theirs in zip(outputs, overwritten, expected, strict=True):
            assert torch.equal(output if argument < 0 else arguments[argument], theirs)


def test_what_never_changes_is_not_copied() -> None:
    plan = plan_of(VIEWS)
    x = torch.ones(3)
    (step,) = [step for step in plan.steps if step.nested]
    seen: list[int] = []
    iteration = step.kernel.callees[1]

    def watched(run: Run, state: list[torch.Tensor]) -> list[torch.Tensor]:
        seen.append(state[2].data_ptr())
        assert state[1].data_ptr() != x.data_ptr()
        return list(iteration(run, state))

    step.kernel.callees = (step.kernel.callees[0], watched)
    recorded(plan, torch.tensor(2, dtype=torch.int32), x)
    assert seen == [x.data_ptr()]


@pytest.mark.parametrize("name", TEXTS)
def test_a_plan_is_recorded_whole_once_all_of_it_has_run(name: str) -> None:
    plan = plan_of(TEXTS[name])

    def run(iterations: int) -> None:
        with torch.inference_mode():
            plan.run(Run(), [torch.tensor(iterations, dtype=torch.int32), torch.ones(3)])

    def record(plan: Plan) -> PoisonedReplay:
        return PoisonedReplay(plan, Run())

    run(0)
    assert divide(plan, record, "").whole is None
    assert "and not all of it has run" in divide(plan, record, "").summary()
    for iterations in (1, 2, 3):
        run(iterations)
    assert divide(plan, record, "").whole is not None
    assert "goes on as data says: an old driver" in divide(plan, record, "an old driver").summary()


def test_what_cannot_be_recorded_in_a_body_says_so() -> None:
    call = 'custom-call(a), custom_call_target="flagos.host_callback", backend_config="{\\"id\\":7}"'
    plan = plan_of(SWAPPED.replace("add(a, b)", call))
    reasons = [reason_against(step, Limits(conditionals="", unrun="")) for step in plan.steps]
    assert any("calls the host" in reason for reason in reasons)


# ---- Nodes


class Driver:
    """Notes what is asked of it. Streams are numbers; the graph is captured on stream 1."""

    def __init__(self) -> None:
        self.calls: list[tuple[object, ...]] = []
        self.stream = self.streams = 1

    def open(self, accelerator: int, stream: int, flag: int, repeats: int, inside: int) -> tuple[int, int, int]:
        number = sum(call[0] == "open" for call in self.calls)
        self.calls.append(("open", stream, repeats, inside))
        return 100 + number, 200 + number, 300 + number

    def close(self, accelerator: int, inside: int, handle: int, flag: int) -> None:
        self.calls.append(("close", inside, handle, bool(flag)))

    def new_stream(self, device: torch.device) -> SimpleNamespace:
        self.streams += 1
        return SimpleNamespace(cuda_stream=self.streams)

    @contextlib.contextmanager
    def on_stream(self, stream: SimpleNamespace) -> Iterator[None]:
        before, self.stream = self.stream, stream.cuda_stream
        try:
            yield
        finally:
            self.stream = before

    def note(self, name: str) -> Callable[..., None]:
        return lambda *_: self.calls.append((name,))


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    driver = Driver()
    monkeypatch.setattr(memory_module, "own_stream", driver.new_stream)
    monkeypatch.setattr(memory_module, "_spare", {})
    monkeypatch.setattr(torch.cuda, "stream", driver.on_stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=driver.stream))
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 9))
    for name in ("_cuda_beginAllocateCurrentThreadToPool", "_cuda_endAllocateToPool", "_cuda_releasePool"):
        monkeypatch.setattr(torch._C, name, driver.note(name.removeprefix("_cuda_")), raising=False)
    return driver


def recorder_of(driver: Driver) -> ConditionalRecorder:
    device = torch.device("cpu", 0)
    native = NativeConditionals(0, lambda accelerator: None, driver.open, driver.close)
    return ConditionalRecorder(native, BodyMemory(device), device)


BEGIN, END, RELEASE = ("beginAllocateCurrentThreadToPool",), ("endAllocateToPool",), ("releasePool",)


def test_nodes_are_captured_inside_one_another(driver: Driver) -> None:
    recorder, flag = recorder_of(driver), torch.tensor(True)

    def iteration() -> torch.Tensor:
        recorder.run_if(flag, lambda: None)
        recorder.run_if(flag, lambda: None)
        return flag

    recorder.run_while(flag, iteration)
    recorder.run_if(flag, lambda: None)
    made = [BEGIN, END]  # the pool
    outer = [("open", 1, 1, 2), *made, BEGIN, ("open", 2, 0, 3), ("close", 3, 201, False), ("open", 2, 0, 3)]
    rest = [("close", 3, 202, False), ("close", 2, 200, True), END, RELEASE]
    again = [("open", 1, 0, 2), BEGIN, ("close", 2, 203, False), END, RELEASE]
    assert driver.calls == [*outer, *rest, *again]
    assert recorder.nodes == [(100 + n, 200 + n, 300 + n) for n in range(4)]


def test_a_body_that_breaks_is_ended_and_says_why(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    flag = torch.tensor(True)

    def invalidated(*arguments: int) -> None:
        driver.calls.append(("close", *arguments[1:]))
        raise RuntimeError("invalidated")

    def breaks() -> None:
        raise ValueError("not while capturing")

    def iteration() -> torch.Tensor:
        recorder.run_if(flag, breaks)
        return flag

    monkeypatch.setattr(driver, "close", invalidated)
    recorder = recorder_of(driver)
    with pytest.raises(ValueError, match="not while capturing"):
        recorder.run_while(flag, iteration)
    ends = [("close", 3, 0, 0), END, RELEASE, ("close", 2, 0, 0)]
    assert sorted(driver.calls[5:], key=str) == sorted(ends, key=str) and driver.stream == 1
    assert recorder.has_lost_body


def test_a_body_that_the_driver_ends_is_not_lost(driver: Driver) -> None:
    def breaks() -> None:
        raise ValueError("no fault of the driver's")

    recorder = recorder_of(driver)
    with pytest.raises(ValueError, match="no fault"):
        recorder.run_if(torch.tensor(True), breaks)
    assert not recorder.has_lost_body


def test_a_node_that_is_refused_has_no_body(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    flag, opened = torch.tensor(True), driver.open

    def refused(*arguments: int) -> tuple[int, int, int]:
        raise RuntimeError("making a conditional node: not supported")

    monkeypatch.setattr(driver, "open", refused)
    recorder = recorder_of(driver)
    with pytest.raises(RuntimeError, match="not supported"):
        recorder.run_if(flag, lambda: pytest.fail("runs"))
    assert driver.calls == [] and recorder.nodes == [] and driver.stream == 1
    monkeypatch.setattr(driver, "open", opened)
    recorder = recorder_of(driver)
    recorder.run_if(flag, lambda: None)
    assert len(recorder.nodes) == 1


def test_streams_are_those_of_one_memory_at_a_time(driver: Driver) -> None:
    device = torch.device("cpu", 0)
    kept, dropped = BodyMemory(device), BodyMemory(device)

    def numbers(memory: BodyMemory) -> list[int]:
        return [memory.stream(depth).cuda_stream for depth in (0, 1, 0)]

    assert numbers(kept) == [2, 3, 2] and numbers(dropped) == [4, 5, 4]
    del dropped
    gc.collect()
    again = BodyMemory(device)
    assert sorted(set(numbers(again))) == [4, 5] and numbers(kept) == [2, 3, 2]


def test_memory_of_bodies_stays_as_long_as_who_has_it(driver: Driver) -> None:
    recorder = recorder_of(driver)
    for _ in range(3):
        recorder.run_if(torch.tensor(True), lambda: None)
    assert driver.calls.count(BEGIN) == 4 and driver.calls.count(RELEASE) == 3
    del recorder
    gc.collect()
    assert driver.calls.count(RELEASE) == 4
