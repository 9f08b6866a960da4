"""Which outputs of a graph the program computes, and how the others come from its inputs and outputs as views.

A view costs nothing on the host and a copy in a program, so views at the end of a graph stay outside. For program.py.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

# with_effects(token, operator, *args) returns (token, *results).
WITH_EFFECTS = torch.ops.higher_order.with_effects

# Gives one output from the graph's inputs and the program's outputs.
Source = Callable[[list[Any], list[torch.Tensor]], Any]


@dataclass(frozen=True, slots=True)
class OutputPlan:
    """``computed``: nodes that the program returns, each once. ``sources``: what makes each output of the graph.
    ``is_direct``: whether the graph's outputs are the program's, no more and no less."""

    computed: tuple[Node, ...]
    sources: tuple[Source, ...]
    is_direct: bool


def plan_outputs(graph: GraphModule, traced: Mapping[Node, Any]) -> OutputPlan:
    """``traced``: the traced value of every node."""
    return _Planner(graph, traced).run()


class _Planner:
    def __init__(self, graph: GraphModule, traced: Mapping[Node, Any]) -> None:
        self._graph, self._traced = graph, traced
        self._positions = {n: i for i, n in enumerate(graph.graph.find_nodes(op="placeholder"))}
        self._computed: dict[Node, int] = {}
        self._sources: dict[Node, Source] = {}

    def run(self) -> OutputPlan:
        outputs = self._graph.graph.output_node().args[0]
        assert isinstance(outputs, list | tuple)
        sources = tuple(self._source(output) for output in outputs)
        computed = tuple(self._computed)
        return OutputPlan(computed, sources, is_direct=bool(computed) and tuple(outputs) == computed)

    def _source(self, output: Any) -> Source:
        if not isinstance(output, Node):
            return lambda inputs, results: output
        known = self._sources.get(output)
        if known is None:
            known = self._sources[output] = self._make(output)
        return known

    def _make(self, node: Node) -> Source:
        if is_token(node):
            return lambda inputs, results: None
        traced = self._traced[node]
        if node.op == "placeholder":
            position = self._positions[node]
            return lambda inputs, results: inputs[position]
        if not isinstance(traced, torch.Tensor | list | tuple):
            return lambda inputs, results: traced
        if _is_view(node):
            return self._view(node)
        number = self._computed.setdefault(node, len(self._computed))
        return lambda inputs, results: results[number]

    def _view(self, node: Node) -> Source:
        base, *rest = node.args
        origin = self._source(base)
        args = torch.fx.map_arg(tuple(rest), self._traced.__getitem__)
        kwargs = torch.fx.map_arg(node.kwargs, self._traced.__getitem__)
        target: Any = node.target
        return lambda inputs, results: target(origin(inputs, results), *args, **kwargs)


def is_token(node: Node) -> bool:
    """Whether the node is an effect token, which only orders calls: AOTAutograd passes None and looks at none."""
    if node.op == "placeholder":
        return bool(node.users) and all(u.target is WITH_EFFECTS and u.args[0] is node for u in node.users)
    if node.target is not operator.getitem or node.args[1] != 0:
        return False
    call = node.args[0]
    return isinstance(call, Node) and call.target is WITH_EFFECTS


def viewed(node: Node) -> Node:
    """What an output is a view of: the node itself where it has memory of its own."""
    while _is_view(node):
        base = node.args[0]
        assert isinstance(base, Node)
        node = base
    return node


def _is_view(node: Node) -> bool:
    """Whether the node only looks at its first argument, or picks one of several such views."""
    if node.op != "call_function" or not node.args or not isinstance(node.args[0], Node):
        return False
    if node.target is operator.getitem:
        return _is_view(node.args[0])
    target = node.target
    return isinstance(target, torch._ops.OpOverload) and target.namespace == "aten" and target.is_view
