"""Makes steps of a graph whose sizes are known. Between specialization.py, which compiles the programs among them, and
runner.py, which makes a function of the steps.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch._prims_common import clone_preserve_strides
from torch.fx import Graph, GraphModule, Node
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map_only

from flagos_backend.frontends.torch.compile.lowering.table import Overload
from flagos_backend.frontends.torch.compile.outputs import WITH_EFFECTS, is_view
from flagos_backend.frontends.torch.compile.outside import (
    WRITTEN_BASES,
    MutatingCall,
    View,
    mutating_call,
    name_of,
    results_before_bases,
    with_views,
    written_base,
)
from flagos_backend.frontends.torch.compile.program import ASSERTIONS, is_collective, place_of
from flagos_backend.frontends.torch.compile.segments import CompiledGraph
from flagos_backend.frontends.torch.compile.steps import (
    CallStep,
    Expected,
    ItemStep,
    ProgramStep,
    Sequence,
    Step,
    Value,
)

aten = torch.ops.aten

# Made where an operator outside writes to it: a program would fill it first.
_EMPTY = (
    aten.empty.memory_format,
    aten.empty_strided.default,
    aten.empty_like.default,
    aten.new_empty.default,
    aten.new_empty_strided.default,
)

# Compiles a part of the graph: the part, its traced values, its outputs that are what an input becomes and the
# positions of those inputs, and which operator outside gave an input, by position.
CompilePart = Callable[[GraphModule, dict[Node, Any], dict[int, int], dict[int, str]], CompiledGraph]


def sequence_of(
    graph: GraphModule,
    traced: Mapping[Node, Any],
    outside: Callable[[Node], bool],
    written: Mapping[int, int],
    compile_part: CompilePart,
) -> Sequence:
    """``outside``: what PyTorch runs. ``written``: outputs of the graph that are what an input becomes, by number, and
    the positions of the inputs."""
    return _Sequencer(graph, traced, outside, written, compile_part).run()


class _Sequencer:
    def __init__(
        self,
        graph: GraphModule,
        traced: Mapping[Node, Any],
        outside: Callable[[Node], bool],
        written: Mapping[int, int],
        compile_part: CompilePart,
    ) -> None:
        self._graph, self._traced, self._outside, self._compile_part = graph, traced, outside, compile_part
        self._end = graph.graph.output_node()
        self._inputs = tuple(graph.graph.find_nodes(op="placeholder"))
        self._becomes = {self._end.args[0][n]: self._inputs[position] for n, position in written.items()}  # type: ignore[index]
        self._light = self._find_light()
        self._groups: list[list[Node]] = []
        self._group_of: dict[Node, int] = {self._end: -1}
        self._group()
        self._group_of[self._end] = len(self._groups)
        self._last_uses: dict[Node, int] = {}
        self._places = self._find_places() if written else {}
        self._values: dict[Node, Any] = {}
        self._steps: list[Step] = []
        self._fresh = 0

    def run(self) -> Sequence:
        for node in self._inputs:
            self._values[node] = Value(node.name)
        for number, group in enumerate(self._groups):
            if self._outside(group[0]):
                self._call_outside(group[0], group[1:])
            else:
                self._program(number, group)
        outputs = tuple(self._given(self._end.args[0]))
        return Sequence(tuple(node.name for node in self._inputs), tuple(self._steps), outputs)

    # ---- Grouping

    def _find_light(self) -> set[Node]:
        """Views and empty tensors that no program needs: PyTorch makes them just before they are needed."""
        light: set[Node] = set()
        for node in reversed(self._graph.graph.nodes):
            if not (node.op == "call_function" and (node.target in _EMPTY or is_view(node))):
                continue
            users = [user for user in node.users if not self._is_constant(user)]
            if all(user in light or user is self._end or self._outside(user) for user in users):
                light.add(node)
        # Parts of several views come from PyTorch if all of them do.
        return {n for n in light if n.target is not operator.getitem or n.args[0] in light}

    def _is_constant(self, node: Node) -> bool:
        """Arithmetic on sizes, which are known, and what is asserted of them, which was checked for these sizes."""
        known = isinstance(self._traced[node], bool | int | float) if node.op == "call_function" else False
        return known or node.target in ASSERTIONS

    def _group(self) -> None:
        is_open = False  # whether the last group takes more nodes
        for node in self._graph.graph.nodes:
            if node.op != "call_function" or node in self._light or self._is_constant(node):
                continue
            source = node.args[0] if node.target is operator.getitem else None
            if isinstance(source, Node) and source in self._group_of:
                self._group_of[node] = self._group_of[source]
            elif is_open and not self._outside(node):
                self._group_of[node] = len(self._groups) - 1
            else:
                self._group_of[node], is_open = len(self._groups), not self._outside(node)
                self._groups.append([])
            self._groups[self._group_of[node]].append(node)

    def _last_use(self, node: Node) -> int:
        """The number of the last group that needs the node, or a view of it that PyTorch makes."""
        known = self._last_uses.get(node)
        if known is None:
            uses = (self._last_use(u) if u in self._light else self._group_of.get(u, -1) for u in node.users)
            known = self._last_uses[node] = max(uses, default=-1)
        return known

    # ---- Values

    def _given(self, value: Any) -> Any:
        return torch.fx.map_arg(value, self._value)

    def _value(self, node: Node) -> Any:
        if node in self._values:
            return self._values[node]
        if node.op == "get_attr":
            return operator.attrgetter(str(node.target))(self._graph)
        if self._is_constant(node):
            return self._traced[node]
        assert node in self._light, node
        if node.target is operator.getitem:
            source, key = node.args
            return self._item(node, self._value(source), key)  # type: ignore[arg-type]
        if node.target in _EMPTY and not node.kwargs.get("pin_memory"):
            traced = self._traced[node]
            return self._emit(node, *_maker_of(traced), {})
        return self._emit(node, node.target, self._given(node.args), self._given(node.kwargs))

    def _emit(self, node: Node, target: Any, args: Any, keywords: Any, **more: Any) -> Value:
        self._steps.append(CallStep(target, tuple(args), dict(keywords), node.name, **more))
        value = self._values[node] = Value(node.name)
        return value

    def _item(self, node: Node, source: Value, key: int | str | None, **more: Any) -> Value:
        self._steps.append(ItemStep(source.name, node.name, key, **more))
        value = self._values[node] = Value(node.name)
        return value

    def _temporary(self, target: Any, *args: Any) -> Value:
        self._fresh += 1
        name = f"temporary_{self._fresh}"
        self._steps.append(CallStep(target, args, {}, name))
        return Value(name)

    # ---- Programs

    def _program(self, number: int, group: list[Node]) -> None:
        inside = set(group)
        needed = dict.fromkeys(operand for node in group for operand in node.all_input_nodes if operand not in inside)
        inputs = [n for n in needed if n.op != "get_attr" and not self._is_constant(n)]
        outputs = [n for n in group if self._last_use(n) > number]
        part = Graph()
        copies: dict[Node, Any] = {}
        for node in inputs:
            copies[node] = part.placeholder(node.name)
            copies[node].meta = dict(node.meta)
        for node in needed:
            if self._is_constant(node):
                copies[node] = self._traced[node]
        for node in (*(n for n in needed if n.op == "get_attr"), *group):
            copies[node] = part.node_copy(node, copies.__getitem__)
        part.output(tuple(copies[node] for node in outputs))
        traced = {copy: self._traced[node] for node, copy in copies.items() if isinstance(copy, Node)}
        producers = {
            n: name_of(producer) for n, node in enumerate(inputs) if (producer := self._producer(node)) is not None
        }
        written = dict(self._written(number, inputs, outputs))
        names = [self._value(node).name for node in inputs]
        program = self._compile_part(GraphModule(self._graph, part), traced, written, producers)
        self._steps.append(ProgramStep(program, tuple(names), tuple(node.name for node in outputs)))
        self._values.update((node, Value(node.name)) for node in outputs)

    def _producer(self, node: Node) -> Node | None:
        """The operator outside whose result the node is."""
        while node.target is operator.getitem:
            node = node.args[0]  # type: ignore[assignment]
        return node if self._outside(node) else None

    def _written(self, number: int, inputs: list[Node], outputs: list[Node]) -> Iterator[tuple[int, int]]:
        """The outputs of a program that are what inputs of the graph become, and may be written there."""
        for place, output in enumerate(outputs):
            target = self._becomes.get(output)
            if target is None:
                continue
            lying = [node for node, (memory, _) in self._places.items() if memory is target]
            at = [n for n, node in enumerate(inputs) if self._places.get(node) == (target, True)]
            if at and not any(self._last_use(node) > number for node in lying):
                yield place, at[0]

    def _find_places(self) -> dict[Node, tuple[Node, bool]]:
        """In whose memory each value lies, and whether it is all of that."""
        places: dict[Node, tuple[Node, bool]] = {}
        for node in self._graph.graph.nodes:
            base: Any = node.args[0] if is_view(node) else written_base(node)
            if base is None:
                places[node] = node, True
            else:
                memory, whole = places[base]
                places[node] = memory, whole and not is_view(node)
        return places

    # ---- Operators outside

    def _call_outside(self, node: Node, parts: list[Node]) -> None:
        call = mutating_call(node)
        if call is not None:
            self._call_mutating(node, call, parts)
        elif node.target is WITH_EFFECTS:
            self._call_with_effects(node, parts)
        else:
            target: Any = node.target
            self._emit_operator(node, target, self._given(node.args), self._given(node.kwargs))
            for part in parts:
                self._part_of(part, part.args[1])

    def _call_with_effects(self, node: Node, parts: list[Node]) -> None:
        """The operator under an effect token. The steps keep the order; the token is None."""
        _, target, *given = node.args
        result = self._traced[node]
        self._emit_operator(node, target, self._given(given), self._given(node.kwargs), result[1:])
        for part in parts:
            source, key = part.args
            if source is not node:
                self._part_of(part, key)
            elif key == 0:
                self._values[part] = None
            else:
                self._part_of(part, None if len(result) == 2 else key - 1)  # type: ignore[operator]

    def _call_mutating(self, node: Node, call: MutatingCall, parts: list[Node]) -> None:
        in_place = node.meta.get(WRITTEN_BASES, frozenset())
        bases = [
            base if base is None or number in in_place else self._temporary(clone_preserve_strides, base)
            for number, base in enumerate(self._given(call.bases))
        ]

        def view(of: View) -> Any:
            base = bases[of.base]
            return base if of.function is None else self._temporary(of.function, base, *self._given(of.arguments))

        keywords = self._given(with_views(call, view))
        before = results_before_bases(call)
        self._emit_operator(node, call.target, (), keywords, self._traced[node][:before] if before else None)
        for part in parts:
            key: Any = part.args[1]
            if part.args[0] is not node:
                self._part_of(part, key)
                continue
            number = call.names.index(key) if call.names is not None else key - before
            if number >= 0:
                self._item(part, bases[number], None)
            else:
                self._part_of(part, None if before == 1 else key)

    def _emit_operator(self, node: Node, target: Any, args: Any, keywords: Any, results: Any = None) -> None:
        """``results``: the traced results of the operator, where the node has others."""
        names: tuple[str, ...] = ()
        writes: frozenset[str] = frozenset()
        if isinstance(target, Overload):
            arguments = target._schema.arguments
            keywords = dict(keywords)
            positional = [a.name for a in arguments if not a.kwarg_only][len(args) :]
            while positional and positional[0] in keywords:
                args = (*args, keywords.pop(positional.pop(0)))
            names = tuple(a.name for a in arguments)
            writes = frozenset(a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write)
        if is_collective(target):
            target, names = functools.partial(_waited_for, target), ()
        traced = self._traced[node] if results is None else results
        traced = traced[0] if results is not None and len(results) == 1 else traced
        expected = self._expected(node, traced) if isinstance(traced, torch.Tensor) else None
        more = {"place": place_of(node), "expected": expected, "names": names, "writes": writes}
        self._emit(node, target, args, keywords, **more)

    def _part_of(self, part: Node, key: Any) -> None:
        source: Any = part.args[0]
        traced = self._traced[part]
        expected = self._expected(part, traced) if isinstance(traced, torch.Tensor) and key is not None else None
        self._item(part, Value(source.name), key, place=place_of(part), expected=expected)

    def _expected(self, node: Node, traced: torch.Tensor) -> Expected:
        moves = not isinstance(self._operator(node), Overload)
        always = any(user in self._light or self._is_apart(user) for user in self._consumers(node))
        return Expected(traced.dtype, traced.device, tuple(traced.shape), tuple(traced.stride()), moves, always)

    def _consumers(self, node: Node) -> Iterator[Node]:
        """Who uses a result, or a part of it."""
        for user in node.users:
            if user.target is operator.getitem and self._group_of.get(user) == self._group_of[node]:
                yield from self._consumers(user)
            else:
                yield user

    def _is_apart(self, node: Node) -> bool:
        return node is self._end or self._outside(node)

    def _operator(self, node: Node) -> Any:
        producer = node
        while producer.target is operator.getitem:
            producer = producer.args[0]  # type: ignore[assignment]
        if producer.target is WITH_EFFECTS:
            return producer.args[1]
        call = mutating_call(producer)
        return producer.target if call is None else call.target


def _maker_of(traced: torch.Tensor) -> tuple[Callable[..., torch.Tensor], tuple[Any, ...]]:
    """What makes memory for such a tensor, and its arguments. On the host without PyTorch's dispatcher, as Inductor has
    it, unless PyTorch is asked to fill new memory."""
    sizes, strides = tuple(traced.shape), tuple(traced.stride())
    if traced.device.type == "cpu" and not torch.are_deterministic_algorithms_enabled():
        return torch._C._dynamo.guards._empty_strided_cpu, (sizes, strides, traced.dtype)  # type: ignore[attr-defined]
    with _disable_current_modes():
        return torch.empty(0, dtype=traced.dtype, device=traced.device).new_empty_strided, (sizes, strides)


def _waited_for(target: Overload, *args: Any, **keywords: Any) -> Any:
    wait = torch.ops._c10d_functional.wait_tensor
    return tree_map_only(torch.Tensor, wait, target(*args, **keywords))
