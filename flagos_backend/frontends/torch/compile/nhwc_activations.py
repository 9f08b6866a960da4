"""Images that a forward graph keeps for its gradients lie with the channels last where an accelerator computes: both
graphs have them so (passes/channels_last.py), and only their border would have them otherwise. For backend.py."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule, Node

from flagos_backend.frontends.torch.compile.device_contexts import device_context_of

aten = torch.ops.aten
#: In a node's meta: a tensor without data that lies as the node's does where it crosses the border of its graph.
BORDER = "flagos_border"
_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}
# Beside what works on each element by itself.
_KEEPS_IMAGES = frozenset(
    {
        *(aten._native_batch_norm_legit_functional.default, aten._native_batch_norm_legit_no_training.default),
        *(aten.max_pool2d_with_indices.default, aten.avg_pool2d.default, aten._adaptive_avg_pool2d.default),
        aten.cat.default,
    }
)


def keep_channels_last(forward: GraphModule, backward: GraphModule, results: int) -> None:
    """Has ``forward`` return the images behind its ``results`` so, and ``backward`` take them. What operators see is as
    traced: some insist on the strides that others of their arguments have."""
    if any(_is_symbolic(node.meta.get("val")) for node in forward.graph.nodes):
        return
    outputs = forward.graph.output_node().args[0]
    assert isinstance(outputs, list | tuple)
    given = {output for output in outputs[:results] if isinstance(output, Node)}
    takers = {node.name: node for node in backward.graph.find_nodes(op="placeholder")}
    images = _images(forward)
    for kept in outputs[results:]:
        if isinstance(kept, Node) and kept.name in takers and images.get(kept) and kept not in given:
            traced = kept.meta["val"]
            for node in (kept, takers[kept.name]):
                node.meta[BORDER] = traced.contiguous(memory_format=_FORMATS[traced.dim()])


def forget_places(graph: GraphModule) -> None:
    """Has pools of which nobody asks where each maximum is return the maxima alone, which are a kernel of ours."""
    for node in graph.graph.find_nodes(op="call_function", target=aten.max_pool2d_with_indices.default):
        read = [user for user in node.users if user.args[1] != 0]
        if read or not node.args[0].meta["val"].is_floating_point():
            continue
        with graph.graph.inserting_before(node):
            pool = graph.graph.call_function(aten.max_pool2d.default, node.args, node.kwargs)
        pool.meta = node.meta | {"val": node.meta["val"][0]}
        for user in list(node.users):
            user.replace_all_uses_with(pool)
            graph.graph.erase_node(user)
        graph.graph.erase_node(node)
    graph.recompile()


def _images(graph: GraphModule) -> dict[Node, bool]:
    """Whether each node comes from a convolution, and is laid out in memory like no other than a row-major image."""
    found: dict[Node, bool] = {}
    for node in graph.graph.nodes:
        target: Any = node.target
        follows = any(found.get(operand) for operand in node.all_input_nodes)
        if target is aten.convolution.default:
            found[node] = _is_image(node)
        elif follows and isinstance(target, torch._ops.OpOverload):
            # What returns several tensors is judged by those.
            several = not isinstance(node.meta.get("val"), torch.Tensor)
            keeps = target in _KEEPS_IMAGES or torch.Tag.pointwise in target.tags
            found[node] = keeps and (several or _is_image(node))
        elif follows and node.op == "call_function":
            found[node] = _is_image(node)
    return found


def _is_image(node: Node) -> bool:
    traced = node.meta.get("val")
    if not isinstance(traced, torch.Tensor) or traced.dim() not in _FORMATS:
        return False
    return traced.is_contiguous() and not device_context_of([traced.device]).is_host


def _is_symbolic(value: Any) -> bool:
    return isinstance(value, torch.SymInt) or (
        isinstance(value, torch.Tensor) and any(isinstance(size, torch.SymInt) for size in value.shape)
    )
