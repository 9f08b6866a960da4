"""Which outputs of a graph the program computes, and how the others come from its inputs and outputs as views.

A view costs nothing on the host and a copy in a program, so views at the end of a graph stay outside. Outputs share
memory where the graph says so, and nowhere else: views, a detached tensor among them, are tensors of their own over the
memory of their base; any other node has memory of its own, also where passes find that two are equal. For program.py.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, final

import torch
from torch.fx import GraphModule, Node

from flagos_backend.frontends.torch.compile.layout import layout_of

# with_effects(token, operator, *args) returns (token, *results).
WITH_EFFECTS = torch.ops.higher_order.with_effects

# Gives one output from the graph's inputs and the program's outputs.
Source = Callable[[list[Any], list[torch.Tensor]], Any]


@final
@dataclass(frozen=True, slots=True)
class Returned:
    """An output that the program returns, by number; where it is None, it was written to the input at ``position``."""

    number: int
    position: int = -1


@dataclass(frozen=True, slots=True)
class OutputPlan:
    """``computed``: nodes that the program returns, each once. ``sources``: where each output of the graph comes from.
    ``writes``: nodes that it returns after those, each into the memory of a graph's input, by position; AOTAutograd is
    given that input for the output, or the value where it could not be written. ``is_direct``: whether the graph's
    outputs are the program's, no more and no less."""

    computed: tuple[Node, ...]
    sources: tuple[Source | Returned, ...]
    is_direct: bool
    writes: tuple[tuple[Node, int], ...] = ()

    def outputs(self, inputs: list[Any], results: list[torch.Tensor]) -> list[Any]:
        """The outputs of the graph. What the program returns costs no call of Python's each."""
        return [
            source(inputs, results)
            if type(source) is not Returned
            else inputs[source.position]
            if (value := results[source.number]) is None
            else value
            for source in self.sources
        ]


def plan_outputs(graph: GraphModule, traced: Mapping[Node, Any], written: Mapping[int, int]) -> OutputPlan:
    """``traced``: the traced value of every node. ``written``: outputs that are what an input becomes, by number, and
    the positions of the inputs."""
    return _Planner(graph, traced, written).run()


class _Planner:
    def __init__(self, graph: GraphModule, traced: Mapping[Node, Any], written: Mapping[int, int]) -> None:
        self._graph, self._traced, self._written = graph, traced, written
        self._positions = {n: i for i, n in enumerate(graph.graph.find_nodes(op="placeholder"))}
        self._computed: dict[Node, int] = {}
        self._sources: dict[Node, Source] = {}

    def run(self) -> OutputPlan:
        outputs = self._graph.graph.output_node().args[0]
        assert isinstance(outputs, list | tuple)
        writes = {n: output for n, output in enumerate(outputs) if n in self._written and self._is_written(n, output)}
        # An output that is the same node is the input, as in-place operators return it.
        changed = {output: n for n, output in writes.items()}
        plain = {n: self._returned(output) for n, output in enumerate(outputs) if output not in changed}
        computed = tuple(self._computed)
        numbers = {n: len(computed) + place for place, n in enumerate(writes)}
        written = {n: Returned(number, self._written[n]) for n, number in numbers.items()}
        sources = tuple(plain[n] if n in plain else written[changed[output]] for n, output in enumerate(outputs))
        return OutputPlan(
            computed,
            sources,
            is_direct=bool(computed) and tuple(outputs) == computed,
            writes=tuple((node, self._written[n]) for n, node in writes.items()),
        )

    def _is_written(self, number: int, output: Any) -> bool:
        """Whether the input is plain memory, dense and of one tensor."""
        if not isinstance(output, Node) or output.op == "placeholder":
            return False
        nodes = self._graph.graph.find_nodes(op="placeholder")
        old, new = self._traced[nodes[self._written[number]]], self._traced[output]
        if not isinstance(old, torch.Tensor) or not isinstance(new, torch.Tensor):
            return False
        alike = (old.shape, old.dtype, old.device) == (new.shape, new.dtype, new.device)
        return alike and old.numel() > 0 and layout_of(old.shape, old.stride()).strides == old.stride()

    def _returned(self, output: Any) -> Source | Returned:
        source = self._source(output)
        number = self._computed.get(output) if isinstance(output, Node) else None
        return source if number is None else Returned(number)

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
        if is_view(node):
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
    while is_view(node):
        base = node.args[0]
        assert isinstance(base, Node)
        node = base
    return node


def is_view(node: Node) -> bool:
    """Whether the node only looks at its first argument, or picks one of several such views."""
    if node.op != "call_function" or not node.args or not isinstance(node.args[0], Node):
        return False
    if node.target is operator.getitem:
        return is_view(node.args[0])
    target = node.target
    if target is torch.ops.aten._unsafe_view.default:
        return True  # autograd knows of no view here, yet the memory is one
    return isinstance(target, torch._ops.OpOverload) and target.namespace == "aten" and target.is_view
