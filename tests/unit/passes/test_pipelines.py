"""The whole corpus: stock XLA computes the same after the passes that all targets share as before them."""

import sys

import numpy as np
import pytest

from flagos_backend.importer import export_module, import_module
from flagos_backend.ir.opcode import Opcode
from flagos_backend.passes.pass_manager import PassOptions, names, run_pipeline
from flagos_backend.passes.pipelines import cpu_pipeline, optimize
from hlo_texts import HLO_TEXTS
from programs import PROGRAMS, hlo_bytes, run_on_xla
from support.passes import simplified

# Compiled by LLVM from another text of the same program, these differ in the last bit.
NOT_REPRODUCIBLE = {"random_distributions"}


def assert_same_results(name, hlo, arguments):
    # Later passes sum the products of dots in another order; each has tests of its own.
    optimized = export_module(simplified(import_module(hlo)))
    expected, actual = run_on_xla(hlo, arguments), run_on_xla(optimized, arguments)
    assert len(expected) == len(actual)
    for before, after in zip(expected, actual, strict=True):
        assert (before.dtype, before.shape) == (after.dtype, after.shape)
        if name in NOT_REPRODUCIBLE:
            np.testing.assert_allclose(after, before, rtol=1e-5, atol=1e-6)
        else:
            assert after.tobytes() == before.tobytes()


@pytest.mark.parametrize("name", PROGRAMS)
def test_jax_program_computes_the_same(name, seed):
    assert_same_results(name, PROGRAMS[name].hlo(), PROGRAMS[name].arguments(seed))


@pytest.mark.parametrize("name", HLO_TEXTS)
def test_hlo_text_computes_the_same(name, seed):
    text = HLO_TEXTS[name]
    if text.runs:
        assert_same_results(name, text.hlo(), text.arguments(seed))
    else:
        optimize(import_module(text.hlo(), num_replicas=text.num_replicas), verify=True)


def test_report_says_what_each_pass_did():
    module = import_module(PROGRAMS["scan_with_outputs"].hlo())
    result = run_pipeline(cpu_pipeline(), module, options=PassOptions(verify=True))
    ran = [report.name for report in result.reports]
    assert ran == [name for name in names(cpu_pipeline()) if name in ran]
    first, second, third = result.reports[:3]
    assert (first.name, second.name, third.name) == ("trivial_collectives", "expand_ragged_dots", "inline_calls")
    assert third.changed
    assert not first.changed and not second.changed
    assert first.instructions_before == sum(len(c.instructions) for c in module.computations())
    assert result.reports[-1].instructions_after == sum(len(c.instructions) for c in result.module.computations())
    assert str(third).startswith("inline_calls: ")


def test_a_second_run_changes_nothing():
    for name in ("scan_gradient", "attention_causal_gradient", "random_bits", "conditionals", "lstm_scan"):
        once = optimize(import_module(PROGRAMS[name].hlo()), verify=True)
        assert export_module(optimize(once, verify=True)) == export_module(once), name


def test_signature_and_donation_stay():
    module = import_module(PROGRAMS["unused_argument"].hlo())
    optimized = optimize(module, verify=True)
    assert [p.shape for p in optimized.entry.parameters] == [p.shape for p in module.entry.parameters]
    assert optimized.entry.root.shape == module.entry.root.shape
    assert optimized.aliases == module.aliases


def test_calls_are_gone_and_loops_are_counted():
    optimized = optimize(import_module(PROGRAMS["scan_gradient"].hlo()), verify=True)
    instructions = [i for c in optimized.computations() for i in c.instructions]
    assert not [i for i in instructions if i.opcode is Opcode.CALL]
    assert {i.attributes.trip_count for i in instructions if i.opcode is Opcode.WHILE} == {5}


def test_work_grows_linearly():
    """Ten times the program is some ten times the work: lines of Python, of which each iteration is one."""

    def work(repeats):
        def function(x):
            for _ in range(repeats):
                x = x * 2 + x.sum(0, keepdims=True)
            return x

        lines = 0

        def count(frame, event, argument):
            nonlocal lines
            lines += event == "line"
            return count

        module = import_module(hlo_bytes(function, np.ones((4, 4), np.float32)))
        before = sys.gettrace()
        sys.settrace(count)
        try:
            optimize(module)
        finally:
            sys.settrace(before)
        return lines

    assert work(200) < 13 * work(20)
