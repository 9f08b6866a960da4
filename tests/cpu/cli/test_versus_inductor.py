"""`flagos bench --vs inductor`, on the host CPU. Dynamo's own backend stands in for Inductor, whose C++ compiler takes
long: what is compared is torch.compile's other side, whichever it is."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from flagos_backend.cli import versus_inductor
from flagos_backend.cli.main import main


class Model(torch.nn.Module):
    """One output in 16 bits, one of integers; it writes to its buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(8, 16)
        self.calls: torch.Tensor
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor, *, index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.calls.add_(1)
        return torch.softmax(self.linear(x), -1)[index].bfloat16(), self.calls + index


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("programs") / "model.pt2"
    inputs = torch.randn(4, 8), {"index": torch.tensor([3, 0, 1])}
    torch.export.save(torch.export.export(Model().eval(), inputs[:1], inputs[1]), path)
    return path


@pytest.fixture
def _stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versus_inductor, "_BACKEND", "eager")


@pytest.mark.usefixtures("_stand_in")
def test_a_program_runs_in_turns_and_is_compared_with_eager(
    program: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["bench", str(program), "--vs", "inductor", "--rounds", "3", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["target"], found["peer"], found["rounds"]) == ("the host CPU", "Inductor", 3)
    assert found["ratio"] == pytest.approx(found["peer_seconds"] / found["seconds"]) and found["expected"] > 0
    assert [output["type"] for output in found["differences"]] == ["bfloat16", "int64"] and found["agrees"]
    assert found["losers"] and all(loser["lost"] > 0 for loser in found["losers"])
    assert any(Path(__file__).name in loser["source"] for loser in found["losers"])

    # Other numbers of eager's are told.
    arrays, calls = versus_inductor._arrays, []

    def first_differs(results: object) -> list[np.ndarray]:
        calls.append(results)
        first, *rest = arrays(results)
        return [first + (len(calls) == 1), *rest]

    monkeypatch.setattr(versus_inductor, "_arrays", first_differs)
    assert main(["bench", str(program), "--vs", "inductor", "--rounds", "1"]) == 1
    assert "results   DIFFER from those of eager PyTorch" in capsys.readouterr().out


@pytest.mark.parametrize("content", [b"dear reader", None], ids=["another kind of file", "no file"])
def test_one_line_and_status_2(content: bytes | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "text"
    if content is not None:
        path.write_bytes(content)
    assert main(["bench", str(path), "--vs", "inductor"]) == 2
    err = capsys.readouterr().err
    assert "torch.export.save" in err and err.count("\n") == 1
