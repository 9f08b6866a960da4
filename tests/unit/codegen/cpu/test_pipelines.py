"""The transforms of loop nests: every result is valid and keeps the values, and nothing but the pipelines runs one."""

import ast
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import flagos_backend
from flagos_backend.codegen.cpu import pipelines as loop_pipelines
from flagos_backend.codegen.loop_pass_manager import LoopPass, LoopPipeline, run_loop_pipeline
from flagos_backend.codegen.triton import loop_pipeline
from flagos_backend.codegen.triton.loop_pipeline import triton_loop_pipeline
from flagos_backend.devices.target import HOPPER, HOST, SIMULATED
from flagos_backend.errors import LoopNestInvalid, PassFailed, PassOptionInvalid
from flagos_backend.ir.hlo import Instruction
from flagos_backend.ir.opcode import Opcode
from flagos_backend.ir.types import ArrayShape, ElementType, TupleShape
from flagos_backend.kernels.reference.nests import NestUndefined
from flagos_backend.loop_ir.intrinsics import OPERANDS, Intrinsic
from flagos_backend.loop_ir.printer import print_nest, print_nests
from flagos_backend.loop_ir.region import Affine, Apply, Index, Literal, Load, Reduce, Region, Shift, Store
from flagos_backend.loop_ir.verifier import verify_loop_nest
from flagos_backend.passes.pass_manager import PassOptions
from programs import PROGRAMS, hlo_bytes
from support.nest_faults import mutants
from support.nest_values import BOUNDS, keeps_values
from support.nests import cpu_nests, round_trips, triton_nests
from support.random_nests import MOTIFS

E = ElementType
VERIFY = PassOptions(verify=True)
PIPELINES = (
    loop_pipelines.cpu_loop_pipeline(),
    loop_pipelines.cpu_emission_pipeline(excess_precision=True),
    triton_loop_pipeline(HOPPER, excess_precision=True),
)
EVERY = {step.name: step for pipeline in PIPELINES for step in pipeline}


def verified(pipeline: LoopPipeline, nest: Region, rng: np.random.Generator) -> list[Region]:
    """What ``nest`` becomes. Each result passes the verifier, is text that reads back as an equal nest, and stores the
    values that the nest did which it comes from."""
    round_trips(nest)
    nests = [nest]
    for step in pipeline:
        made: list[Region] = []
        for before in nests:
            results = run_loop_pipeline((step,), before, VERIFY)
            if any(result is not before for result in results):
                for result in results:
                    round_trips(result)
                assert keeps_values(step.name, [before], results, rng), (step.name, print_nests([before, *results]))
            made += results
        nests = made
    return nests


@pytest.mark.parametrize("name", PROGRAMS)
def test_every_nest_of_the_corpus_keeps_its_values_in_every_transform(name: str, rng: np.random.Generator) -> None:
    hlo = PROGRAMS[name].hlo()
    for nest in cpu_nests(hlo):
        for lowered in verified(loop_pipelines.cpu_loop_pipeline(), nest, rng):
            verified(loop_pipelines.cpu_emission_pipeline(), lowered, rng)
    for target in (SIMULATED, HOPPER):
        for nest in triton_nests(hlo, target):
            verified(triton_loop_pipeline(target), nest, rng)


@pytest.mark.parametrize("name", MOTIFS)
def test_random_nests_keep_their_values_in_every_transform(name: str, rng: np.random.Generator) -> None:
    """What one transform made goes through all that follow it; of the others each finds what is not for it."""
    for make in MOTIFS[name]:
        for excess_precision in (False, True):
            nest = make(rng)
            for lowered in verified(loop_pipelines.cpu_loop_pipeline(), nest, rng):
                verified(loop_pipelines.cpu_emission_pipeline(excess_precision), lowered, rng)
            for target in (SIMULATED, HOPPER):
                verified(triton_loop_pipeline(target, excess_precision), nest, rng)


@pytest.mark.parametrize("name", EVERY)
def test_each_transform_acts_and_keeps_values(name: str, rng: np.random.Generator) -> None:
    for make in MOTIFS[name]:
        for _ in range(4):
            nest = make(rng)
            results = run_loop_pipeline((EVERY[name],), nest, VERIFY)
            assert any(result is not nest for result in results), print_nests([nest])
            assert keeps_values(name, [nest], results, rng), print_nests([nest, *results])


@pytest.mark.parametrize("name", EVERY)
def test_a_fault_in_the_values_of_any_transform_is_caught(name: str, rng: np.random.Generator) -> None:
    """One at a time: a swapped operand, an off-by-one bound, a dropped store, ... (support/nest_faults.py). Now and
    then a nest is drawn in which a fault changes nothing, as a maximum for a sum of one element: then it is drawn
    again."""
    for make in MOTIFS[name]:
        survivors = _survivors(name, make(rng, plain=True), rng)
        for _ in range(_DRAWS - 1):
            if not survivors:
                break
            survivors = _survivors(name, make(rng, plain=True), rng)
        assert not survivors, survivors


# Of a nest that is drawn by chance.
_DRAWS = 3
# Of what a nest loads.
_VALUES = 16


def _survivors(name: str, nest: Region, rng: np.random.Generator) -> list[str]:
    """The faults in what the transform makes of ``nest`` that nothing finds."""
    faults = list(mutants(EVERY[name].run(nest)))
    kinds = {"a bound that is off by one", "a store that is off by one", "a store that is dropped"}
    assert kinds <= dict(faults).keys()
    missed = [(kind, broken) for kind, broken in faults if not _is_caught(name, nest, broken, rng)]
    return [f"{kind}: {print_nests([nest, *broken])}" for kind, broken in missed]


def _is_caught(name: str, nest: Region, broken: Sequence[Region], rng: np.random.Generator) -> bool:
    try:
        for result in broken:
            verify_loop_nest(result)
        # One special value, as -infinity, may be all that shows it, of few elements that are loaded.
        return not all(keeps_values(name, [nest], broken, rng) for _ in range(_VALUES))
    except (LoopNestInvalid, NestUndefined):
        return True


def array(name: str, *dims: int, kind: ElementType = E.F32) -> Instruction:
    return Instruction(Opcode.PARAMETER, ArrayShape(kind, dims), name=name)


X, Y, Z = array("x", 4, 6), array("y", 4, 6), array("z", 4)
WHOLE, ROWS = Affine(0, (6, 1)), Affine(0, (1, 0))
LOAD = Load(E.F32, X, WHOLE)
ZERO, ONE = Literal(E.F32, bytes(4)), Literal(E.F32, np.float32(1).tobytes())
SUM = Reduce(E.F32, Opcode.ADD, LOAD, ZERO, (1,))


def nest(value: object, target: Instruction = Y, index: Affine = WHOLE) -> Region:
    return Region((4, 6), (Store(target, value, index),))


VALID = {
    "copy": nest(LOAD),
    "sum of rows": nest(SUM, Z, ROWS),
    "sum used again": nest(Apply(E.F32, Opcode.DIVIDE, (LOAD, SUM))),
    "shifted": nest(Load(E.F32, array("w", 30), Affine(0, (6, 1), (Shift(Index(E.S64, Affine(0, (0, 0))), 6),)))),
    "chosen": nest(Apply(E.F32, Opcode.SELECT, (Apply(E.PRED, Opcode.COMPARE, (LOAD, ONE), "LT"), LOAD, ONE))),
    "logarithm to base 2": nest(Apply(E.F32, Opcode.LOG, (LOAD,), Intrinsic.BASE_TWO)),
    "no points": Region((0, 6), (Store(Y, Load(E.F32, X, Affine(99, (6, 1))), WHOLE),)),
}
INVALID = {
    "elements 1 to 24 of an array of 24": nest(Load(E.F32, X, Affine(1, (6, 1)))),
    "elements -1 to 22 of an array of 24": nest(Load(E.F32, X, Affine(-1, (6, 1)))),
    "elements 0 to 24 of an array of 24": nest(LOAD, index=Affine(0, (6, 1), (Shift(Index(E.S64, WHOLE), 1),))),
    "a start is s32 or s64, not f32": nest(Load(E.F32, X, Affine(0, (0, 0), (Shift(LOAD, 1),)))),
    "has a coefficient for each of 2 dimensions, not 1": nest(Load(E.F32, X, Affine(0, (1,)))),
    "the array is of f32": nest(Load(E.S32, X, WHOLE)),
    "the value is s32, the array f32": nest(Index(E.S32, WHOLE)),
    "a guard is a predicate": nest(Load(E.F32, X, WHOLE, LOAD)),
    "a literal has 4 bytes, not 2": nest(Literal(E.F32, bytes(2))),
    "it takes 2 operands, not 1": nest(Apply(E.F32, Opcode.ADD, (LOAD,))),
    "it takes 3 operands, not 2": nest(Apply(E.F32, Opcode.DIVIDE, (LOAD, LOAD), Intrinsic.CORRECTED)),
    "there is no such form of the operation": nest(Apply(E.F32, Opcode.ADD, (LOAD, LOAD), Intrinsic.NEAR)),
    "there is no comparison 'XX'": nest(Apply(E.PRED, Opcode.COMPARE, (LOAD, LOAD), "XX")),
    "its operands are f32, s32": nest(Apply(E.F32, Opcode.ADD, (LOAD, Index(E.S32, WHOLE)))),
    "its operands are f32": nest(Apply(E.F64, Opcode.ADD, (LOAD, LOAD))),
    "its result is a predicate": nest(Apply(E.F32, Opcode.COMPARE, (LOAD, LOAD), "LT")),
    "it chooses by a predicate": nest(Apply(E.F32, Opcode.SELECT, (LOAD, LOAD, LOAD))),
    "nothing is reduced by divide": nest(replace(SUM, combine=Opcode.DIVIDE), Z, ROWS),
    "the dimensions must be some of 2, in order": nest(replace(SUM, dims=(2,)), Z, ROWS),
    "what it begins with varies along": nest(replace(SUM, initial=LOAD), Z, ROWS),
    "have the result's type, not f32 and f64": nest(
        replace(SUM, initial=Literal(E.F64, bytes(8))), Z, Affine(0, (1, 0))
    ),
    "the value varies along the dimensions [1], the place does not": nest(LOAD, Z, ROWS),
    "must not be negative": Region((-1, 6), (Store(Y, LOAD, WHOLE),)),
    "it stores nothing": Region((4, 6), ()),
}


@pytest.mark.parametrize("name", VALID)
def test_valid_nests_pass(name: str) -> None:
    verify_loop_nest(VALID[name])


@pytest.mark.parametrize("rule", INVALID)
def test_each_rule_is_checked(rule: str) -> None:
    with pytest.raises(LoopNestInvalid) as caught:
        verify_loop_nest(INVALID[rule])
    assert rule in caught.value.facts["rule"]


def test_every_intrinsic_has_its_operands() -> None:
    assert {detail for _, detail in OPERANDS} >= set(Intrinsic)


@pytest.mark.parametrize("name", EVERY)
def test_a_fault_in_the_result_of_any_transform_is_caught(name: str, tmp_path: Path) -> None:
    """An index that runs out of its array."""

    def fault(region: Region) -> Sequence[Region]:
        store = region.stores[0]
        return (replace(region, stores=(replace(store, index=replace(store.index, offset=99)),)),)

    for pipeline in PIPELINES:
        if name in {step.name for step in pipeline}:
            broken = tuple(replace(step, run=fault) if step.name == name else step for step in pipeline)
            rule = rf"The pass {name} made an invalid graph: elements 99 to 122"
            with pytest.raises(PassFailed, match=rule) as caught:
                run_loop_pipeline(broken, VALID["copy"], replace(VERIFY, dump_to=tmp_path))
            (path,) = tmp_path.iterdir()
            assert str(path) in str(caught.value) and f"FLAGOS_DISABLE_PASSES={name}" in str(caught.value)
            before, after = path.read_text().split(f"// after {name}\n")
            assert before == f"// before {name}\n{print_nest(VALID['copy'])}\n\n"
            assert after == print_nest(VALID["copy"]).replace("@y[6*d0 + d1]", "@y[6*d0 + d1 + 99]") + "\n"
            path.unlink()


def test_a_fault_of_fusion_is_caught() -> None:
    with pytest.raises(PassFailed, match="The pass fusion made an invalid graph") as caught:
        run_loop_pipeline((), INVALID["elements 1 to 24 of an array of 24"], VERIFY)
    (path,) = re.findall(r"are in (\S+\.txt)", str(caught.value))  # in the cache folder
    assert "load @x[6*d0 + d1 + 1]" in Path(path).read_text()


def test_what_has_no_text_is_said_to_have_none(tmp_path: Path) -> None:
    """A nest that loads a tuple."""
    pair = Instruction(Opcode.PARAMETER, TupleShape((X.shape, X.shape)), name="pair")
    broken = LoopPass("careless", lambda _: (nest(Load(E.F32, pair, WHOLE)),), "")
    with pytest.raises(PassFailed, match="what is loaded is no array"):
        run_loop_pipeline((broken,), VALID["copy"], replace(VERIFY, dump_to=tmp_path))
    (path,) = tmp_path.iterdir()
    assert path.read_text().endswith("// after careless\n// It has no text: TypeError: pair is a tuple, not an array\n")


def test_a_dump_that_cannot_be_written_is_an_error_of_the_variable(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(PassOptionInvalid, match="FLAGOS_DUMP_TO"):
        run_loop_pipeline((), INVALID["it stores nothing"], replace(VERIFY, dump_to=tmp_path / "file" / "folder"))


def test_transforms_are_left_out_by_name() -> None:
    x = np.ones((64, 64), np.float32)
    (region,) = cpu_nests(hlo_bytes(lambda x: 1 / (1 + jnp.exp(-x)), x))
    pipeline = loop_pipelines.cpu_emission_pipeline()
    opcodes = [
        {
            e.opcode
            for r in run_loop_pipeline(pipeline, region, PassOptions(disabled=disabled))
            for e in r.expressions()
            if isinstance(e, Apply)
        }
        for disabled in (frozenset[str](), frozenset({"logistic"}))
    ]
    assert opcodes[0] == {Opcode.LOGISTIC}
    assert Opcode.EXP in opcodes[1]


def test_no_vendor_has_the_extras_of_another() -> None:
    assert [step.name for step in triton_loop_pipeline(SIMULATED)] == ["log2", "half_powers", "join_sums"]
    assert HOST.facts == SIMULATED.facts


def test_nothing_but_the_pipelines_runs_a_transform() -> None:
    root = Path(flagos_backend.__file__).parent
    declared = {Path(module.__file__) for module in (loop_pipelines, loop_pipeline)}
    transforms = {
        (node.module, alias.name)
        for path in declared
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("flagos_backend.codegen.")
        for alias in node.names
        if alias.name.islower() and alias.name not in {"simplify", "reduces_rows", "log2", "one"}
    }
    # Logarithms and excess precision are declared in the pass manager itself; passes of graphs are no transforms.
    of_nests = [module for module, _ in transforms if ".passes." not in module]
    assert len(of_nests) == len(EVERY) - 2
    offenders = [
        f"{path.relative_to(root)} imports {alias.name}"
        for path in root.rglob("*.py")
        if path not in declared
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if (node.module, alias.name) in transforms
    ]
    assert not offenders


def test_every_transform_has_random_nests_and_a_bound() -> None:
    assert EVERY.keys() == MOTIFS.keys() == BOUNDS.keys()


def test_passes_have_reasons() -> None:
    assert all(isinstance(step, LoopPass) and step.reason for step in EVERY.values())
