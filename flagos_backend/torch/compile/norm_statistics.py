"""Corrects what PyTorch traces for norms: on the CPU the statistics of halves with float32 weights are float32, and
their derivatives insist on that, but tensors without data say they are halves. Before backend.py partitions a graph."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import GraphModule

aten = torch.ops.aten

# Both return (output, mean, reciprocal deviation) and take (input, weight, ...), the weight at this position.
_WEIGHT = {aten.native_layer_norm.default: 2, aten.native_group_norm.default: 1}


def corrected(target: Any, args: Sequence[Any], result: Any) -> Any:
    """The traced ``result`` of an operator, with the dtypes that it really returns."""
    position = _WEIGHT.get(target)
    if position is None or not isinstance(args[position], torch.Tensor):
        return result
    halves = args[0].dtype in (torch.bfloat16, torch.float16)
    if not halves or args[position].dtype is not torch.float32:
        return result
    output, *statistics = result
    return (output, *(tensor.to(torch.float32) for tensor in statistics))


def correct_graph(graph: GraphModule) -> None:
    """Corrects the traced values of a graph's nodes in place."""
    for node in graph.graph.nodes:
        if node.target not in _WEIGHT:
            continue
        args = torch.fx.map_arg(node.args, lambda n: n.meta["val"])
        node.meta["val"] = values = corrected(node.target, args, node.meta["val"])
        for user in node.users:
            if user.target is operator.getitem:
                user.meta["val"] = values[user.args[1]]
