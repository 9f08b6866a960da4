"""Integers of a graph that are no sizes, made tensors: a step counter must not compile a program for each value.

Before specialization.py, which compiles for every set of the integers that are left.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.experimental.symbolic_shapes import free_symbols

aten = torch.ops.aten

# Operators of a tensor and a number, to those of a tensor and a tensor without dimensions, which promotes as it does.
_OF_TENSORS = {
    overload: overload for overload in (aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor)
} | {getattr(aten, name).Scalar: getattr(aten, name).Tensor for name in ("eq", "ne", "lt", "le", "gt", "ge")}
_EXACT = (torch.float32, torch.float64, torch.int64)


def counters_as_tensors(graph: GraphModule) -> tuple[int, ...]:
    """Adds an input, a tensor without dimensions, for each integer that is only computed with, after all others, and
    has the graph compute with that. Returns the positions of the integers; they stay inputs, and outputs if they were.
    """
    inputs = graph.graph.find_nodes(op="placeholder")
    sizes = set(_symbols_of_sizes(graph))
    found = [position for position, node in enumerate(inputs) if _is_counter(node, sizes)]
    last = inputs[-1] if inputs else None
    for position in found:
        node = inputs[position]
        with graph.graph.inserting_after(last):
            last = tensor = graph.graph.placeholder(f"{node.name}_as_tensor")
        for user in [user for user in node.users if user.op == "call_function"]:
            user.target = _OF_TENSORS[user.target]
            user.replace_input_with(node, tensor)
    return tuple(found)


def _symbols_of_sizes(graph: GraphModule) -> Iterator[Any]:
    """The symbols (sympy's) in the sizes of tensors, and in numbers that are computed."""
    for node in graph.graph.nodes:
        value = node.meta.get("val")
        for part in value if isinstance(value, list | tuple) else (value,):
            if isinstance(part, torch.Tensor) or (node.op != "placeholder" and isinstance(part, torch.SymInt)):
                yield from free_symbols(part)


def _is_counter(node: Node, sizes: set[Any]) -> bool:
    value = node.meta.get("val")
    if not isinstance(value, torch.SymInt) or not value.node.expr.is_Symbol or value.node.expr in sizes:
        return False
    computed = [user for user in node.users if user.op == "call_function"]
    return bool(computed) and all(_computes_with(user, node) for user in computed)


def _computes_with(user: Node, number: Node) -> bool:
    if user.target not in _OF_TENSORS or len(user.args) != 2 or user.kwargs or user.args[1] is not number:
        return False
    tensors: list[Any] = [user.args[0].meta.get("val"), user.meta.get("val")] if isinstance(user.args[0], Node) else []
    return bool(tensors) and all(isinstance(t, torch.Tensor) and t.dtype in (*_EXACT, torch.bool) for t in tensors)
