"""Compiled graphs: one executable for each set of concrete sizes. Between backend.py and program.py."""

from __future__ import annotations

import itertools
import logging
import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule, Interpreter, Node
from torch.utils._python_dispatch import _disable_current_modes

from flagos_backend.torch.compile import report
from flagos_backend.torch.compile.executable import Launcher
from flagos_backend.torch.compile.norm_statistics import correct_graph, corrected
from flagos_backend.torch.compile.options import CompileOptions
from flagos_backend.torch.compile.program import build_program

logger = logging.getLogger(__name__)

_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)
_numbers = itertools.count()


class Specialization:
    """A graph compiled for concrete sizes: a list of inputs to a list of outputs."""

    def __init__(self, name: str, graph: GraphModule, traced: dict[Node, Any], options: CompileOptions) -> None:
        # Programs hold and compute real tensors, and AOTAutograd is tracing with fake ones around us.
        with _disable_current_modes():
            program = build_program(name, graph, traced, options)
            self._launch = Launcher(program) if program.serialized is not None else None
        self._sources = program.outputs.sources
        self._inputs = [source for source, _ in program.inputs]
        report.record(program.report)
        logger.info("%s", program.report)

    def __call__(self, inputs: list[Any]) -> list[Any]:
        results: list[torch.Tensor] = []
        if self._launch is not None:
            results = self._launch([inputs[s] if isinstance(s, int) else s for s in self._inputs])
        return [source(inputs, results) for source in self._sources]


class CompiledGraph:
    """A graph of AOTAutograd's: takes its inputs in one list, and empties it."""

    def __init__(self, graph: GraphModule, kind: str, options: CompileOptions) -> None:
        self._graph, self._options = graph, options
        self._name = f"{kind}_{next(_numbers)}"
        self._lock = threading.Lock()
        self._known: OrderedDict[tuple[Any, ...], Specialization] = OrderedDict()
        correct_graph(graph)
        traced = {node: node.meta.get("val") for node in graph.graph.nodes}
        self._dynamic = any(_is_symbolic(value) for value in traced.values())
        # A graph without symbols is compiled now, so that what cannot be compiled is refused when it is.
        self._static = None if self._dynamic else Specialization(self._name, graph, traced, options)

    def __call__(self, inputs: list[Any]) -> list[Any]:
        arguments = list(inputs)
        inputs.clear()
        if self._static is not None:
            return self._static(arguments)
        return self._specialized(arguments)(arguments)

    def _specialized(self, arguments: Sequence[Any]) -> Specialization:
        key = tuple((a.shape, a.stride()) if isinstance(a, torch.Tensor) else a for a in arguments)
        with self._lock:
            known = self._known.get(key)
            if known is not None:
                self._known.move_to_end(key)
                return known
            made = Specialization(self._name, self._graph, trace(self._graph, arguments), self._options)
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
    with FakeTensorMode(allow_non_fake_inputs=True, static_shapes=True) as mode, torch.no_grad():
        fake = [mode.from_tensor(a, static_shapes=True) if isinstance(a, torch.Tensor) else a for a in arguments]
        tracer = _Tracer(graph)
        tracer.run(*fake, enable_io_processing=False)
    return tracer.values
