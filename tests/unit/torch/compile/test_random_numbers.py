"""Which operators count as drawing random numbers: those stay in the order of the program, read or not, and no graph
records them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from flagos_backend.frontends.torch.compile.lowering.aten_call import draws_random_numbers
from flagos_backend.frontends.torch.compile.options import CompileOptions
from flagos_backend.frontends.torch.compile.program import build_program
from flagos_backend.importer import import_program
from flagos_backend.ir.attributes import CustomCallAttributes

aten = torch.ops.aten
QUERY = torch.ones(1, 2, 8, 16, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("target", "args", "kwargs", "expected"),
    [
        (aten._scaled_dot_product_flash_attention.default, (), {}, False),
        (aten._scaled_dot_product_flash_attention.default, (1, 1, 1, 0.0), {}, False),
        (aten._scaled_dot_product_flash_attention.default, (1, 1, 1, 0.5), {}, True),
        (aten._scaled_dot_product_cudnn_attention.default, (1, 1, 1, None, True), {"dropout_p": 0.5}, True),
        (aten._scaled_dot_product_cudnn_attention.default, (1, 1, 1, None, True, 0.0, True), {}, False),
        (aten._scaled_dot_product_flash_attention_for_cpu.default, (1, 1, 1), {}, False),
        (aten.rand.default, ([2],), {}, True),
        (aten.native_dropout.default, (1, 0.5, True), {}, True),
        (aten.add.Tensor, (1, 1), {}, False),
    ],
)
def test_what_draws(target: Any, args: Any, kwargs: Any, expected: bool) -> None:
    assert draws_random_numbers(target, args, kwargs) is expected


@pytest.mark.parametrize(("dropout", "calls"), [(0.0, 0), (0.5, 1)])
def test_attention_that_nobody_reads(dropout: float, calls: int) -> None:
    """A graph of gradients holds the attention whose results it was given: it is not computed again."""

    def function(x: torch.Tensor) -> tuple[torch.Tensor]:
        aten._scaled_dot_product_flash_attention(x, x, x, dropout)
        return (x + 1,)

    graph = make_fx(function, tracing_mode="fake")(QUERY)
    attention = [node for node in graph.graph.nodes if "attention" in str(node.target)]
    assert len(attention) == 1, "PyTorch keeps what is tagged as random"
    traced = {node: node.meta.get("val") for node in graph.graph.nodes}
    program = build_program("unread", graph, traced, CompileOptions())
    assert program.serialized is not None
    instructions = import_program(program.serialized).module.entry.instructions
    found = [i.attributes for i in instructions if isinstance(i.attributes, CustomCallAttributes)]
    assert [call.has_side_effect for call in found] == [True] * calls
