"""Compiled graphs that PyTorch saves: torch.compile(...).aot_compile and AOTAutograd's bundled cache. For backend.py.

Saved is AOTAutograd's graph, which the loading process compiles: of its programs nothing is kept.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch._inductor import config
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.output_code import OutputCode
from torch._subclasses import FakeTensorMode
from torch.fx import Graph, GraphModule, Node
from torch.fx._graph_pickler import GraphPickler, Options
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from flagos_backend import __version__
from flagos_backend.frontends.torch.compile.errors import ArtifactRefused
from flagos_backend.frontends.torch.compile.nhwc_activations import BORDER
from flagos_backend.frontends.torch.compile.options import CompileOptions
from flagos_backend.frontends.torch.compile.segments import CompiledGraph
from flagos_backend.frontends.torch.compile.specialization import compile_graph

logger = logging.getLogger(__name__)

# What compiling reads of a node.
_METADATA = ("val", "desc", "stack_trace", "unbacked_bindings", BORDER)


class _Key(CustomGraphPass):
    """What AOTAutograd's cache has to know of this backend. PyTorch's keys take this from passes of the user; Inductor,
    which would run it, does not run."""

    def __init__(self, options: CompileOptions) -> None:
        self._key = repr(("flagos", _versions(), options))

    def __call__(self, graph: Graph) -> None:
        raise AssertionError("Inductor runs inside a compile of the backend flagos")

    def uuid(self) -> str:
        return self._key


def keyed(options: CompileOptions) -> AbstractContextManager[None]:
    """Within it PyTorch's cache gives only what this backend made, of these versions and with these options."""
    context: AbstractContextManager[None] = config.patch("post_grad_custom_pre_pass", _Key(options))
    return context


def _versions() -> tuple[str, str]:
    return f"flagos {__version__}", f"torch {torch.__version__}"


@dataclass
class FlagosOutputCode(OutputCode):
    """A compiled graph. Between ``prepare_for_serialization`` and ``post_compile`` it is data: the saved graph, its
    digest, and the versions of those who made it."""

    kind: str
    options: CompileOptions
    graph: GraphModule | None
    saved: bytes = b""
    digest: str = ""
    versions: tuple[str, ...] = ()
    _run: CompiledGraph | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self._boxed_call = True
        if self.graph is not None:
            kept = _copied(self.graph)
            self._run, self.graph = compile_graph(self.graph, self.kind, self.options), kept

    def __call__(self, inputs: Sequence[Any]) -> Any:
        assert self._run is not None, "an artifact runs after post_compile"
        return self._run(inputs)  # type: ignore[arg-type]

    def prepare_for_serialization(self) -> None:
        assert self.graph is not None
        names = {known.name for known in fields(Options)}
        wanted: dict[str, Any] = {"ops_filter": None, "node_metadata_key_filter": None}
        self.saved = GraphPickler.dumps(self.graph, Options(**{n: v for n, v in wanted.items() if n in names}))
        self.digest, self.versions = hashlib.sha256(self.saved).hexdigest(), _versions()
        self.graph = self._run = None

    def post_compile(self, example_inputs: Sequence[Any], constants: Any, graph_kwargs: Any) -> None:
        """Compiles what was loaded. Raises ArtifactRefused."""
        if self._run is not None:
            return
        fact = self._refused()
        if fact:
            error = ArtifactRefused(fact=fact)
            logger.warning("%s", error)  # PyTorch's cache compiles anew, and says nothing
            raise error
        graph = GraphPickler.loads(self.saved, FakeTensorMode(shape_env=ShapeEnv()))
        assert isinstance(graph, GraphModule)
        self.graph = _copied(graph)
        self._run = compile_graph(graph, self.kind, self.options)

    def _refused(self) -> str:
        if self.versions != _versions():
            made, here = " and ".join(self.versions), " and ".join(_versions())
            return f"was made by {made or 'an unknown version'}, and this is {here}"
        return "" if hashlib.sha256(self.saved).hexdigest() == self.digest else "holds other bytes than were saved"

    def set_triton_bundle(self, triton_bundle: Any) -> None:
        """Kernels are the backend's own, and in its cache."""


def _copied(graph: GraphModule) -> GraphModule:
    """The graph with what compiling reads of it."""
    copy = Graph()
    copies: dict[Node, Node] = {}
    for node in graph.graph.nodes:
        copied = copies[node] = copy.node_copy(node, copies.__getitem__)
        copied.meta = {key: node.meta[key] for key in _METADATA if key in node.meta}
    return GraphModule(graph, copy)
