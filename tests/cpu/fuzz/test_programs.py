"""Programs of the fuzzer: what it once found, kept as small HLO texts in found/, and some new ones in each run."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from jaxlib import _hlo

from flagos_backend.importer import import_module
from tools.fuzz.program import arguments_of, random_program
from tools.fuzz.verdict import Judge, Kind

_FOUND = sorted((Path(__file__).parent / "found").glob("*.hlo"))


@pytest.fixture(scope="module")
def judge() -> Judge:
    return Judge()


@pytest.mark.parametrize("path", _FOUND, ids=lambda path: path.stem)
def test_what_was_found_stays_fixed(path: Path, judge: Judge, rng: np.random.Generator) -> None:
    text = f"HloModule found\n{path.read_text(encoding='utf-8')}"
    module = import_module(_hlo.hlo_module_from_text(text).as_serialized_hlo_module_proto())
    verdict = judge.judge(module, arguments_of(module, int(rng.integers(1 << 31))))
    assert not verdict.is_failure and verdict.kind is not Kind.ORACLE_REFUSES, verdict.message


def test_new_programs_agree_with_xla(judge: Judge, rng: np.random.Generator) -> None:
    for seed in map(int, rng.integers(1 << 31, size=20)):
        program = random_program(seed)
        verdict = judge.judge(program.module, program.arguments())
        assert not verdict.is_failure, f"python -m tools.fuzz --seed {seed} --count 1: {verdict.message}"


@pytest.mark.parametrize("element_type", ["s32", "u8", "s64"])
@pytest.mark.parametrize("operation", ["divide", "remainder"])
@pytest.mark.parametrize("dividend", ["0", "7"])
def test_divisions_of_constants_by_zero_do_not_end_the_oracle(
    operation: str, element_type: str, dividend: str, judge: Judge
) -> None:
    """StableHLO's folder divides constants, those that earlier folds leave too, and ends the process at a zero."""
    lines = [
        f"z = {element_type}[] constant(0)",
        f"y = {element_type}[7] broadcast(z), dimensions={{}}",
        f"n = {element_type}[] constant({dividend})",
        f"x = {element_type}[7] broadcast(n), dimensions={{}}",
        f"folded = {element_type}[7] multiply(x, y)",
        f"r = {element_type}[7] {operation}(x, folded)",
        f"s = {element_type}[7] {operation}(y, y)",
        f"ROOT t = ({element_type}[7], {element_type}[7]) tuple(r, s)",
    ]
    text = "HloModule crash\nENTRY e {\n" + "\n".join(lines) + "\n}"
    module = import_module(_hlo.hlo_module_from_text(text).as_serialized_hlo_module_proto())
    assert judge.judge(module, []).kind is Kind.EQUAL
