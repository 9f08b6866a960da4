"""Inputs that a program changes. In training the backward pass computes with the values from before the change, and
AOTAutograd writes the new ones into the same memory as soon as the forward graph has run; without a backward pass the
program itself may write them there. For backend.py and specialization.py."""

from __future__ import annotations

from typing import Any

import torch
from torch._functorch._aot_autograd.descriptors import (
    InputMutationAOTOutput,
    SubclassGetAttrAOTInput,
    SubclassGetAttrAOTOutput,
)
from torch.fx import GraphModule, Node

from flagos_backend.frontends.torch.compile.outputs import viewed


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
