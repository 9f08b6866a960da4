"""torch.compile(model, backend="flagos"): Dynamo's graph through AOTAutograd to compiled graphs. Where it begins."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.source import RandomValueSource
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.fx import GraphModule

from flagos_backend.frontends.torch.compile.attention import compute_weights_again
from flagos_backend.frontends.torch.compile.corrections import correct_graph
from flagos_backend.frontends.torch.compile.decompositions import decompositions_for, runs_on_host
from flagos_backend.frontends.torch.compile.gradients import own_gradients
from flagos_backend.frontends.torch.compile.mutation import (
    HasBackward,
    changed_inputs,
    keep_values,
    may_copy,
    require_no_copies,
)
from flagos_backend.frontends.torch.compile.nhwc_activations import forget_places, keep_channels_last
from flagos_backend.frontends.torch.compile.options import CompileOptions, read_options
from flagos_backend.frontends.torch.compile.segments import CompiledGraph
from flagos_backend.frontends.torch.compile.specialization import INFERENCE, compile_graph
from flagos_backend.frontends.torch.tracing import leave_alone

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
    example_inputs = _as_called(graph, example_inputs)
    if may_copy(graph, example_inputs):
        try:
            return _compiled(graph, example_inputs, settings, copies=True)
        except HasBackward:
            pass  # AOTAutograd has the last word
    return _compiled(graph, example_inputs, settings, copies=False)


def _compiled(
    graph: GraphModule, example_inputs: Sequence[Any], settings: CompileOptions, *, copies: bool
) -> Callable[..., Any]:
    """``copies``: graphs copy to inputs that they change, so that AOTAutograd need not, input by input; for those
    without a backward pass. Raises HasBackward if there is one."""
    compiler: Callable[..., Callable[..., Any]] = aot_autograd(
        fw_compiler=functools.partial(_compile, "forward", settings),
        bw_compiler=functools.partial(_compile, "backward", settings),
        inference_compiler=functools.partial(_compile, INFERENCE, settings),
        partition_fn=functools.partial(_partition, runs_on_host(example_inputs)),
        decompositions=decompositions_for(example_inputs),
        keep_inference_input_mutations=copies,
    )
    if not _is_saved():
        with own_gradients():
            return compiler(graph, example_inputs)
    from flagos_backend.frontends.torch.compile import artifact  # it imports Inductor

    with artifact.keyed(settings), own_gradients():
        return compiler(graph, example_inputs)


def _is_saved() -> bool:
    """Whether PyTorch is going to save what it compiles now."""
    config = torch._functorch.config
    return bool(getattr(config, "force_autograd_cache", False) or getattr(config, "bundled_autograd_cache", False))


def _as_called(graph: GraphModule, example_inputs: Sequence[Any]) -> list[Any]:
    """Numbers of the module ``random`` are traced in PyTorch's default dtype; calls pass them in full precision."""
    inputs = list(example_inputs)
    for number, node in enumerate(graph.graph.find_nodes(op="placeholder")):
        argument = node.meta.get("grapharg")
        if argument is not None and isinstance(argument.source, RandomValueSource):
            traced = inputs[number]
            dtype = torch.float64 if traced.is_floating_point() else traced.dtype
            inputs[number] = traced.new_empty((), dtype=dtype, device="cpu")
    return inputs


def _partition(on_host: bool, joint: GraphModule, *arguments: Any, **options: Any) -> tuple[GraphModule, GraphModule]:
    """The graphs of the forward and the backward pass. What fuses with its users is computed again rather than saved:
    programs wait for memory. What the user marks with torch.utils.checkpoint is computed again all the same."""
    require_no_copies(joint)
    correct_graph(joint)
    _drop_detached(joint)
    if not on_host:
        compute_weights_again(joint, options["num_fwd_outputs"])
    changed = changed_inputs(joint)
    # Saving a parameter or a buffer costs nothing, unless it changes.
    static = options.get("static_lifetime_input_indices") or ()
    options["static_lifetime_input_indices"] = [n for n in static if n not in changed.values()]
    forward, backward = min_cut_rematerialization_partition(joint, *arguments, **options)
    keep_values(forward, changed, options["num_fwd_outputs"])
    keep_channels_last(forward, backward, options["num_fwd_outputs"])
    return forward, backward


def _drop_detached(joint: GraphModule) -> None:
    """A detached value, which is what it was detached from, is taken for one that cannot be computed again. A result
    that is detached stays: as one tensor object with another result, neither of the two would be differentiable."""
    for node in joint.graph.find_nodes(op="call_function", target=torch.ops.aten.detach.default):
        node.replace_all_uses_with(node.args[0], lambda user: user.op != "output")
        if not node.users:
            joint.graph.erase_node(node)
    joint.recompile()


def _compile(kind: str, options: CompileOptions, graph: GraphModule, example_inputs: Sequence[Any]) -> CompiledGraph:
    if not runs_on_host(example_inputs):
        forget_places(graph)
    if _is_saved():
        from flagos_backend.frontends.torch.compile import artifact

        return artifact.FlagosOutputCode(kind, options, graph)
    compiled = compile_graph(graph, kind, options)
    compiled._boxed_call = True  # type: ignore[attr-defined]
    return compiled
