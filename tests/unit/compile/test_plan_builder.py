"""Plans: steps, storage given up at the last use, writing in place only where it is safe, control flow, donation."""

from __future__ import annotations

import threading
import weakref

import numpy as np
import pytest
import torch

from flagos_backend.compile.plan_builder import build_plan
from flagos_backend.errors import ProgramTooLarge, UnsupportedOpcode
from flagos_backend.importer import import_module
from flagos_backend.ir import instruction_count
from flagos_backend.ir.attributes import ParameterAttributes
from flagos_backend.ir.hlo import Computation, Instruction
from flagos_backend.ir.opcode import Opcode
from flagos_backend.ir.types import ArrayShape, ElementType
from flagos_backend.kernels.reference import registry
from flagos_backend.kernels.reference.registry import Run
from flagos_backend.runtime.plan import Plan
from support.against_xla import check, hlo_of_text


def plan_of(text: str, donated: tuple[int, ...] = ()) -> Plan:
    return build_plan(import_module(hlo_of_text(text)).entry, donated)


def run(plan: Plan, *arguments: torch.Tensor) -> list[torch.Tensor]:
    with torch.inference_mode():
        return plan.run(Run(), list(arguments))


SCAN = """
body {
  p = (s32[], f32[1000], f32[1000]) parameter(0)
  i = s32[] get-tuple-element(p), index=0
  x = f32[1000] get-tuple-element(p), index=1
  out = f32[1000] get-tuple-element(p), index=2
  v = f32[1] dynamic-slice(x, i), dynamic_slice_sizes={1}
  w = f32[1] add(v, v)
  n = f32[1000] dynamic-update-slice(out, w, i)
  one = s32[] constant(1)
  j = s32[] add(i, one)
  ROOT t = (s32[], f32[1000], f32[1000]) tuple(j, x, n) }
condition {
  p = (s32[], f32[1000], f32[1000]) parameter(0)
  i = s32[] get-tuple-element(p), index=0
  n = s32[] constant(1000)
  ROOT r = pred[] compare(i, n), direction=LT }
ENTRY e {
  x = f32[1000] parameter(0)
  zero = s32[] constant(0)
  start = f32[] constant(0)
  out = f32[1000] broadcast(start), dimensions={}
  t = (s32[], f32[1000], f32[1000]) tuple(zero, x, out)
  w = (s32[], f32[1000], f32[1000]) while(t), condition=condition, body=body
  ROOT r = f32[1000] get-tuple-element(w), index=2 }"""


def test_scan_writes_its_output_in_place() -> None:
    plan = plan_of(SCAN)
    explained = plan.explain()
    assert "dynamic-update-slice" in explained
    assert "over #" in explained
    # The first output is a broadcast constant: its elements share one place, so it is copied once, and never again.
    assert "copies first 2" in explained
    assert "copies each iteration" not in explained
    x = torch.randn(1000)
    (result,) = run(plan, x)
    torch.testing.assert_close(result, x + x, rtol=0, atol=0)


def test_tuples_and_calls_cost_no_step() -> None:
    plan = plan_of("""
    f { a = f32[2] parameter(0)
      b = f32[2] parameter(1)
      ROOT t = (f32[2], f32[2]) tuple(b, a) }
    ENTRY e { x = f32[2] parameter(0)
      y = f32[2] parameter(1)
      c = (f32[2], f32[2]) call(x, y), to_apply=f
      u = f32[2] get-tuple-element(c), index=0
      v = f32[2] get-tuple-element(c), index=1
      ROOT r = f32[2] subtract(u, v) }""")
    assert [step.text.split(" ")[4].split("(")[0] for step in plan.steps][:1] == ["subtract"]
    (result,) = run(plan, torch.tensor([1.0, 2.0]), torch.tensor([5.0, 5.0]))
    assert result.tolist() == [4.0, 3.0]


def test_unused_instructions_are_not_run() -> None:
    plan = plan_of("""ENTRY e { x = f32[2] parameter(0)
      unused = f32[2] exponential(x)
      ROOT r = f32[2] negate(x) }""")
    assert "exponential" not in plan.explain()


def test_values_are_freed_at_their_last_use() -> None:
    alive: list[int] = []
    plan = plan_of("""ENTRY e { x = f32[4] parameter(0)
      a = f32[4] negate(x)
      b = f32[4] abs(a)
      c = f32[4] negate(b)
      ROOT d = f32[4] abs(c) }""")
    arguments = [torch.randn(4)]
    reference = weakref.ref(arguments[0])
    second = plan.steps[1]

    def watch(run: Run, value: torch.Tensor) -> torch.Tensor:
        alive.append(reference() is not None)
        return second.kernel(run, value)

    watched = [(watch if kernel is second.kernel else kernel, *rest) for kernel, *rest in plan._compiled]
    object.__setattr__(plan, "_compiled", tuple(watched))
    with torch.inference_mode():
        plan.run(Run(), arguments)
    assert arguments == []
    assert alive == [False]


# Each program updates a value in place if it may; the note says why it may not.
ALIASING = {
    "the operand is used later": """
      u = f32[8] dynamic-update-slice(y, v, i)
      ROOT r = f32[8] add(u, y)""",
    "a view of the operand is used later": """
      s = f32[8] reverse(y), dimensions={}
      t = f32[2,4] reshape(y)
      u = f32[8] dynamic-update-slice(y, v, i)
      w = f32[8] reshape(t)
      ROOT r = f32[8] subtract(u, w)""",
    "the operand is a result": """
      u = f32[8] dynamic-update-slice(y, v, i)
      ROOT r = (f32[8], f32[8]) tuple(y, u)""",
    "the operand is an argument": """
      u = f32[8] dynamic-update-slice(x, v, i)
      ROOT r = f32[8] add(u, u)""",
    "a view of an argument": """
      t = f32[2,4] reshape(x)
      b = f32[8] reshape(t)
      u = f32[8] dynamic-update-slice(b, v, i)
      ROOT r = f32[8] add(u, u)""",
    "the operand is a constant": """
      c = f32[8] constant({1,2,3,4,5,6,7,8})
      u = f32[8] dynamic-update-slice(c, v, i)
      ROOT r = f32[8] add(u, x)""",
    "elements of the operand share a place": """
      q = f32[] constant(3)
      m = f32[] negate(q)
      c = f32[8] broadcast(m), dimensions={}
      u = f32[8] dynamic-update-slice(c, v, i)
      ROOT r = f32[8] add(u, x)""",
    "the update is a view of the operand": """
      h = f32[2] slice(y), slice={[1:3]}
      u = f32[8] dynamic-update-slice(y, h, i)
      ROOT r = f32[8] add(u, x)""",
}


@pytest.mark.parametrize("reason", ALIASING)
def test_no_write_in_place_when(reason: str, rng: np.random.Generator) -> None:
    text = f"""ENTRY e {{
      x = f32[8] parameter(0)
      v = f32[2] parameter(1)
      i = s32[] constant(2)
      y = f32[8] multiply(x, x)
      {ALIASING[reason]} }}"""
    steps = [step for step in plan_of(text).steps if "dynamic-update-slice" in step.text]
    assert all(" over #" not in step.text for step in steps)
    check(text, *(rng.integers(-9, 9, n).astype(np.float32) for n in (8, 2)))


def test_write_in_place_when_nobody_else_reads(rng: np.random.Generator) -> None:
    text = """ENTRY e {
      x = f32[8] parameter(0)
      v = f32[2] parameter(1)
      i = s32[] constant(2)
      y = f32[8] multiply(x, x)
      t = f32[2,4] reshape(y)
      z = f32[8] reshape(t)
      ROOT u = f32[8] dynamic-update-slice(z, v, i) }"""
    assert " over #" in plan_of(text).explain()
    check(text, *(rng.standard_normal(n).astype(np.float32) for n in (8, 2)))


UPDATE = """ENTRY e {
  x = f32[8] parameter(0)
  v = f32[2] parameter(1)
  i = s32[] constant(2)
  ROOT u = f32[8] dynamic-update-slice(x, v, i) }"""


def test_donated_argument_is_written_over() -> None:
    x, v = torch.zeros(8), torch.ones(2)
    address = x.data_ptr()
    (result,) = run(plan_of(UPDATE, donated=(0,)), x, v)
    assert result.data_ptr() == address
    assert result.tolist() == [0, 0, 1, 1, 0, 0, 0, 0]


def test_argument_that_is_not_donated_is_untouched() -> None:
    x, v = torch.zeros(8), torch.ones(2)
    (result,) = run(plan_of(UPDATE), x, v)
    assert x.tolist() == [0.0] * 8
    assert result.tolist() == [0, 0, 1, 1, 0, 0, 0, 0]


RESULTS = {
    "an argument": "ROOT r = f32[4] copy(x)",
    "a view of an argument": "ROOT r = f32[2,2] reshape(x)",
    "a constant": "ROOT r = f32[2] constant({1,2})",
    "one value twice": "n = f32[4] negate(x)\n ROOT r = (f32[4], f32[4]) tuple(n, n)",
    "two views of one value": """n = f32[4] negate(x)
        a = f32[2,2] reshape(n)
        b = f32[2] slice(n), slice={[0:2]}
        ROOT r = (f32[2,2], f32[2]) tuple(a, b)""",
    "a broadcast": """s = f32[1] slice(x), slice={[0:1]}
        q = f32[] reshape(s)
        ROOT r = f32[3,3] broadcast(q), dimensions={}""",
    "a transposed value": """n = f32[4] negate(x)
        m = f32[2,2] reshape(n)
        ROOT r = f32[2,2] transpose(m), dimensions={1,0}""",
}


@pytest.mark.parametrize("what", RESULTS)
def test_results_have_storage_of_their_own(what: str) -> None:
    plan = plan_of(f"ENTRY e {{ x = f32[4] parameter(0)\n {RESULTS[what]} }}")
    x = torch.arange(4.0)
    first, second = run(plan, x), run(plan, x)
    storages = [t.untyped_storage().data_ptr() for t in (*first, *second, x)]
    assert len(set(storages)) == len(storages)
    for before, after in zip(first, second, strict=True):
        assert before.is_contiguous()
        kept = after.clone()
        with torch.inference_mode():
            before.fill_(99)
        assert torch.equal(after, kept)
    assert x.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("choice", [0, 1])
@pytest.mark.parametrize("first_is_passed_on", [True, False])
def test_a_branch_that_passes_an_argument_on(choice: int, first_is_passed_on: bool, rng: np.random.Generator) -> None:
    """Beside one that computes: the result has storage of its own, and an update of it leaves the argument alone."""
    branches = "one, two" if first_is_passed_on else "two, one"
    operands = "x, z" if first_is_passed_on else "z, x"
    text = f"""
    one {{ ROOT p = f32[4] parameter(0) }}
    two {{ p = f32[4] parameter(0)
      ROOT r = f32[4] negate(p) }}
    ENTRY e {{
      k = s32[] parameter(0)
      x = f32[4] parameter(1)
      z = f32[4] parameter(2)
      c = f32[4] conditional(k, {operands}), branch_computations={{{branches}}}
      %s }}"""
    x, z = (torch.from_numpy(a) for a in rng.standard_normal((2, 4)).astype(np.float32))
    kept, expected = x.clone(), x if first_is_passed_on == (choice == 0) else -z
    (result,) = run(plan_of(text % "ROOT r = f32[4] copy(c)"), torch.tensor(choice, dtype=torch.int32), x, z)
    assert torch.equal(result, expected)
    assert result.data_ptr() not in (x.data_ptr(), z.data_ptr())
    update = """v = f32[2] constant({8,9})
      at = s32[] constant(1)
      ROOT r = f32[4] dynamic-update-slice(c, v, at)"""
    (result,) = run(plan_of(text % update), torch.tensor(choice, dtype=torch.int32), x, z)
    assert result.tolist() == [expected[0].item(), 8, 9, expected[3].item()]
    assert torch.equal(x, kept)


# Loop bodies whose results meet the same storage again in the next iteration.
LOOPS = {
    "swaps": "ROOT t = (s32[], f32[4], f32[4]) tuple(j, b, u)",
    "duplicates": "ROOT t = (s32[], f32[4], f32[4]) tuple(j, u, u)",
    "keeps the old value": "ROOT t = (s32[], f32[4], f32[4]) tuple(j, u, a)",
    "resets to a constant": """c = f32[4] constant({1,2,3,4})
        ROOT t = (s32[], f32[4], f32[4]) tuple(j, c, u)""",
    "resets to a broadcast": """q = f32[] constant(2)
        c = f32[4] broadcast(q), dimensions={}
        ROOT t = (s32[], f32[4], f32[4]) tuple(j, c, u)""",
    "views of each other": """h = f32[4] reverse(u), dimensions={0}
        m = f32[2,2] reshape(u)
        g = f32[4] reshape(m)
        ROOT t = (s32[], f32[4], f32[4]) tuple(j, g, u)""",
    "both in place": """w = f32[4] dynamic-update-slice(b, v, zero)
        ROOT t = (s32[], f32[4], f32[4]) tuple(j, w, u)""",
}


@pytest.mark.parametrize("kind", LOOPS)
@pytest.mark.parametrize("initial", ["x, x", "x, y", "n, n", "n, y", "d, n", "d, d"])
@pytest.mark.parametrize("iterations", [0, 1, 2, 5])
def test_loops(kind: str, initial: str, iterations: int, rng: np.random.Generator) -> None:
    text = f"""
    body {{
      p = (s32[], f32[4], f32[4]) parameter(0)
      i = s32[] get-tuple-element(p), index=0
      a = f32[4] get-tuple-element(p), index=1
      b = f32[4] get-tuple-element(p), index=2
      zero = s32[] constant(0)
      one = s32[] constant(1)
      j = s32[] add(i, one)
      s = f32[1] dynamic-slice(b, i), dynamic_slice_sizes={{1}}
      f = f32[] constant(0.5)
      h1 = f32[1] reshape(f)
      v = f32[1] add(s, h1)
      u = f32[4] dynamic-update-slice(a, v, i)
      {LOOPS[kind]} }}
    condition {{
      p = (s32[], f32[4], f32[4]) parameter(0)
      i = s32[] get-tuple-element(p), index=0
      n = s32[] constant({iterations})
      ROOT r = pred[] compare(i, n), direction=LT }}
    ENTRY e {{
      x = f32[4] parameter(0)
      y = f32[4] parameter(1)
      n = f32[4] negate(x)
      q = f32[] constant(7)
      d = f32[4] broadcast(q), dimensions={{}}
      zero = s32[] constant(0)
      t = (s32[], f32[4], f32[4]) tuple(zero, {initial})
      w = (s32[], f32[4], f32[4]) while(t), condition=condition, body=body
      o = f32[4] get-tuple-element(w), index=1
      k = f32[4] get-tuple-element(w), index=2
      s = f32[4] subtract(n, x)
      ROOT r = (f32[4], f32[4], f32[4], f32[4]) tuple(o, k, s, n) }}"""
    check(text, *rng.standard_normal((2, 4)).astype(np.float32))


@pytest.mark.parametrize("choice", [-1, 0, 1, 2, 5])
def test_conditional_takes_the_last_branch_out_of_range(choice: int, rng: np.random.Generator) -> None:
    text = """
    one { p = f32[4] parameter(0)
      ROOT r = f32[4] negate(p) }
    two { p = f32[4] parameter(0)
      v = f32[1] slice(p), slice={[2:3]}
      z = s32[] constant(0)
      ROOT r = f32[4] dynamic-update-slice(p, v, z) }
    three { p = f32[4] parameter(0)
      ROOT r = f32[4] copy(p) }
    ENTRY e {
      k = s32[] parameter(0)
      x = f32[4] parameter(1)
      y = f32[4] multiply(x, x)
      c = f32[4] conditional(k, x, y, x), branch_computations={one, two, three}
      ROOT r = (f32[4], f32[4]) tuple(c, x) }"""
    check(text, np.array(choice, np.int32), rng.standard_normal(4).astype(np.float32))


def test_hundred_thousand_iterations_cost_their_body_only() -> None:
    plan = plan_of("""
    body { p = (s32[], s32[]) parameter(0)
      i = s32[] get-tuple-element(p), index=0
      s = s32[] get-tuple-element(p), index=1
      one = s32[] constant(1)
      j = s32[] add(i, one)
      n = s32[] add(s, i)
      ROOT t = (s32[], s32[]) tuple(j, n) }
    condition { p = (s32[], s32[]) parameter(0)
      i = s32[] get-tuple-element(p), index=0
      n = s32[] constant(100000)
      ROOT r = pred[] compare(i, n), direction=LT }
    ENTRY e { z = s32[] constant(0)
      t = (s32[], s32[]) tuple(z, z)
      w = (s32[], s32[]) while(t), condition=condition, body=body
      ROOT r = s32[] get-tuple-element(w), index=1 }""")
    (loop,) = [step for step in plan.steps if step.nested]
    assert [len(nested.steps) for nested in loop.nested] == [1, 3]
    (total,) = run(plan)
    assert total.item() == (100_000 * 99_999 // 2 + 2**31) % 2**32 - 2**31


def test_calls_that_multiply_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of 40 functions calls the one before it twice."""
    monkeypatch.setattr(instruction_count, "MAX_INSTRUCTIONS", 10_000)
    shape = ArrayShape(ElementType.F32)
    parameter = Instruction(Opcode.PARAMETER, shape, attributes=ParameterAttributes(0), name="a")
    function = Computation("f", (parameter,), parameter)
    for _ in range(40):
        first = Instruction(Opcode.CALL, shape, (parameter,), called=(function,), name="first")
        second = Instruction(Opcode.CALL, shape, (first,), called=(function,), name="second")
        function = Computation("f", (parameter, first, second), second)
    with pytest.raises(ProgramTooLarge, match="more than 10000 instructions"):
        build_plan(function)


def test_wrong_number_of_arguments_is_refused() -> None:
    with pytest.raises(ValueError, match="takes 2 arrays, got 1"):
        run(plan_of(UPDATE), torch.zeros(8))


def test_opcode_without_kernel_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    registry.supported_opcodes()
    monkeypatch.delitem(registry._KERNELS, Opcode.NEGATE)
    with pytest.raises(UnsupportedOpcode, match=r"negate.*no kernel"):
        plan_of("ENTRY e { x = f32[2] parameter(0)\n ROOT r = f32[2] negate(x) }")


def test_one_plan_runs_in_many_threads(rng: np.random.Generator) -> None:
    plan = plan_of(SCAN)
    inputs = [torch.from_numpy(rng.standard_normal(1000).astype(np.float32)) for _ in range(4)]
    outputs: dict[int, torch.Tensor] = {}

    def work(number: int) -> None:
        for _ in range(3):
            (outputs[number],) = run(plan, inputs[number])

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number, x in enumerate(inputs):
        assert torch.equal(outputs[number], x + x)


def test_explain_names_every_step() -> None:
    plan = plan_of(SCAN)
    explained = plan.explain()
    for step in plan.steps:
        assert step.text in explained
    assert "frees" in explained
    assert "returns" in explained


def test_what_computes_nothing_is_no_step_whatever_its_opcode() -> None:
    """A reduce over no dimensions is its operand, for a library call of one thread as for others."""
    plan = plan_of("""
    add { a = f32[] parameter(0)
      b = f32[] parameter(1)
      ROOT c = f32[] add(a, b) }
    ENTRY e { x = f32[] parameter(0)
      z = f32[] constant(0)
      y = f32[] multiply(x, x)
      ROOT r = f32[] reduce(y, z), dimensions={}, to_apply=add }""")
    assert [step.instruction.opcode for step in plan.steps if step.instruction] == [Opcode.MULTIPLY]
    assert [value.item() for value in run(plan, torch.tensor(3.0))] == [9.0]
