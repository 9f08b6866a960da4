"""What torch says of products of f32 reaches the program: HLO's default would allow TF32 on an accelerator."""

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from flagos_backend.frontends.torch.compile.options import CompileOptions
from flagos_backend.frontends.torch.compile.program import build_program
from flagos_backend.importer import import_program
from flagos_backend.ir.attributes import DotAttributes
from flagos_backend.ir.opcode import Precision


@pytest.mark.parametrize(
    ("setting", "precision"),
    [("highest", Precision.HIGHEST), ("high", Precision.DEFAULT), ("medium", Precision.DEFAULT)],
)
def test_products(setting: str, precision: Precision) -> None:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(setting)
    try:
        function = make_fx(lambda x, y: (x @ y + 1,), tracing_mode="fake")
        graph = function(torch.ones(2, 3), torch.ones(3, 4))
        traced = {node: node.meta.get("val") for node in graph.graph.nodes}
        program = build_program("products", graph, traced, CompileOptions())
    finally:
        torch.set_float32_matmul_precision(before)
    assert program.serialized is not None
    module = import_program(program.serialized).module
    (dot,) = (i.attributes for i in module.entry.instructions if isinstance(i.attributes, DotAttributes))
    assert dot.precision is precision
