"""Inputs that a program changes. In training the backward pass computes with the values from before the change, and
AOTAutograd writes the new ones into the same memory as soon as the forward graph has run. Without a backward pass the
graph itself copies them there, at its end, and a program may write them there at once. For backend.py and
specialization.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch._functorch._aot_autograd.descriptors import (
    InputMutationAOTOutput,
    SubclassGetAttrAOTInput,
    SubclassGetAttrAOTOutput,
)
from torch.fx import GraphModule, Node

from flagos_backend.frontends.torch.compile.errors import UnsupportedNode
from flagos_backend.frontends.torch.compile.outputs import viewed
from flagos_backend.frontends.torch.compile.program import place_of
from flagos_backend.frontends.torch.compile.segments import CompiledGraph

_COPY = torch.ops.aten.copy_.default
_SET_GRAD_ENABLED = torch._C._set_grad_enabled


class HasBackward(Exception):
    """A graph that was taken for one without a backward pass has one."""


def may_copy(graph: GraphModule, example_inputs: Sequence[Any]) -> bool:
    """Whether Dynamo's graph looks like one without a backward pass, which may copy to its inputs itself: no input asks
    for gradients, or nothing runs while they are recorded."""
    given = (*example_inputs, *graph.parameters(), *graph.buffers())
    if not any(isinstance(value, torch.Tensor) and value.requires_grad for value in given):
        return True
    is_recorded = torch.is_grad_enabled()
    for node in graph.graph.nodes:
        if node.target is _SET_GRAD_ENABLED:
            is_recorded = bool(node.args[0])
        elif node.op not in ("placeholder", "get_attr", "output") and is_recorded:
            return False
    return True


def require_no_copies(joint: GraphModule) -> None:
    """Raises HasBackward if the graph of both passes copies to its inputs."""
    if joint.graph.find_nodes(op="call_function", target=_COPY):
        raise HasBackward


def return_copies(graph: GraphModule) -> dict[int, int]:
    """Has the graph of AOTAutograd's return, after its results, what it copies to its inputs at its end, and copy no
    more. Gives the positions of those inputs, by number of the output. Raises UnsupportedNode where memory of an input
    is replaced or resized."""
    positions = {node: n for n, node in enumerate(graph.graph.find_nodes(op="placeholder"))}
    end = graph.graph.output_node()
    copies: list[tuple[int, Any]] = []
    for node in [n for n in graph.graph.nodes if n.op == "call_function" and n.args and n.args[0] in positions]:
        if node.target is _COPY:
            target, value = node.args[:2]
            node.replace_all_uses_with(value)
            graph.graph.erase_node(node)
            copies.append((positions[target], value))
        elif node.target is torch.ops.aten.set_.source_Tensor or "resize_storage_bytes_" in str(node.target):
            raise UnsupportedNode(target=node.target, reason="it changes an input's memory", place=place_of(node))
    assert isinstance(end.args[0], list | tuple)
    results = len(end.args[0])
    end.args = ((*end.args[0], *(value for _, value in copies)),)
    graph.recompile()
    return {number: position for number, (position, _) in enumerate(copies, results)}


def copying(run: CompiledGraph, copied: Mapping[int, int]) -> CompiledGraph:
    """Runs a graph of ``return_copies``: what no program wrote to its input is copied there. AOTAutograd has
    counted the write, in the version of the input, before."""
    first, positions = min(copied), tuple(copied.values())

    def call(inputs: list[Any]) -> list[Any]:
        targets = [inputs[position] for position in positions]
        outputs = run(inputs)
        for target, value in zip(targets, outputs[first:], strict=True):
            if value is not target:
                _copy(target, value)
        del outputs[first:]
        return outputs

    return call


def _copy(target: torch.Tensor, value: torch.Tensor) -> None:
    with torch.no_grad():
        if target.is_inference():
            target.copy_(value)
            return
        with torch.autograd.grad_mode._unsafe_preserve_version_counter(target):
            target.copy_(value)


def changed_inputs(joint: GraphModule) -> dict[str, int]:
    """The names of the inputs that the forward pass changes, and their positions. The graph of a region within another
    says nothing of its results: such a region changes none."""
    results = joint.graph.output_node().meta.get("desc", ())
    descriptions = [_whole(result) for result in results]
    changed = {result.mutated_input for result in descriptions if isinstance(result, InputMutationAOTOutput)}
    inputs = enumerate(joint.graph.find_nodes(op="placeholder"))
    return {node.name: position for position, node in inputs if _whole(node.meta.get("desc")) in changed}


def _whole(description: Any) -> Any:
    """What a part of a tensor subclass is a part of."""
    while isinstance(description, SubclassGetAttrAOTInput | SubclassGetAttrAOTOutput):
        description = description.base
    return description


def written_inputs(graph: GraphModule) -> dict[int, int]:
    """Of a graph without a backward pass: the numbers of the outputs that are what an input becomes, and the positions
    of those inputs."""
    results = graph.graph.output_node().meta.get("desc", ())
    inputs = {node.meta.get("desc"): n for n, node in enumerate(graph.graph.find_nodes(op="placeholder"))}
    written = {n: inputs.get(d.mutated_input) for n, d in enumerate(results) if isinstance(d, InputMutationAOTOutput)}
    return {number: position for number, position in written.items() if position is not None}


def keep_values(forward: GraphModule, changed: dict[str, int], results: int) -> None:
    """Has ``forward`` return copies of the changed inputs, and of views of them, that follow its ``results``: what is
    saved for the backward pass."""
    end = forward.graph.output_node()
    assert isinstance(end.args[0], list | tuple)
    outputs = list(end.args[0])
    for number, saved in enumerate(outputs[results:], results):
        if isinstance(saved, Node) and viewed(saved).name in changed:
            with forward.graph.inserting_before(end):
                outputs[number] = copy = forward.graph.call_function(torch.ops.aten.clone.default, (saved,))
            copy.meta["val"] = saved.meta["val"].clone()
    end.args = (tuple(outputs),)
    forward.recompile()
