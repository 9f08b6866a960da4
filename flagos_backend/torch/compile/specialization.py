"""Compiled graphs: one executable for each set of concrete sizes. Between backend.py and program.py."""

from __future__ import annotations

import functools
import itertools
import logging
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule, Interpreter, Node
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._python_dispatch import _disable_current_modes

from flagos_backend.torch.compile import report
from flagos_backend.torch.compile.corrections import correct_graph, corrected
from flagos_backend.torch.compile.counters import counters_as_tensors
from flagos_backend.torch.compile.errors import FallbackRefused, UnsupportedNode
from flagos_backend.torch.compile.executable import StridesDiffer, launcher_of
from flagos_backend.torch.compile.layout import Strided
from flagos_backend.torch.compile.lowering.aten_call import views_read_as_they_lie
from flagos_backend.torch.compile.options import CompileOptions, Fallback
from flagos_backend.torch.compile.program import BuiltProgram, build_program, place_of
from flagos_backend.torch.compile.segments import CompiledGraph, cut, decides_sizes, run_segments

logger = logging.getLogger(__name__)

_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)
_numbers = itertools.count()


def specialize(name: str, graph: GraphModule, traced: dict[Node, Any], options: CompileOptions) -> CompiledGraph:
    """The graph compiled for concrete sizes."""
    program, as_traced = _specialize(name, graph, traced, options, dense_inputs=False)
    if not any(isinstance(spec.layout, Strided) and spec.layout.overlaps for _, spec in program.inputs):
        return as_traced
    of_copies = _Once(lambda: _specialize(name, graph, traced, options, dense_inputs=True)[1])

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


def _specialize(
    name: str, graph: GraphModule, traced: dict[Node, Any], options: CompileOptions, *, dense_inputs: bool
) -> tuple[BuiltProgram, CompiledGraph]:
    # Programs hold and compute real tensors, and AOTAutograd is tracing with fake ones around us.
    with _disable_current_modes():
        program = build_program(name, graph, traced, options, dense_inputs=dense_inputs)
        launch = launcher_of(program) if program.serialized is not None else None
    report.record(program.report)
    logger.info("%s", program.report)
    sources, is_direct = program.outputs.sources, program.outputs.is_direct

    begin_their_memory = views_read_as_they_lie(graph.graph)

    def look(inputs: list[Any]) -> None:
        for number, node in begin_their_memory.items():
            if inputs[number].storage_offset():
                reason = "it reads the memory around a view"
                raise UnsupportedNode(target=node.target, reason=reason, place=place_of(node))

    def run_direct(inputs: list[Any]) -> list[Any]:
        assert launch is not None
        outputs = launch(inputs)
        inputs.clear()
        return outputs

    def run(inputs: list[Any]) -> list[Any]:
        look(inputs)
        results = launch(inputs) if launch is not None else []
        outputs = [source(inputs, results) for source in sources]
        inputs.clear()
        return outputs

    return program, run_direct if is_direct and not begin_their_memory else run


def compile_graph(graph: GraphModule, kind: str, options: CompileOptions) -> CompiledGraph:
    """Compiles a graph of AOTAutograd's: now if its sizes are known, so that what cannot be compiled is refused now;
    else for the sizes of each call, and in segments where sizes depend on data."""
    name = f"{kind}_{next(_numbers)}"
    correct_graph(graph)
    decisive = [node for node in graph.graph.nodes if decides_sizes(node)]
    if not decisive:
        return _compile_segment(name, options, graph)
    if options.fallback is Fallback.ERROR:
        raise FallbackRefused(target=decisive[0].target, place=place_of(decisive[0]))
    report.record(report.GraphReport(name, outside=Counter(str(node.target) for node in decisive)))
    return run_segments(graph, cut(graph), functools.partial(_compile_segment, name, options))


def _compile_segment(name: str, options: CompileOptions, graph: GraphModule) -> CompiledGraph:
    traced = {node: node.meta.get("val") for node in graph.graph.nodes}
    if not any(_is_symbolic(value) for value in traced.values()):
        return specialize(name, graph, traced, options)
    specializations = _Specializations(name, graph, options)

    def run(inputs: list[Any]) -> list[Any]:
        return specializations.of(inputs)(inputs)

    return run


class _Specializations:
    """The programs of one graph with symbolic sizes, by sizes and by the numbers that are not counters."""

    def __init__(self, name: str, graph: GraphModule, options: CompileOptions) -> None:
        self._name, self._graph, self._options = name, graph, options
        self._counters = counters_as_tensors(graph)
        self._lock = threading.Lock()
        self._known: OrderedDict[tuple[Any, ...], CompiledGraph] = OrderedDict()

    def of(self, arguments: list[Any]) -> CompiledGraph:
        """The program for these inputs, to which the counters among them are added as tensors."""
        key = tuple(
            (a.shape, a.stride()) if isinstance(a, torch.Tensor) else a
            for position, a in enumerate(arguments)
            if position not in self._counters
        )
        arguments.extend(torch.tensor(arguments[position]) for position in self._counters)
        with self._lock:
            known = self._known.get(key)
            if known is not None:
                self._known.move_to_end(key)
                return known
            made = specialize(self._name, self._graph, trace(self._graph, arguments), self._options)
            self._known[key] = made
            if len(self._known) > self._options.max_specializations:
                self._known.popitem(last=False)
            return made


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
