"""What volumes are drawn with: running products and their gradients, compiled for a simulated accelerator. No operator
is ATen's, and each scan is a Triton kernel. cpu/torch_compile/test_running_products.py has the gradients one by one."""

from __future__ import annotations

import pytest
import torch

from flagos_backend.frontends.torch.compile import report
from flagos_backend.frontends.torch.compile.backend import flagos
from plugin_abi.host import Artifact, Executable

FLAGOS = torch.device("flagos")


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Executable]:
    """The programs that the test has compiled."""
    found: list[Executable] = []
    original = Executable.compile
    monkeypatch.setattr(Executable, "compile", lambda *given: found.append(original(*given)) or found[-1])
    torch.compiler.reset()
    report.clear()
    return found


def composited(alpha: torch.Tensor, colours: torch.Tensor) -> torch.Tensor:
    """Front to back; some hide all that is behind them."""
    passes = torch.cumprod(1 - alpha, 1)
    passes = torch.cat([torch.ones_like(passes[:, :1]), passes[:, :-1]], 1)
    depth = (alpha.cumsum(1) * colours[:, 0]).logcumsumexp(1).square().mean()
    return ((alpha * passes) @ colours).square().mean() + depth + (1.5 - alpha).prod(1).sum()


def test_no_operator_is_left_to_aten(made: list[Executable]) -> None:
    run = torch.compile(composited, backend=flagos, fullgraph=True)
    for _ in range(2):
        alpha, colours = torch.rand(6, 11), torch.randn(11, 3)
        alpha[torch.rand(alpha.shape) < 0.2] = 1
        ours, exact = ([t.to(to).requires_grad_() for t in (alpha, colours)] for to in (FLAGOS, torch.float64))
        found, expected = (torch.autograd.grad(f(*arrays), arrays) for f, arrays in ((run, ours), (composited, exact)))
        for mine, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(mine.cpu().double(), theirs, rtol=1e-4, atol=1e-4)
    assert not any(graph.whole or graph.fallback or graph.outside for graph in report.reports())
    assert len(made) == 2
    for executable in made:
        explanation = executable.artifact(Artifact.EXPLANATION).decode()
        assert "aten::" not in explanation
        assert "triton.scan" in explanation
