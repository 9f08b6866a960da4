"""`flagos bench --vs`, on the host CPU."""

from __future__ import annotations

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from flagos_backend.cli import running, versus
from flagos_backend.cli.main import main
from programs import hlo_bytes


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("programs") / "sorted.hlo"
    path.write_bytes(hlo_bytes(lambda x, n: jnp.sort(x @ x) + n, np.ones((16, 16), np.float32), np.int32(1)))
    return path


def test_a_program_runs_in_turns_with_xla(program: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", str(program), "--vs", "cpu", "--rounds", "3", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["target"], found["peer"], found["rounds"]) == ("the host CPU", "XLA's cpu", 3)
    assert found["ratio"] == pytest.approx(found["peer_seconds"] / found["seconds"])
    assert found["agrees"] and [output["type"] for output in found["differences"]] == ["float32"]
    losers = found["losers"]
    assert 0 < len(losers) <= 3 and any("sort" in loser["text"] for loser in losers)
    assert losers == sorted(losers, key=lambda loser: -loser["lost"])
    for loser in losers:
        assert loser["lost"] == pytest.approx(loser["seconds"] - loser["expected"])


def test_the_peer_gets_the_same_arguments(program: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[bytes]] = [[], []]
    for number, module in enumerate((versus, running)):
        original = module.random_bytes

        def noted(*arguments: object, number: int = number, original: object = original) -> bytes:
            seen[number].append(original(*arguments))  # type: ignore[operator]
            return seen[number][-1]

        monkeypatch.setattr(module, "random_bytes", noted)
    versus.compare(program, "cpu", 1, 7)
    peer, ours = seen
    assert len(peer) == 2 and ours[:2] == peer


def test_the_table_says_what_is_slower() -> None:
    loser = versus.Loser("call sort", "model.py:3", 3e-3, 1e-3, 2e-3)
    found = versus.Comparison("f", "the host CPU", "XLA's cpu", 5, 4e-3, 2e-3, 0.5, 1e-3, (loser,))
    text = found.text()
    assert "0.50: flagos is not faster" in text and "25%" in text and "50%" in text
    assert "2.00 ms  3.00 ms  1.00 ms   call sort, model.py:3" in text


def test_other_results_are_told(
    program: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    results_of = versus._results_of
    monkeypatch.setattr(versus, "_results_of", lambda *given: [result * 1.01 for result in results_of(*given)])
    assert main(["bench", str(program), "--vs", "cpu", "--rounds", "1"]) == 1
    assert "results   DIFFER from those of XLA's cpu" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["PROGRAM", "--vs", "cuda"], "there is no platform cuda of JAX here"),
        (["TEXT", "--vs", "cpu"], "holds no program"),
        (["PROGRAM", "--json"], "add --vs"),
    ],
    ids=["no such peer", "another kind of file", "nothing to compare"],
)
def test_one_line_and_status_2(
    arguments: list[str], said: str, program: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "text"
    text.write_text("dear reader")
    paths = {"PROGRAM": str(program), "TEXT": str(text)}
    assert main(["bench", *(paths.get(argument, argument) for argument in arguments)]) == 2
    err = capsys.readouterr().err
    assert said in err and err.count("\n") == 1
