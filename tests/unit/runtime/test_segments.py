"""Plans that are divided: which steps stay outside and why, and that what replays hand on does not lie in their own
memory. Replays are run on poisoned memory; the oracle is the plan as it was."""

from __future__ import annotations

import os
import random
import re
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from flagos_backend.compile.plan_builder import build_plan
from flagos_backend.errors import CaptureRefused
from flagos_backend.importer import import_module
from flagos_backend.ir.types import leaves
from flagos_backend.kernels.reference import custom_calls
from flagos_backend.kernels.reference.registry import Run
from flagos_backend.runtime.accelerator import capturable, segments
from flagos_backend.runtime.accelerator.capturable import Limits, has_run, reason_against
from flagos_backend.runtime.accelerator.segments import Division, divide, outline
from flagos_backend.runtime.accelerator.warm_up import warm_up
from flagos_backend.runtime.plan import Plan
from programs import PROGRAMS
from support.against_xla import hlo_of_text, to_storage
from support.passes import simplified
from support.poisoned_replays import PoisonedReplay, assert_same, breaking_anywhere
from support.seeds import SEED_VARIABLE

CALLBACK = 'f32[4] custom-call(%s), custom_call_target="flagos.host_callback", backend_config="{\\"id\\":7}"'


def called_back(
    identifier: int, arguments: Sequence[torch.Tensor], shapes: object, results: object
) -> list[torch.Tensor]:
    return [arguments[0] * 3]


RUN = Run(host_callback=called_back)


def plan_of(text: str, donated: tuple[int, ...] = ()) -> Plan:
    with torch.inference_mode():
        return build_plan(import_module(hlo_of_text(text)).entry, donated)


def record(plan: Plan) -> PoisonedReplay:
    return PoisonedReplay(plan, RUN)


def run(plan: Plan, *arguments: torch.Tensor) -> list[torch.Tensor]:
    with torch.inference_mode():
        return plan.run(RUN, list(arguments))


def sizes(division: Division) -> list[int | str]:
    """Of each segment the number of steps, of everything else the reason."""
    return [len(part.segment.plan.steps) if part.segment else part.reason for part in division.parts]


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("ROOT y = f32[4] add(x, x)", ""),
        (f"ROOT y = {CALLBACK % 'x'}", "calls the host"),
        ("low = f32[] constant(0)\n top = f32[] constant(1)\n ROOT y = f32[4] rng(low, top), distribution=rng_uniform",
         "draws from a generator"),
        ("ROOT y = f32[4] all-gather(x), replica_groups={{0}}, dimensions={0}", "meets other devices"),
        ('m = f32[2,2] reshape(x)\n ROOT y = f32[2] custom-call(m), custom_call_target="flagos.svd",'
         ' backend_config="{\\"compute_uv\\": false}"', "waits to know whether it converged"),
        ('m = f32[2,2] reshape(x)\n ROOT y = (f32[2,2], f32[2]) custom-call(m), custom_call_target="Qr"', ""),
        ("ROOT y = f32[4] while(x), condition=small, body=twice", "goes on as data says"),
        ("i = s32[] constant(0)\n ROOT y = f32[4] conditional(i, x, x), branch_computations={twice, twice}",
         "goes on as data says"),
    ],
)  # fmt: skip
def test_what_stays_outside(body: str, reason: str) -> None:
    plan = plan_of(f"""
    twice {{ p = f32[4] parameter(0)
      ROOT r = f32[4] add(p, p) }}
    small {{ p = f32[4] parameter(0)
      s = f32[1] slice(p), slice={{[0:1]}}
      f = f32[] reshape(s)
      h = f32[] constant(100)
      ROOT r = pred[] compare(f, h), direction=LT }}
    ENTRY main {{ x = f32[4] parameter(0)
      {body} }}""")
    found = [reason_against(step, Limits()) for step in plan.steps]
    assert any(reason in each for each in found) and bool(reason) == any(found)


MIDDLE = f"""ENTRY main {{
  x = f32[4] parameter(0)
  a = f32[4] add(x, x)
  b = f32[4] multiply(a, x)
  c = f32[4] subtract(b, a)
  d = {CALLBACK % "c"}
  e = f32[4] add(d, b)
  f = f32[4] multiply(e, d)
  g = f32[4] subtract(f, a)
  ROOT both = (f32[4], f32[4]) tuple(g, e)
}}"""


def test_a_callback_in_the_middle_leaves_two_segments() -> None:
    plan = plan_of(MIDDLE)
    division = divide(plan, record)
    before, between, after = sizes(division)
    assert (before, "calls the host" in str(between), after) == (3, True, len(plan.steps) - 4)
    assert len(division.plan.steps) == 3 and division.whole is None
    x = torch.randn(4)
    for expected, result in zip(run(plan, x), run(division.plan, x), strict=True):
        assert torch.equal(expected, result)
    assert [part.segment.launches for part in division.parts if part.segment] == [1, 1]
    assert division.summary() == "replayed in 2 segments: custom-call d calls the host"
    assert "segment: 3 steps (0 to 2 of main) as a poisoned replay, launched 1 times" in str(division)


def test_a_plan_without_such_steps_is_replayed_whole() -> None:
    plan = plan_of("ENTRY main { x = f32[4] parameter(0)\n ROOT y = f32[4] abs(x) }")
    division = divide(plan, record)
    assert division.whole is not None and division.plan is plan
    assert division.summary() == "replayed as a poisoned replay"


def test_what_is_shorter_than_a_replay_costs_is_left() -> None:
    division = divide(plan_of(f"""ENTRY main {{
      x = f32[4] parameter(0)
      a = f32[4] add(x, x)
      b = f32[4] negate(a)
      c = {CALLBACK % "b"}
      ROOT d = f32[4] add(c, c) }}"""), record)  # fmt: skip
    short, between, rest = sizes(division)
    assert "2 steps" in str(short) and "calls the host" in str(between) and "steps" in str(rest)
    assert division.summary().startswith("not replayed: ")


LOOP = """
body {
  p = (s32[], f32[4], f32[4]) parameter(0)
  i = s32[] get-tuple-element(p), index=0
  x = f32[4] get-tuple-element(p), index=1
  w = f32[4] get-tuple-element(p), index=2
  one = s32[] constant(1)
  j = s32[] add(i, one)
  a = f32[4] multiply(x, w)
  b = f32[4] add(a, x)
  v = f32[1] slice(b), slice={[0:1]}
  y = f32[4] dynamic-update-slice(b, v, one)
  ROOT r = (s32[], f32[4], f32[4]) tuple(j, y, w)
}
condition {
  p = (s32[], f32[4], f32[4]) parameter(0)
  x = f32[4] get-tuple-element(p), index=1
  s = f32[1] slice(x), slice={[0:1]}
  f = f32[] reshape(s)
  h = f32[] constant(100)
  ROOT r = pred[] compare(f, h), direction=LT
}
ENTRY main {
  x = f32[4] parameter(0)
  w = f32[4] parameter(1)
  zero = s32[] constant(0)
  t = (s32[], f32[4], f32[4]) tuple(zero, x, w)
  ROOT l = (s32[], f32[4], f32[4]) while(t), condition=condition, body=body
}"""


def test_an_iteration_of_a_loop_that_depends_on_data_is_one_segment() -> None:
    """With its condition: an iteration costs one launch, and reading whether there is another one."""
    plan = plan_of(LOOP, donated=(0,))
    run(plan, torch.tensor([1.0, 2, 3, 4]), torch.ones(4))
    division = divide(plan, record)
    (iteration,) = [part.segment for part in division.parts if part.segment and "body" in part.segment.plan.name]
    for _ in range(3):
        launches = iteration.launches
        x, w = torch.tensor([1.0, 2, 3, 4]), torch.rand(4) + 1
        expected, results = run(plan, x.clone(), w), run(division.plan, x.clone(), w)
        for ours, theirs in zip(results, expected, strict=True):
            assert torch.equal(ours, theirs)
        assert iteration.launches - launches == int(results[0])


def test_a_loop_with_a_callback_is_divided_inside() -> None:
    text = LOOP.replace(
        "a = f32[4] multiply(x, w)", f"k = {CALLBACK % 'x'}\n  q = f32[4] add(k, w)\n  a = f32[4] abs(q)"
    )
    plan = plan_of(text)
    x, w = torch.tensor([1.0, 2, 3, 4]), torch.rand(4)
    expected = run(plan, x, w)
    division = divide(plan, record)
    for ours, theirs in zip(run(division.plan, x, w), expected, strict=True):
        assert torch.equal(ours, theirs)
    inside = [part for part in division.parts if part.depth == 1]
    assert any("calls the host" in part.reason for part in inside) and any(part.segment for part in inside)


def test_a_branch_that_has_not_run_is_not_recorded() -> None:
    """Its kernels may have to be built or measured first, which no recording allows."""
    chain = "\n".join(f"x{n + 1} = f32[4] add(x{n}, x{n})" for n in range(4))
    plan = plan_of(f"""
    one {{ x0 = f32[4] parameter(0)
      {chain}
      ROOT r = f32[4] negate(x4) }}
    two {{ x0 = f32[4] parameter(0)
      {chain}
      ROOT r = f32[4] abs(x4) }}
    ENTRY main {{ k = pred[] parameter(0)
      x = f32[4] parameter(1)
      ROOT c = f32[4] conditional(k, x, x), true_computation=one, false_computation=two }}""")
    run(plan, torch.tensor(True), torch.randn(4))
    division = divide(plan, record)
    assert [part.segment.plan.name for part in division.parts if part.segment] == ["0 to 4 of one"]
    assert "two has not run yet" in str(division)
    for choice in (True, False, True):
        k, x = torch.tensor(choice), torch.randn(4)
        assert torch.equal(*run(plan, k, x), *run(division.plan, k, x))


NEVER = "s = f32[1] slice(x0), slice={[0:1]}\n f = f32[] reshape(s)\n ROOT k = pred[] compare(f, f), direction=EQ"
# A branch with a loop that never ends on zeros, and one that is never taken in it.
UNTRIED = f"""
    condition {{ p = f32[4] parameter(0)
      {NEVER.replace("x0", "p")} }}
    body {{ p = f32[4] parameter(0)
      a = f32[4] add(p, p)
      b = f32[4] multiply(a, p)
      ROOT c = f32[4] subtract(b, a) }}
    one {{ x0 = f32[4] parameter(0)
      ROOT r = f32[4] negate(x0) }}
    two {{ x0 = f32[4] parameter(0)
      ROOT w = f32[4] while(x0), condition=condition, body=body }}
    ENTRY main {{ k = pred[] parameter(0)
      x = f32[4] parameter(1)
      y = f32[4] sine(x)
      c = f32[4] conditional(k, y, y), true_computation=one, false_computation=two
      z = f32[4] cosine(c)
      ROOT d = f32[4] multiply(z, x) }}"""


def warming_up(plan: Plan) -> None:
    warm_up(plan, RUN)


def test_what_has_not_run_is_warmed_up_before_it_is_recorded() -> None:
    """Whatever data says; and of a loop there is one iteration."""
    plan = plan_of(UNTRIED)
    run(plan, torch.tensor(True), torch.randn(4))
    assert divide(plan, record, "").whole is None
    warmed_up: list[str] = []

    def noted(plan: Plan) -> None:
        warmed_up.append(plan.name)
        warming_up(plan)

    assert divide(plan, segments._Unrecorded, "", noted).whole is not None
    assert warmed_up == ["main"] and all(map(has_run, plan.steps))
    assert divide(plan, segments._Unrecorded, "", noted).whole is not None
    assert warmed_up == ["main"]  # there is nothing new


def test_what_never_ran_is_recorded_in_parts_where_the_host_decides() -> None:
    plan = plan_of(UNTRIED)
    run(plan, torch.tensor(True), torch.randn(4))
    division = divide(plan, record, warm_up=warming_up)
    assert re.search("segment: . steps .0 to . of body, condition. as", str(division))
    k, x = torch.tensor(True), torch.randn(4)
    assert torch.equal(*run(plan, k, x), *run(division.plan, k, x))


def test_a_warm_up_that_breaks_leaves_what_it_was_for_to_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where memory runs out, which may be in a step that has run before."""
    monkeypatch.setattr(segments, "MIN_STEPS", 1)
    plan = plan_of(UNTRIED)
    run(plan, torch.tensor(True), torch.randn(4))
    tries: list[str] = []

    def runs_out(run: Run, *_: object) -> torch.Tensor:
        raise torch.OutOfMemoryError("60 GiB")

    def warmed_up(plan: Plan) -> None:
        tries.append(plan.name)
        warming_up(replace(plan, steps=(replace(plan.steps[0], kernel=runs_out), *plan.steps[1:])))

    division = divide(plan, record, "", warmed_up)
    assert tries == ["main"]
    assert "broke in a warm-up: OutOfMemoryError: 60 GiB in #2 = y: f32[4] sine" in str(division)
    assert "and not all of it has run" in str(division) and "two has not run yet" in str(division)
    names = [part.segment.plan.name for part in division.parts if part.segment]
    assert names == ["0 to 0 of main", "0 to 0 of one", f"2 to {len(plan.steps) - 1} of main"]
    k, x = torch.tensor(True), torch.randn(4)
    assert torch.equal(*run(plan, k, x), *run(division.plan, k, x))


def test_a_scalar_function_that_loops_stays_outside() -> None:
    """A warm-up of it might not end."""
    plan = plan_of("""
    less { p = f32[] parameter(0)
      h = f32[] constant(100)
      ROOT r = pred[] compare(p, h), direction=LT }
    twice { p = f32[] parameter(0)
      ROOT r = f32[] add(p, p) }
    grown { p = f32[] parameter(0)
      ROOT w = f32[] while(p), condition=less, body=twice }
    ENTRY main { x = f32[4] parameter(0)
      ROOT y = f32[4] map(x), dimensions={0}, to_apply=grown }""")
    assert any("map y loops in a scalar function" in reason_against(step, Limits()) for step in plan.steps)


def test_loops_that_are_too_long_are_recorded_iteration_by_iteration(monkeypatch: pytest.MonkeyPatch) -> None:
    text = re.sub("pred.. compare.f, h., direction=LT", "pred[] compare(i, n), direction=LT", LOOP)
    counter = "  i = s32[] get-tuple-element(p), index=0\n  n = s32[] constant(7)\n"
    text = text.replace("  h = f32[] constant(100)\n", counter)
    module = simplified(import_module(hlo_of_text(text)))
    with torch.inference_mode():
        plan = build_plan(module.entry)
    x, w = torch.randn(4), torch.randn(4)
    expected = run(plan, x, w)
    assert divide(plan, record).whole is not None
    monkeypatch.setattr(capturable, "MAX_STEPS", 10)
    division = divide(plan, record)
    assert division.whole is None and "steps, more than 10" in str(division)
    for ours, theirs in zip(run(division.plan, x, w), expected, strict=True):
        assert torch.equal(ours, theirs)
    (loop,) = [part.segment for part in division.parts if part.segment]
    assert loop.launches == 7


def test_long_plans_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "MAX_STEPS", 4)
    chain = "\n".join(f"x{n + 1} = f32[4] add(x{n}, x{n})" for n in range(10))
    plan = plan_of(f"ENTRY main {{ x0 = f32[4] parameter(0)\n{chain}\n ROOT r = f32[4] negate(x10) }}")
    division = divide(plan, record)
    assert [size for size in sizes(division) if isinstance(size, int)] == [4, 4, 4]
    x = torch.randn(4)
    assert torch.equal(*run(plan, x), *run(division.plan, x))


class Breaking:
    """Refuses every recording that holds a step of ``instruction``: in that step, or without saying where."""

    def __init__(self, instruction: str, says: bool) -> None:
        self._instruction = instruction
        self._says = says
        self.tries = 0

    def __call__(self, plan: Plan) -> PoisonedReplay:
        self.tries += 1
        for number, step in enumerate(plan.steps):
            if step.instruction is not None and step.instruction.name == self._instruction:
                refusal = CaptureRefused(reason=f"{self._instruction} breaks")
                refusal.step = number if self._says else None
                raise refusal
        return record(plan)


CHAIN = "\n".join(f"x{n + 1} = f32[4] add(x{n}, x{n})" for n in range(40))


@pytest.mark.parametrize("says", [True, False])
def test_what_breaks_stays_outside_and_the_rest_is_tried_again(says: bool) -> None:
    plan = plan_of(f"ENTRY main {{ x0 = f32[4] parameter(0)\n{CHAIN}\n ROOT r = f32[4] negate(x40) }}")
    breaking = Breaking("x17", says)
    division = divide(plan, breaking)
    replayed = sum(size for size in sizes(division) if isinstance(size, int))
    assert breaking.tries == 3 if says else breaking.tries < 12
    assert replayed >= len(plan.steps) - (1 if says else 5)
    assert any("x17 breaks" in str(size) for size in sizes(division))
    assert any(part.cut for part in division.parts) is not says
    x = torch.randn(4)
    assert torch.equal(*run(plan, x), *run(division.plan, x))


@pytest.mark.parametrize("says", [True, False])
def test_a_tuple_stays_with_the_step_that_takes_it(says: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is made by a step of its own, and replays pass arrays only."""
    monkeypatch.setattr(segments, "MIN_STEPS", 1)
    monkeypatch.setattr(custom_calls, "_TARGETS", dict(custom_calls._TARGETS))
    custom_calls.custom_call("flagos.test_tuples")(
        lambda instruction, config: lambda run, t, u: torch.cat([t[0] + t[1], u[0] - u[1]])
    )
    plan = plan_of("""ENTRY main {
      x = f32[4] parameter(0)
      a = f32[4] add(x, x)
      b = f32[4] multiply(a, x)
      t = (f32[4], f32[4]) tuple(a, b)
      u = (f32[4], f32[4]) tuple(b, a)
      taken = f32[8] custom-call(t, u), custom_call_target="flagos.test_tuples"
      c = f32[8] add(taken, taken)
      ROOT d = f32[8] multiply(c, taken) }""")
    assert sum(plan.shapes[slot] is None for step in plan.steps for slot in step.results) == 2
    for breaking in (Breaking("taken", says), Breaking("c", says), Breaking("b", says)):
        division = divide(plan, breaking)
        assert any(part.segment for part in division.parts)
        x = torch.randn(4)
        assert torch.equal(*run(plan, x), *run(division.plan, x))


def test_tries_are_bounded() -> None:
    calls = 0

    def refuse(plan: Plan) -> PoisonedReplay:
        nonlocal calls
        calls += 1
        raise CaptureRefused(reason="never")

    plan = plan_of(f"ENTRY main {{ x0 = f32[4] parameter(0)\n{CHAIN}\n ROOT r = f32[4] negate(x40) }}")
    division = divide(plan, refuse)
    assert calls <= segments.MAX_REFUSALS
    assert len(division.plan.steps) == len(plan.steps)
    assert division.summary().startswith("not replayed: never")


def test_an_outline_says_what_would_be_divided() -> None:
    text = str(outline(plan_of(MIDDLE)))
    assert "replayed in 2 segments" in text and "3 steps (0 to 2 of main) as a graph, after its first runs" in text
    assert "outside: custom-call d calls the host" in text


# What lives out of a segment, v and w, by how it shares storage with what lives in.
SHARING = {
    "a view of an argument": """b = f32[2,2] reshape(x)
      v = f32[4] reshape(b)
      w = f32[4] reverse(v), dimensions={0}""",
    "an argument written over": """b = f32[4] add(y, y)
      w = f32[4] add(b, x)
      v = f32[4] dynamic-update-slice(y, u, i)""",
    "views of one value": """b = f32[4] add(x, x)
      c = f32[2,2] reshape(b)
      v = f32[4] reshape(c)
      h = f32[2] slice(b), slice={[0:2]}
      w = f32[4] pad(h, z), padding=0_2""",
    "a broadcast": """b = f32[1] slice(x), slice={[0:1]}
      c = f32[] reshape(b)
      v = f32[4] broadcast(c), dimensions={}
      w = f32[4] reverse(v), dimensions={0}""",
    "a constant": """b = f32[4] constant({1,2,3,4})
      c = f32[2,2] reshape(b)
      v = f32[4] reshape(c)
      w = f32[4] reverse(b), dimensions={0}""",
    "parts of an argument": """b = f32[2] slice(x), slice={[0:2]}
      v = f32[4] pad(b, z), padding=0_2
      c = f32[2] slice(x), slice={[2:4]}
      w = f32[4] pad(c, z), padding=2_0""",
    "arrays without elements": """b = f32[0] slice(x), slice={[1:1]}
      c = f32[0] add(b, b)
      v = f32[4] pad(c, z), padding=0_4
      w = f32[4] pad(b, z), padding=4_0""",
}


@pytest.mark.parametrize("what", SHARING)
@pytest.mark.parametrize("donated", [(), (0, 1)])
def test_what_is_handed_on(what: str, donated: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "MIN_STEPS", 1)
    text = f"""ENTRY main {{
      x = f32[4] parameter(0)
      y = f32[4] parameter(1)
      u = f32[1] constant({{7}})
      i = s32[] constant(2)
      z = f32[] constant(0)
      {SHARING[what]}
      called = {CALLBACK % "v"}
      again = f32[4] add(called, v)
      ROOT all = (f32[4], f32[4], f32[4], f32[4]) tuple(again, v, w, x) }}"""
    plan = plan_of(text, donated)
    division = divide(plan, record)
    assert any(part.segment for part in division.parts)
    for _ in range(2):
        x, y = torch.randn(4), torch.randn(4)
        expected, results = run(plan, x.clone(), y.clone()), run(division.plan, x.clone(), y.clone())
        for ours, theirs in zip(results, expected, strict=True):
            assert torch.equal(ours, theirs)


@pytest.mark.parametrize("name", random.Random(os.environ[SEED_VARIABLE]).sample(sorted(PROGRAMS), 25))
def test_programs_of_the_corpus_divided_anywhere(
    name: str, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segments, "MIN_STEPS", 1)
    monkeypatch.setattr(segments, "MAX_REFUSALS", 1000)
    program, seed = PROGRAMS[name], int(rng.integers(1 << 31))
    arrays = program.arguments()
    module = import_module(program.hlo())
    shapes = [leaf for parameter in module.entry.parameters for leaf in leaves(parameter.shape)]

    def arguments() -> list[torch.Tensor]:
        return [to_storage(np.asarray(array), shape) for array, shape in zip(arrays, shapes, strict=True)]

    with torch.inference_mode():
        plan = build_plan(module.entry, [n for n in range(len(shapes)) if rng.random() < 0.5])
        expected = plan.run(RUN, arguments())
        division = divide(plan, breaking_anywhere(seed, record))
        for _ in range(2):
            for ours, theirs in zip(division.plan.run(RUN, arguments()), expected, strict=True):
                assert_same(ours, theirs, f"seed {seed}")


RENDEZVOUS = """
sum { a = f32[] parameter(0)
  b = f32[] parameter(1)
  ROOT r = f32[] add(a, b) }
iteration { p = (s32[], f32[4]) parameter(0)
  i = s32[] get-tuple-element(p), index=0
  x = f32[4] get-tuple-element(p), index=1
  one = s32[] constant(1)
  n = s32[] add(i, one)
  t = f32[4] all-reduce(x), to_apply=sum
  s = f32[4] sine(t)
  e = f32[4] exponential(s)
  c = f32[4] custom-call(e), custom_call_target="flagos.host_callback", backend_config="{\\"id\\":7}"
  v = f32[4] cosine(c)
  u = f32[4] all-reduce(v), to_apply=sum
  y = f32[4] tanh(u)
  z = f32[4] add(y, v)
  ROOT r = (s32[], f32[4]) tuple(n, z) }
few { p = (s32[], f32[4]) parameter(0)
  i = s32[] get-tuple-element(p), index=0
  three = s32[] constant(3)
  ROOT r = pred[] compare(i, three), direction=LT }
small { p = (s32[], f32[4]) parameter(0)
  x = f32[4] get-tuple-element(p), index=1
  f = f32[1] slice(x), slice={[0:1]}
  s = f32[] reshape(f)
  h = f32[] constant(1.5)
  ROOT r = pred[] compare(s, h), direction=GT }
ENTRY main { x = f32[4] parameter(0)
  z = s32[] constant(0)
  a = (s32[], f32[4]) tuple(z, x)
  w = (s32[], f32[4]) while(a), condition=CONDITION, body=iteration
  b = f32[4] get-tuple-element(w), index=1
  d = (s32[], f32[4]) tuple(z, b)
  v = (s32[], f32[4]) while(d), condition=CONDITION, body=iteration
  ROOT r = f32[4] get-tuple-element(v), index=1 }"""


@pytest.mark.parametrize(("condition", "meets"), [("few", True), ("small", False)])
def test_segments_in_which_devices_meet(condition: str, meets: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one body, which two loops run, each segment is its own; where data decides, devices may go on without others,
    which a segment would wait for."""
    monkeypatch.setattr(segments, "MIN_STEPS", 1)
    plan = build_plan(simplified(import_module(hlo_of_text(RENDEZVOUS.replace("CONDITION", condition)))).entry)
    run(plan, torch.full((4,), 2.0))
    division = divide(plan, segments._Unrecorded, no_rendezvous="")
    assert len(division.rendezvous) == (4 if meets else 0)
    assert ("all-reduce t meets other devices" in str(division)) != meets


def test_a_plan_in_which_devices_meet_is_one_recording() -> None:
    plan = plan_of(
        RENDEZVOUS.partition("iteration {")[0]
        + """ENTRY main { x = f32[4] parameter(0)
      a = f32[4] all-reduce(x), to_apply=sum
      ROOT r = f32[4] sine(a) }"""
    )
    division = divide(plan, segments._Unrecorded, no_rendezvous="")
    assert division.whole is not None and list(division.rendezvous) == [()]
    assert "meets other devices: its devices meet on the host" in divide(plan, record).summary()
