"""Hostile bytes: what was found or reported once, and some thousand new inputs for everything that reads such."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from tools.fuzz.hostile.corpus import ENTRIES, Entry
from tools.fuzz.hostile.session import Session
from tools.fuzz.hostile.worker import TARGETS

#: How many new inputs, at some 1 to 3 ms each.
_COUNTS = {
    "manifest": 800,
    "library": 2500,
    "answer": 500,
    "verdict": 500,
    "file": 150,
    "importer": 1500,
    "program": 800,
    "custom call": 700,
    "executable": 1000,
    "times": 250,
    "torch answer": 250,
    "source": 150,
}


@pytest.fixture(scope="module")
def session() -> Iterator[Session]:
    with Session() as session:
        yield session


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: f"{entry.target}: {entry.name}")
def test_what_was_found_stays_refused(entry: Entry, session: Session) -> None:
    account = session.replay(entry.target, entry.make())
    assert account.findings == [] and dict(account.outcomes) == {entry.outcome: 1}


@pytest.mark.parametrize("target", TARGETS)
def test_new_inputs_are_taken_or_refused(target: str, session: Session, rng: np.random.Generator) -> None:
    seed, count = int(rng.integers(1 << 40)), _COUNTS[target]
    account = session.run(target, seed, count)
    again = f"python -m tools.fuzz.hostile {target!r} --seed {{seed}} --count 1"
    found = [f"{again.format(seed=f.seed)}: {f.kind}: {f.message}" for f in account.findings]
    assert not found, "\n".join(found)
    assert account.outcomes.total() == count


def test_equal_seeds_make_equal_inputs(rng: np.random.Generator) -> None:
    seed = int(rng.integers(1 << 40))
    for target in TARGETS.values():
        if target.name != "executable":  # holds the build's own id
            assert target.input(seed) == target.input(seed)
