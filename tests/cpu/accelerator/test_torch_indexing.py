"""Indexing, scatters and what else was left to ATen, compiled for a simulated accelerator: one program whose steps are
generated kernels and Triton's, and in which no operator is ATen's. cpu/torch_compile/test_indexing.py has the operators
one by one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional

from flagos_backend.frontends.torch.compile import report
from flagos_backend.frontends.torch.compile.backend import flagos
from plugin_abi.host import Artifact, Executable
from support import indexing

RUNS = 3
FLAGOS = torch.device("flagos")


@pytest.fixture(autouse=True)
def fresh() -> None:
    torch.compiler.reset()
    report.clear()


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


def attention_over_edges(x: torch.Tensor, w: torch.Tensor, a: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
    h = x @ w
    e = functional.leaky_relu((h @ a[0])[edges[0]] + (h @ a[1])[edges[1]], 0.2)
    top = torch.full((len(x),), -torch.inf, device=x.device).scatter_reduce(0, edges[1], e.detach(), "amax")
    e = torch.exp(e - top[edges[1]])
    share = e / torch.zeros(len(x), device=x.device).index_add(0, edges[1], e)[edges[1]]
    return torch.zeros_like(h).index_add(0, edges[1], h[edges[0]] * share[:, None]).square().mean()


def convolution_over_edges(x: torch.Tensor, w: torch.Tensor, a: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
    degree = torch.zeros(len(x), device=x.device).index_add(0, edges[1], torch.ones(edges.shape[1], device=x.device))
    norm = (degree[edges[0]] * degree[edges[1]]).clamp_min(1).rsqrt()[:, None]
    x = functional.relu(torch.zeros_like(x).index_add(0, edges[1], (x @ w)[edges[0]] * norm))
    return (x @ a.sum(0)).square().mean()


def rows_of_a_table(x: torch.Tensor, w: torch.Tensor, a: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
    rows = functional.embedding(edges, x, padding_idx=1)
    taken = torch.take_along_dim(rows[0] @ w, edges[1][:, None] % 3, 1)
    where = (edges[0] // 3)[:, None].expand(-1, x.shape[1])
    pooled = torch.zeros_like(x).scatter_reduce(0, where, rows[1], "mean", include_self=False)
    spread = torch.zeros_like(x).scatter_add(1, edges.T[:8, :2] % 4, a.sum() * x[:8, :2])
    return (pooled * spread).sum() + (taken * a[0, 0]).square().sum()


def numbers() -> list[torch.Tensor]:
    return [torch.randn(8, 4), torch.randn(4, 4), torch.randn(2, 4), torch.randint(8, (2, 24))]


@pytest.mark.parametrize("function", [attention_over_edges, convolution_over_edges, rows_of_a_table])
def test_no_operator_is_left_to_aten(function: Callable[..., torch.Tensor], made: list[Executable]) -> None:
    """Nor in the gradients; both passes are programs of which every step can be recorded."""

    def found(call: Callable[..., torch.Tensor], arrays: list[torch.Tensor]) -> list[torch.Tensor]:
        wanted = [array for array in arrays if array.requires_grad]
        value = call(*arrays)
        return [value.detach().cpu(), *(g.cpu() for g in torch.autograd.grad(value, wanted))]

    compiled = torch.compile(function, backend=flagos, fullgraph=True)
    for _ in range(RUNS):
        given = numbers()
        ours = [t.to(FLAGOS).requires_grad_(t.is_floating_point()) for t in given]
        exact = [t.double().requires_grad_() if t.is_floating_point() else t for t in given]
        torch.set_default_dtype(torch.float64)
        try:
            expected = found(function, exact)
        finally:
            torch.set_default_dtype(torch.float32)
        for mine, theirs in zip(found(compiled, ours), expected, strict=True):
            torch.testing.assert_close(mine.double(), theirs, rtol=1e-4, atol=1e-4)
    left = [(each.name, each.whole, each.fallback, each.outside) for each in report.reports()]
    assert not any(kinds for _, *rest in left for kinds in rest), left
    assert len(made) == 2
    for executable in made:
        assert "aten::" not in executable.artifact(Artifact.EXPLANATION).decode()


@pytest.mark.parametrize(
    ("function", "dtype"),
    [
        (indexing.read, torch.bfloat16),
        (indexing.written, torch.bool),
        (indexing.added, torch.int8),
        (indexing.added, torch.float32),
        (indexing.reduced, torch.float16),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_kernels_of_accelerators(function: Callable[..., Any], dtype: torch.dtype) -> None:
    """What cpu/torch_compile/test_indexing.py runs as programs of the host, here by Triton's kernels."""
    compiled = torch.compile(function, backend=flagos, fullgraph=True)
    match function:
        case indexing.read:
            given: tuple[torch.Tensor, ...] = (indexing.of(dtype, 6, 5, 4), *indexing.inputs_of_reading())
        case indexing.written:
            given = (indexing.of(dtype, 6, 5, 4), *indexing.inputs_of_writing())
        case _:
            given = indexing.inputs_of_sums(dtype)
    found = compiled(*(array.to(FLAGOS) for array in given))
    sums = dtype.is_floating_point and function is not indexing.read
    wide = [array.double() if sums and array.is_floating_point() else array for array in given]
    precision = 10 * torch.finfo(dtype).eps if sums else 0.0
    for ours, theirs in zip(found, function(*wide), strict=True):
        ours = ours.cpu().to(theirs.dtype)
        torch.testing.assert_close(ours, theirs, rtol=precision, atol=10 * precision)
    (graph,) = report.reports()
    assert not graph.whole and not graph.fallback and not graph.outside, graph


def beams(x: torch.Tensor, w: torch.Tensor, a: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
    """A step of a search: which beam and which token, of one number for both."""
    best, flat = (x @ w).log_softmax(-1).flatten().view(2, 16).topk(3, -1)
    beam, token = flat // 4, flat % 4
    kept = edges[:, :8].gather(1, beam[..., None].expand(2, 3, 2)[..., 0])
    return torch.cat([best, kept, token], 1)


def sampled(x: torch.Tensor, w: torch.Tensor, a: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
    """An image at places that are computed, reflected at its edges; and a norm."""
    image = x.view(1, 2, 4, 4)
    grid = torch.stack([w, w.T], -1)[None] * torch.linspace(0.5, 1.5, 4, device=x.device)[:, None]
    inside = functional.grid_sample(functional.pad(image, (1, 2, 1, 1), "reflect"), grid, align_corners=False)
    loss = functional.binary_cross_entropy_with_logits(inside.flatten(), (edges.flatten()[:32] % 2).float())
    return loss + torch.linalg.vector_norm(w, dim=1)


@pytest.mark.parametrize("function", [beams, sampled], ids=lambda function: function.__name__)
def test_no_operator_is_left_to_aten_without_gradients(
    function: Callable[..., torch.Tensor], made: list[Executable]
) -> None:
    compiled = torch.compile(function, backend=flagos, fullgraph=True)
    for _ in range(RUNS):
        given = numbers()
        torch.testing.assert_close(compiled(*(t.to(FLAGOS) for t in given)).cpu(), function(*given))
    (graph,) = report.reports()
    assert not graph.whole and not graph.fallback and not graph.outside, graph
    assert len(made) == 1
    assert "aten::" not in made[0].artifact(Artifact.EXPLANATION).decode()


def test_host_tensors_keep_the_operators_of_the_host() -> None:
    compiled = torch.compile(lambda x, i: x[i].index_add(0, i[:4], x[:4]), backend=flagos)
    x, i = torch.randn(8, 3), torch.randint(8, (8,))
    torch.testing.assert_close(compiled(x, i), x[i].index_add(0, i[:4], x[:4]))
    (graph,) = report.reports()
    assert set(graph.whole) == {"aten.index.Tensor", "aten.index_add.default"}
