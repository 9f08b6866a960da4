"""torch.compile(model, backend="flagos"): Dynamo's graph through AOTAutograd to compiled graphs. Where it begins."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import default_partition
from torch.fx import GraphModule

from flagos_backend.torch.compile.corrections import correct_graph
from flagos_backend.torch.compile.decompositions import decompositions_for
from flagos_backend.torch.compile.images import keep_channels_last
from flagos_backend.torch.compile.options import CompileOptions, read_options
from flagos_backend.torch.compile.segments import CompiledGraph
from flagos_backend.torch.compile.specialization import compile_graph
from flagos_backend.torch.tracing import leave_alone

leave_alone()


def flagos(
    graph: GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """Compiles a Dynamo graph; see options.py for ``mode`` and ``options``.

    Raises UnknownOption, BackendUnavailable when the loader accepted no backend, and UnsupportedTensor, UnsupportedNode
    or FallbackRefused for what cannot be part of a program.
    """
    settings = read_options(mode, options)
    compiler: Callable[..., Callable[..., Any]] = aot_autograd(
        fw_compiler=functools.partial(_compile, "forward", settings),
        bw_compiler=functools.partial(_compile, "backward", settings),
        inference_compiler=functools.partial(_compile, "inference", settings),
        partition_fn=_partition,
        decompositions=decompositions_for(example_inputs),
    )
    return compiler(graph, example_inputs)


def _partition(joint: GraphModule, *arguments: Any, **options: Any) -> tuple[GraphModule, GraphModule]:
    correct_graph(joint)
    # Saves what eager saves: computing it again pays only where it fuses with what needs it. What the user marks with
    # torch.utils.checkpoint is computed again all the same.
    forward, backward = default_partition(joint, *arguments, **options)
    keep_channels_last(forward, backward, options["num_fwd_outputs"])
    return forward, backward


def _compile(kind: str, options: CompileOptions, graph: GraphModule, example_inputs: Sequence[Any]) -> CompiledGraph:
    compiled = compile_graph(graph, kind, options)
    compiled._boxed_call = True  # type: ignore[attr-defined]
    return compiled
