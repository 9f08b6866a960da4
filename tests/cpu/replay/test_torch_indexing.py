"""Programs of torch.compile that read and write at places that data say are one graph: no operator splits a replay."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.nn import functional

from flagos_backend.frontends.torch.compile import report
from flagos_backend.frontends.torch.compile.backend import flagos
from plugin_abi.host import Artifact, Executable

if TYPE_CHECKING:
    from cpu.replay.driver import Driver

FLAGOS = torch.device("flagos")
RUNS = 4


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Executable]:
    """The programs that the test has compiled."""
    found: list[Executable] = []
    original = Executable.compile

    def compile(context: Any, program: bytes) -> Executable:
        found.append(original(context, program))
        return found[-1]

    monkeypatch.setattr(Executable, "compile", compile)
    return found


def edges(x: torch.Tensor, w: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
    """Messages along the edges of a graph, weighted by a softmax over those that come together."""
    h = x @ w
    e = (h @ w[0])[i[0]] + (h @ w[1])[i[1]]
    top = torch.full((len(x),), -torch.inf, device=x.device).scatter_reduce(0, i[1], e, "amax")
    e = torch.exp(e - top[i[1]])
    share = e / torch.zeros(len(x), device=x.device).index_add(0, i[1], e)[i[1]]
    return torch.zeros_like(h).index_add(0, i[1], h[i[0]] * share[:, None])


def tables(x: torch.Tensor, w: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
    rows = functional.embedding(i % 4, w).sum(0) + functional.embedding_bag(i.T, x).mean(0)
    best, place = (rows * 3).topk(2, -1)
    put = torch.ops.aten.index_put(x, [i[0] // 3], rows, True).scatter(1, i[:, :3] % 4, 2.0)
    return put + x.gather(1, place[:8] // 2).sum(1, keepdim=True) + best[:8, :1]


@pytest.mark.parametrize("function", [edges, tables], ids=lambda function: function.__name__)
def test_one_graph(
    driver: Driver, function: Callable[..., torch.Tensor], made: list[Executable], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.compiler.reset()
    report.clear()
    compiled = torch.compile(function, backend=flagos, fullgraph=True)
    for _ in range(RUNS):
        given = torch.randn(8, 4), torch.randn(4, 4), torch.randint(8, (2, 24))
        found = compiled(*(array.to(FLAGOS) for array in given)).cpu()
        torch.testing.assert_close(found, function(*given), rtol=1e-4, atol=1e-4)
    (graph,) = report.reports()
    assert not graph.whole and not graph.fallback and not graph.outside, graph
    assert _is_one_graph(made)


def test_a_draw_divides_it(driver: Driver, made: list[Executable]) -> None:
    """What the test above would see of an operator that no graph holds."""
    torch.compiler.reset()
    compiled = torch.compile(lambda x: (torch.bernoulli(x.sigmoid()) * x).cumsum(1).cos(), backend=flagos)
    for _ in range(RUNS):
        compiled(torch.randn(8, 4).to(FLAGOS))
    assert not _is_one_graph(made)


def _is_one_graph(made: list[Executable]) -> bool:
    (executable,) = made
    return "device 0: replayed as a graph of 1 nodes" in executable.artifact(Artifact.EXPLANATION).decode()


def test_rows_anywhere_in_memory_are_replayed(driver: Driver) -> None:
    """Graphs are recorded for arrays that begin at multiples of 256 bytes: others are copied there."""
    torch.compiler.reset()
    compiled = torch.compile(lambda x, y: (x - y).exp().sum() + x * y, backend=flagos, fullgraph=True)
    replayed = 0
    for _ in range(RUNS):
        host = torch.randn(3, 75)
        there = host.to(FLAGOS)
        assert there[1].data_ptr() % 256 and there[2].data_ptr() % 256
        before = len(driver.launches)
        result = compiled(there[1], there[2]).cpu()
        replayed += len(driver.launches) > before
        exact = (host[1].double() - host[2]).exp().sum() + host[1].double() * host[2]
        torch.testing.assert_close(result.double(), exact, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(there.cpu(), host, rtol=0, atol=0)
    assert replayed == RUNS - 2


def test_rows_anywhere_in_memory_that_are_written_stay_there(driver: Driver) -> None:
    torch.compiler.reset()

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.add_(y)
        return x.sum()

    compiled = torch.compile(step, backend=flagos, fullgraph=True)
    for _ in range(RUNS):
        host = torch.randn(3, 75)
        there = host.to(FLAGOS)
        result = compiled(there[1], there[2]).cpu()
        torch.testing.assert_close(there.cpu(), torch.stack([host[0], host[1] + host[2], host[2]]))
        torch.testing.assert_close(result, (host[1] + host[2]).sum(), rtol=1e-5, atol=1e-5)
