"""Cuts a graph where sizes become known only while it runs (nonzero, item, ...): PyTorch runs the operators that decide
them, and what lies between is compiled for the sizes that came out. Between backend.py and specialization.py."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Interpreter, Node

# Takes its inputs in one list, and empties it.
CompiledGraph = Callable[[list[Any]], list[Any]]


def decides_sizes(node: Node) -> bool:
    """Whether sizes or numbers come out of the operator that only its data determine."""
    if node.target is operator.getitem:
        return False
    parts = (user for user in node.users if user.target is operator.getitem)
    return any(n.meta.get("unbacked_bindings") for n in (node, *parts))


@dataclass(frozen=True, slots=True)
class Segment:
    """``graph`` computes ``outputs`` from ``inputs``, nodes of the graph that it was cut from. ``decisive``: it is the
    one operator that decides sizes. ``frees``: inputs that nobody needs afterwards."""

    graph: GraphModule
    inputs: tuple[Node, ...]
    outputs: tuple[Node, ...]
    decisive: Node | None
    frees: tuple[Node, ...]


def cut(graph: GraphModule) -> list[Segment]:
    """The graph as segments, in the order in which they run."""
    groups = _groups(graph)
    group_of = {node: number for number, group in enumerate(groups) for node in group}
    last_use = {
        node: max((group_of.get(user, len(groups)) for user in node.users), default=-1)
        for node in graph.graph.nodes
        if node.op != "get_attr"
    }
    return [_segment(graph, number, group, last_use) for number, group in enumerate(groups)]


def _groups(graph: GraphModule) -> list[list[Node]]:
    groups: list[list[Node]] = []
    group_of: dict[Node, list[Node]] = {}
    is_open = False  # whether the last group takes more nodes
    for node in graph.graph.nodes:
        if node.op != "call_function":
            continue
        decisive = decides_sizes(node)
        if node.target is operator.getitem:
            # Where its structure is made: only tensors and numbers go between segments.
            group_of[node] = group_of[node.args[0]]
        elif is_open and not decisive:
            group_of[node] = groups[-1]
        else:
            groups.append([])
            group_of[node], is_open = groups[-1], not decisive
        group_of[node].append(node)
    return groups


def _segment(graph: GraphModule, number: int, group: Sequence[Node], last_use: dict[Node, int]) -> Segment:
    inside = set(group)
    needed = dict.fromkeys(operand for node in group for operand in node.all_input_nodes if operand not in inside)
    inputs = tuple(node for node in needed if node.op != "get_attr")
    outputs = tuple(node for node in group if last_use[node] > number)
    cut_out = Graph()
    copies: dict[Node, Node] = {}
    for node in inputs:
        copies[node] = cut_out.placeholder(node.name)
        copies[node].meta = dict(node.meta)
    for node in (*(node for node in needed if node.op == "get_attr"), *group):
        copies[node] = cut_out.node_copy(node, copies.__getitem__)
    cut_out.output(tuple(copies[node] for node in outputs))
    frees = tuple(node for node in inputs if last_use[node] == number)
    decisive = group[0] if decides_sizes(group[0]) else None
    return Segment(GraphModule(graph, cut_out), inputs, outputs, decisive, frees)


def run_segments(
    graph: GraphModule, segments: Sequence[Segment], compile_segment: Callable[[GraphModule], CompiledGraph]
) -> CompiledGraph:
    """What runs the segments one after another; ``compile_segment`` compiles those that decide no sizes."""
    steps = [(segment, _runner(segment, compile_segment)) for segment in segments]
    placeholders = tuple(graph.graph.find_nodes(op="placeholder"))
    results: Any = graph.graph.output_node().args[0]

    def run(inputs: list[Any]) -> list[Any]:
        values = dict(zip(placeholders, inputs, strict=True))
        inputs.clear()
        for segment, call in steps:
            arguments = [values[node] for node in segment.inputs]
            for node in segment.frees:
                del values[node]
            values.update(zip(segment.outputs, call(arguments), strict=True))
        return list(torch.fx.map_arg(results, values.__getitem__))

    return run


def _runner(segment: Segment, compile_segment: Callable[[GraphModule], CompiledGraph]) -> CompiledGraph:
    if segment.decisive is None:
        return compile_segment(segment.graph)

    def call(inputs: list[Any]) -> list[Any]:
        # It keeps the values of the run that goes on.
        return list(Interpreter(segment.graph).run(*inputs, enable_io_processing=False))

    return call
