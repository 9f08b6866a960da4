"""vLLM's CompilerInterface over the Dynamo backend flagos. vLLM calls it for each piece of a model and range of tokens.

What is compiled is PyTorch's bundled artifact (frontends/torch/compile/artifact.py is in it), so vLLM's own package of
a whole model holds it too, and equal pieces are compiled once.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import vllm.envs
from torch._guards import TracingContext, tracing
from torch._subclasses import FakeTensorMode
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import GraphModule, Node
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from vllm.compilation.compiler_interface import CompilerInterface

from flagos_backend.frontends.torch.compile.backend import flagos
from flagos_backend.frontends.torch.compile.errors import ArtifactRefused
from flagos_backend.frontends.torch.compile.options import CompileOptions, read_options
from flagos_backend.frontends.vllm import saved

logger = logging.getLogger("flagos.vllm")

Piece = Callable[..., Any]
#: The key of VllmConfig.additional_config that holds the options of torch.compile(backend="flagos").
OPTIONS = "flagos"


class FlagosCompiler(CompilerInterface):  # type: ignore[misc]
    """Compiles pieces of models. ``compute_hash`` comes first: it reads the options."""

    name = "flagos"

    def __init__(self) -> None:
        self._given: Mapping[str, Any] = {}
        self._options = CompileOptions()
        self._folder: Path | None = None

    def compute_hash(self, vllm_config: Any) -> str:
        """Changes with our version, PyTorch's, the options and what programs run on. Raises UnknownOption."""
        additional = getattr(vllm_config, "additional_config", None)
        self._given = dict(additional.get(OPTIONS, {})) if isinstance(additional, Mapping) else {}
        self._options = read_options(None, self._given)
        facts = (*saved.versions(), self._options, os.environ.get("FLAGOS_DEVICE", ""))
        return hashlib.sha256(repr(facts).encode()).hexdigest()[:10]

    def initialize_cache(self, cache_dir: str, disable_cache: bool = False, prefix: str = "") -> None:
        self._folder = None if disable_cache else Path(cache_dir)

    def compile(
        self,
        graph: GraphModule,
        example_inputs: list[Any],
        compiler_config: dict[str, Any],
        compile_range: Any,
        key: str | None = None,
    ) -> tuple[Piece | None, Any | None]:
        """The piece, and where it is kept its name and file. ``compiler_config`` is Inductor's, and unread."""
        piece = self._compiled(graph, example_inputs, symbolic=not compile_range.is_single_size())
        if key is None or self._folder is None or vllm.envs.VLLM_USE_MEGA_AOT_ARTIFACT:
            return piece, None
        path = self._folder / key
        if not saved.write(path, piece, self._options):
            return piece, None
        return piece, (key, str(path))

    def load(
        self,
        handle: Any,
        graph: GraphModule,
        example_inputs: list[Any],
        graph_index: int,
        compile_range: Any,
    ) -> Piece:
        """The piece of ``handle``, or, where the file is not what was kept, the piece compiled again, with one line in
        the log."""
        path = (self._folder or Path()) / handle[0]
        try:
            piece = saved.read(path, self._options)
        except ArtifactRefused as error:
            logger.warning("%s: %s It is compiled again.", path, error)
            piece = self._compiled(graph, example_inputs, symbolic=not compile_range.is_single_size())
            saved.write(path, piece, self._options)
            return piece
        return _called_as(graph, piece)

    def _compiled(self, graph: GraphModule, example_inputs: Sequence[Any], *, symbolic: bool) -> Piece:
        with _traced(example_inputs, symbolic=symbolic):
            run = flagos(_with_tuple(graph), example_inputs, options=self._given)
        return _called_as(graph, saved.bundled(run))


@contextlib.contextmanager
def _traced(example_inputs: Sequence[Any], *, symbolic: bool) -> Iterator[None]:
    """A compile of its own: around it Dynamo traces the whole model, with other fake tensors. Sizes are those of the
    examples, symbolic where a range of them is compiled for."""
    fakes = (value.fake_mode for value in example_inputs if isinstance(value, FakeTensor))
    mode = next(fakes, None) or FakeTensorMode(shape_env=ShapeEnv())
    with tracing(TracingContext(mode)), saved.saving(), torch.no_grad():
        yield


def _returned(graph: GraphModule) -> Any:
    (output,) = graph.graph.find_nodes(op="output")
    return output.args[0]


def _with_tuple(graph: GraphModule) -> GraphModule:
    """A copy, which compiling may change, that returns a tuple, as AOTAutograd takes them."""
    copied = GraphModule(graph, copy.deepcopy(graph.graph))
    (output,) = copied.graph.find_nodes(op="output")
    if isinstance(output.args[0], Node):
        output.args = ((output.args[0],),)
        copied.recompile()
    return copied


def _called_as(graph: GraphModule, piece: Piece) -> Piece:
    """The piece with the results that the graph has: a piece that returns one value returns no tuple."""
    return saved.Single(piece) if isinstance(_returned(graph), Node) else piece
