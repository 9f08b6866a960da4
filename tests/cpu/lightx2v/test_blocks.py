"""A WAN block of our operators' functions compiles to one graph, which serves all time steps."""

from __future__ import annotations

import pytest
import torch

from benchmarks.programs.wan_block import OURS, STOCK, Inputs, Sizes, Weights, block
from flagos_backend.frontends.torch.compile import report
from flagos_backend.frontends.torch.compile.backend import flagos

SIZES = Sizes(tokens=24, width=64, heads=4, inner=96, context=8)
ALLOWED = {"bf16": 5e-3, "fp8": 3.5e-2, "int8": 1.2e-2}
STEPS = 20


@pytest.mark.parametrize("scheme", ALLOWED)
def test_one_graph_for_all_steps(scheme: str) -> None:
    host = torch.device("cpu")
    inputs, weights = Inputs.of(SIZES, host), Weights(SIZES, host, scheme)
    stock, ours = block(STOCK, Weights(SIZES, host)), block(OURS, weights)
    report.clear()
    torch._dynamo.reset()
    compiled = torch.compile(ours, backend=flagos, fullgraph=True)
    with torch.no_grad():
        for _ in range(STEPS):
            embedding = (torch.randn(1, 6, SIZES.width) * 0.3).bfloat16()
            expected = stock(inputs.x.clone(), embedding, inputs.context, inputs.frequencies).double()
            found = compiled(inputs.x.clone(), embedding, inputs.context, inputs.cache).double()
            assert (found - expected).norm() / expected.norm() <= ALLOWED[scheme]
    (graph,) = report.reports()
    assert not graph.outside
