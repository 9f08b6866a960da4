"""Programs of the fuzzer: what it once found, kept as small HLO texts in found/, and some new ones in each run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from jaxlib import _hlo

from flagos_backend.importer import import_module
from flagos_backend.ir.hlo import Module
from tools.fuzz.session import Session
from tools.fuzz.verdict import Kind, Verdict

_FOUND = sorted((Path(__file__).parent / "found").glob("*.hlo"))


@pytest.fixture(scope="module")
def session() -> Iterator[Session]:
    """Engines in a process of their own: the oracle ends its process for some programs, which says nothing of ours."""
    session = Session(timeout=300)
    yield session
    session.close()


def _module(text: str) -> Module:
    return import_module(_hlo.hlo_module_from_text(f"HloModule m\n{text}").as_serialized_hlo_module_proto())


@pytest.mark.parametrize("path", _FOUND, ids=lambda path: path.stem)
def test_what_was_found_stays_fixed(path: Path, session: Session, rng: np.random.Generator) -> None:
    verdict = session.judge_module(_module(path.read_text(encoding="utf-8")), int(rng.integers(1 << 31)))
    assert not verdict.is_failure and verdict.kind is not Kind.ORACLE_REFUSES, verdict.message


def test_new_programs_agree_with_xla(session: Session, rng: np.random.Generator) -> None:
    verdicts: list[Verdict] = []
    for seed in map(int, rng.integers(1 << 31, size=20)):
        verdicts.append(session.judge_seed(seed))
        assert not verdicts[-1].is_failure, f"python -m tools.fuzz --seed {seed} --count 1: {verdicts[-1].message}"
    refused = [verdict.message for verdict in verdicts if verdict.kind is Kind.ORACLE_REFUSES]
    assert len(refused) <= 5, refused


@pytest.mark.parametrize("element_type", ["s32", "u8", "s64"])
@pytest.mark.parametrize("operation", ["divide", "remainder"])
@pytest.mark.parametrize("dividend", ["0", "7"])
def test_divisions_of_constants_by_zero_do_not_end_the_oracle(
    operation: str, element_type: str, dividend: str, session: Session
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
    module = _module("ENTRY e {\n" + "\n".join(lines) + "\n}")
    assert session.judge_module(module, 0).kind is Kind.EQUAL
