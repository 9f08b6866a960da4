"""Compiled graphs: one executable for each set of concrete sizes. Between backend.py and program.py."""

from __future__ import annotations

import functools
import itertools
import logging
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule, Interpreter, Node
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map_only

from flagos_backend.frontends.torch.compile import report
from flagos_backend.frontends.torch.compile.corrections import correct_graph, corrected
from flagos_backend.frontends.torch.compile.counters import counters_as_tensors
from flagos_backend.frontends.torch.compile.errors import FallbackRefused, UnsupportedNode
from flagos_backend.frontends.torch.compile.executable import StridesDiffer, launcher_of
from flagos_backend.frontends.torch.compile.layout import Strided
from flagos_backend.frontends.torch.compile.lowering.aten_call import views_read_as_they_lie
from flagos_backend.frontends.torch.compile.mutation import copying, return_copies, written_inputs
from flagos_backend.frontends.torch.compile.nhwc_activations import BORDER
from flagos_backend.frontends.torch.compile.options import CompileOptions, Fallback
from flagos_backend.frontends.torch.compile.outside import find_written_bases, name_of, runs_outside
from flagos_backend.frontends.torch.compile.program import BuiltProgram, RunsOutside, build_program, place_of
from flagos_backend.frontends.torch.compile.rows import (
    NotByRows,
    enough,
    filled_up,
    is_by_rows,
    of_more_rows,
    outputs_as_traced,
    row_count,
)
from flagos_backend.frontends.torch.compile.runner import runner_of
from flagos_backend.frontends.torch.compile.segments import CompiledGraph, cut, decides_sizes, run_segments
from flagos_backend.frontends.torch.compile.sequence import sequence_of

logger = logging.getLogger(__name__)

#: The kind of a graph without a backward pass.
INFERENCE = "inference"

_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)
#: A graph whose rows are computed alone gets this many programs for the sizes that come first; sizes that come later
#: share programs of more rows.
_SIZES_OF_THEIR_OWN = 8
#: For how many sizes it is remembered how they share programs.
_MOST_ROWS = 4096
_numbers = itertools.count()

_Known = OrderedDict[tuple[Any, ...], CompiledGraph]


def specialize(
    name: str, graph: GraphModule, traced: dict[Node, Any], options: CompileOptions, written: dict[int, int]
) -> CompiledGraph:
    """The graph compiled for concrete sizes: one program, or several and what PyTorch runs between them. ``written``:
    outputs that are what an input becomes, by number, and the positions of the inputs."""
    forced: set[Node] = set()

    outside = functools.partial(_is_outside, forced, traced)
    parts = _Parts(name, options)
    while True:
        told = report.GraphReport(name)
        apart = [node for node in graph.graph.nodes if outside(node)]
        told.outside.update(name_of(node) for node in apart)
        if apart and options.fallback is Fallback.ERROR:
            raise FallbackRefused(target=apart[0].target, place=place_of(apart[0]))
        try:
            if apart:
                part = functools.partial(parts.compiled, told)
                run = runner_of(sequence_of(graph, traced, outside, written, part))
            else:
                run = _compile_part(name, options, told, graph, traced, written, {})
        except RunsOutside as case:
            forced.add(_of_graph(graph, case.node))
            continue
        report.record(told)
        logger.info("%s", told)
        return run


def _is_outside(forced: set[Node], traced: Mapping[Node, Any], node: Node) -> bool:
    return node in forced or (runs_outside(node) and not isinstance(traced[node], bool | int | float))


class _Parts:
    """The programs of one graph: parts that are alike, as of layers in a row, are one program."""

    def __init__(self, name: str, options: CompileOptions) -> None:
        self._name, self._options = name, options
        self._known: dict[str, tuple[CompiledGraph, report.GraphReport]] = {}

    def compiled(
        self,
        told: report.GraphReport,
        graph: GraphModule,
        traced: dict[Node, Any],
        written: dict[int, int],
        producers: dict[int, str],
    ) -> CompiledGraph:
        key = _described(graph, traced, written, producers)
        if key not in self._known:
            own = report.GraphReport(self._name)
            self._known[key] = _compile_part(self._name, self._options, own, graph, traced, written, producers), own
        program, own = self._known[key]
        told.add(own)
        return program


def _described(graph: GraphModule, traced: dict[Node, Any], *more: Any) -> str:
    """What a part computes, but for names."""
    numbers = {node: f"%{number}" for number, node in enumerate(graph.graph.nodes)}
    lines = []
    for node in graph.graph.nodes:
        name = node.target if node.op != "placeholder" else ""
        operands = torch.fx.map_arg((node.args, node.kwargs), lambda operand: _Name(numbers[operand]))
        values = tree_map_only(torch.Tensor, _lies, (traced.get(node), node.meta.get(BORDER)))
        lines.append(repr((node.op, str(name), operands, values)))
    return "\n".join((*lines, repr(more)))


class _Name(str):
    """Printed without quotes, unlike a text that the graph has."""

    def __repr__(self) -> str:
        return str(self)


def _lies(tensor: torch.Tensor) -> tuple[Any, ...]:
    strided = tensor.layout is torch.strided
    place = (tuple(tensor.stride()), tensor.storage_offset()) if strided else tensor.layout
    return tensor.dtype, tuple(tensor.shape), place, tensor.device, tensor.is_quantized


def _of_graph(graph: GraphModule, node: Node) -> Node:
    """The node of which ``node``, of a part of the graph, is a copy."""
    nodes: Iterable[Node] = graph.graph.nodes
    return next(known for known in nodes if known.name == node.name)


def _compile_part(
    name: str,
    options: CompileOptions,
    told: report.GraphReport,
    graph: GraphModule,
    traced: dict[Node, Any],
    written: dict[int, int],
    producers: dict[int, str],
) -> CompiledGraph:
    make = functools.partial(_program, name, graph, traced, options, written=written, producers=producers)
    program, as_traced = make(dense_inputs=False, told=told)
    if not any(isinstance(spec.layout, Strided) and spec.layout.overlaps for _, spec in program.inputs):
        return as_traced
    of_copies = _Once(lambda: make(dense_inputs=True, told=report.GraphReport(name))[1])

    def run(inputs: list[Any]) -> list[Any]:
        try:
            return as_traced(inputs)
        except StridesDiffer:  # a gradient may come with other strides than were traced
            return of_copies()(inputs)

    return run


class _Once:
    """Makes a compiled graph when it is first asked for."""

    def __init__(self, make: Callable[[], CompiledGraph]) -> None:
        self._make = make
        self._made: CompiledGraph | None = None
        self._lock = threading.Lock()

    def __call__(self) -> CompiledGraph:
        with self._lock:
            if self._made is None:
                self._made = self._make()
            return self._made


def _program(
    name: str,
    graph: GraphModule,
    traced: dict[Node, Any],
    options: CompileOptions,
    *,
    written: dict[int, int],
    producers: dict[int, str],
    dense_inputs: bool,
    told: report.GraphReport,
) -> tuple[BuiltProgram, CompiledGraph]:
    # Programs hold and compute real tensors, and AOTAutograd is tracing with fake ones around us.
    with _disable_current_modes():
        program = build_program(
            name, graph, traced, options, dense_inputs=dense_inputs, written=written, graph_report=told
        )
        launch = launcher_of(program, producers) if program.serialized is not None else None
    outputs_of, is_direct = program.outputs.outputs, program.outputs.is_direct
    begin_their_memory = views_read_as_they_lie(graph.graph)

    def look(inputs: list[Any]) -> None:
        for number, node in begin_their_memory.items():
            if inputs[number].storage_offset():
                reason = "it reads the memory around a view"
                raise UnsupportedNode(target=node.target, reason=reason, place=place_of(node))

    if launch is not None and is_direct and not begin_their_memory:

        def run_direct(inputs: list[Any]) -> list[Any]:
            outputs = launch(inputs)
            inputs.clear()
            return outputs

        # What calls it with a list of its own, which need not be emptied, saves a call (runner.py).
        run_direct.launch = launch  # type: ignore[attr-defined]
        return program, run_direct

    def run(inputs: list[Any]) -> list[Any]:
        look(inputs)
        results = launch(inputs) if launch is not None else []
        outputs = outputs_of(inputs, results)
        inputs.clear()
        return outputs

    return program, run


def compile_graph(graph: GraphModule, kind: str, options: CompileOptions) -> CompiledGraph:
    """Compiles a graph of AOTAutograd's: now if its sizes are known, so that what cannot be compiled is refused now;
    else for the sizes of each call, and in segments where sizes depend on data."""
    name = f"{kind}_{next(_numbers)}"
    if kind != INFERENCE:
        correct_graph(graph)
        # In training, AOTAutograd's own function returns what an input becomes, which must be a tensor of its own.
        return _compile_graph(name, graph, options, {})
    copied = return_copies(graph)
    correct_graph(graph)
    run = _compile_graph(name, graph, options, written_inputs(graph) | copied)
    return copying(run, copied) if copied else run


def _compile_graph(name: str, graph: GraphModule, options: CompileOptions, written: dict[int, int]) -> CompiledGraph:
    inputs = graph.graph.find_nodes(op="placeholder")
    find_written_bases(graph, [inputs[position] for position in written.values()])
    decisive = [node for node in graph.graph.nodes if decides_sizes(node)]
    if not decisive:
        return _compile_segment(name, options, written, graph)
    if options.fallback is Fallback.ERROR:
        raise FallbackRefused(target=decisive[0].target, place=place_of(decisive[0]))
    report.record(report.GraphReport(name, outside=Counter(str(node.target) for node in decisive)))
    return run_segments(graph, cut(graph), functools.partial(_compile_segment, name, options, {}))


def _compile_segment(name: str, options: CompileOptions, written: dict[int, int], graph: GraphModule) -> CompiledGraph:
    traced = {node: node.meta.get("val") for node in graph.graph.nodes}
    if not any(_is_symbolic(value) for value in traced.values()):
        return specialize(name, graph, traced, options, written)
    specializations = _Specializations(name, graph, options, written)

    def run(inputs: list[Any]) -> list[Any]:
        return specializations.of(inputs)(inputs)

    return run


class _Rows:
    """The programs of one graph that are made for more rows than are asked for. Of the host: elsewhere a program is
    replayed at the places of its inputs."""

    def __init__(self, name: str, graph: GraphModule, options: CompileOptions) -> None:
        self._name, self._graph, self._parts = name, graph, _Parts(name, options)
        self._known: dict[tuple[Any, ...], tuple[set[Node], list[tuple[CompiledGraph, list[Any]]]]] = {}

    def of(self, arguments: list[Any], traced: dict[Node, Any]) -> CompiledGraph:
        """The graph for these inputs. Raises NotByRows where it needs a program of its own."""
        tensors = [a for a in arguments if isinstance(a, torch.Tensor)]
        if any(tensor.device.type != "cpu" for tensor in tensors):
            raise NotByRows
        rows = enough(row_count(self._graph, arguments))
        key = (rows, *(tensor.stride() for tensor in tensors))
        if key not in self._known:
            self._known[key] = self._compiled(trace(self._graph, of_more_rows(self._graph, arguments, rows)))
        forced, programs = self._known[key]
        left = iter(programs)

        def shortened(
            part: GraphModule, values: dict[Node, Any], written: dict[int, int], producers: dict[int, str]
        ) -> CompiledGraph:
            program, larger = next(left)
            return filled_up(program, part, values, larger, rows)

        outside = functools.partial(_is_outside, forced, traced)
        return runner_of(sequence_of(self._graph, traced, outside, {}, shortened))

    def _compiled(self, traced: dict[Node, Any]) -> tuple[set[Node], list[tuple[CompiledGraph, list[Any]]]]:
        """Which operators PyTorch runs, and each program with what its outputs are."""
        forced: set[Node] = set()
        while True:
            told = report.GraphReport(self._name)
            outside = functools.partial(_is_outside, forced, traced)
            told.outside.update(name_of(node) for node in self._graph.graph.nodes if outside(node))
            programs: list[tuple[CompiledGraph, list[Any]]] = []

            def compiled(
                part: GraphModule,
                values: dict[Node, Any],
                written: dict[int, int],
                producers: dict[int, str],
                told: report.GraphReport = told,
                programs: list[tuple[CompiledGraph, list[Any]]] = programs,
            ) -> CompiledGraph:
                program = self._parts.compiled(told, part, values, written, producers)
                programs.append((program, outputs_as_traced(part, values)))
                return program

            try:
                sequence_of(self._graph, traced, outside, {}, compiled)
            except RunsOutside as case:
                forced.add(_of_graph(self._graph, case.node))
                continue
            report.record(told)
            logger.info("%s", told)
            return forced, programs


class _Specializations:
    """The programs of one graph with symbolic sizes, by sizes and by the numbers that are not counters."""

    def __init__(self, name: str, graph: GraphModule, options: CompileOptions, written: dict[int, int]) -> None:
        self._name, self._graph, self._options, self._written = name, graph, options, written
        self._counters = counters_as_tensors(graph)
        self._lock = threading.Lock()
        self._known: _Known = OrderedDict()
        self._compiled = 0
        self._of_rows: _Known = OrderedDict()
        self._rows = _Rows(name, graph, options) if is_by_rows(graph, runs_outside) else None

    def of(self, arguments: list[Any]) -> CompiledGraph:
        """The program for these inputs, to which the counters among them are added as tensors."""
        key = tuple(
            (a.shape, a.stride()) if isinstance(a, torch.Tensor) else a
            for position, a in enumerate(arguments)
            if position not in self._counters
        )
        arguments.extend(torch.tensor(arguments[position]) for position in self._counters)
        with self._lock:
            for kept in (self._known, self._of_rows):
                if (known := kept.get(key)) is not None:
                    kept.move_to_end(key)
                    return known
            traced = trace(self._graph, arguments)
            shared = self._by_rows(arguments, traced)
            if shared is not None:
                return self._kept(self._of_rows, key, shared, _MOST_ROWS)
            made = specialize(self._name, self._graph, traced, self._options, self._written)
            self._compiled += 1
            return self._kept(self._known, key, made, self._options.max_specializations)

    @staticmethod
    def _kept(known: _Known, key: tuple[Any, ...], made: CompiledGraph, most: int) -> CompiledGraph:
        known[key] = made
        if len(known) > most:
            known.popitem(last=False)
        return made

    def _by_rows(self, arguments: list[Any], traced: dict[Node, Any]) -> CompiledGraph | None:
        """Programs that are made for more rows, for a graph that many sizes have come to and that has such programs."""
        if self._compiled < _SIZES_OF_THEIR_OWN or self._written or self._rows is None:
            return None
        if not row_count(self._graph, arguments):
            return None
        try:
            return self._rows.of(arguments, traced)
        except NotByRows:
            self._rows = None
            return None


def _is_symbolic(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return any(isinstance(size, torch.SymInt) for size in (*value.shape, *_strides(value)))
    if isinstance(value, list | tuple):
        return any(_is_symbolic(part) for part in value)
    return isinstance(value, _SYMBOLIC)


def _strides(tensor: torch.Tensor) -> Sequence[Any]:
    return tensor.stride() if tensor.layout is torch.strided else ()


class _Tracer(Interpreter):
    """Runs a graph on tensors without data and keeps every value."""

    def __init__(self, graph: GraphModule) -> None:
        super().__init__(graph)
        self.values: dict[Node, Any] = {}

    def run_node(self, n: Node) -> Any:
        self.values[n] = value = super().run_node(n)
        return value

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return corrected(target, args, super().call_function(target, args, kwargs))


def trace(graph: GraphModule, arguments: Sequence[Any]) -> dict[Node, Any]:
    """The value of every node for these arguments, all sizes concrete."""
    # Loops as operators ask for an environment of symbols, though none comes out of them here.
    mode = FakeTensorMode(allow_non_fake_inputs=True, static_shapes=True, shape_env=ShapeEnv())
    with mode, torch.no_grad():
        fake = [mode.from_tensor(a, static_shapes=True) if isinstance(a, torch.Tensor) else a for a in arguments]
        tracer = _Tracer(graph)
        tracer.run(*fake, enable_io_processing=False)
    return tracer.values
