"""Corrects what PyTorch traces otherwise than its CPU returns: dtypes and sizes of what is saved for a derivative, on
which that then insists. Before backend.py partitions a graph."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch._guards import detect_fake_mode
from torch.fx import GraphModule
from torch.utils._pytree import tree_map_only

from flagos_backend.torch.compile.placement import computes_on_host
from flagos_backend.torch.compile.sites import HOST

aten = torch.ops.aten

# Takes an operator's traced arguments and result.
_Correction = Callable[[Sequence[Any], Any], Any]


def _norm(weight: int) -> _Correction:
    """Statistics of halves with float32 weights are float32. ``weight``: its position among the arguments."""

    def correct(args: Sequence[Any], result: Any) -> Any:
        if args[0].dtype not in (torch.bfloat16, torch.float16) or not isinstance(args[weight], torch.Tensor):
            return result
        if args[weight].dtype is not torch.float32:
            return result
        output, *statistics = result
        return (output, *(tensor.to(torch.float32) for tensor in statistics))

    return correct


_SUM = 0


def _embedding_bag(args: Sequence[Any], result: Any) -> Any:
    """The CPU saves other lists than accelerators, as which PyTorch traces the device flagos over its memory too. Its
    sums of bfloat16 keep no list of the bag of each index, as those of float32."""
    device = args[0].device
    if not computes_on_host(device):
        return result
    if device.type != HOST:
        mode = detect_fake_mode(args)
        assert mode is not None, "graphs are traced on tensors without data"
        with mode:
            alike = tree_map_only(torch.Tensor, lambda t: _placed(t, HOST), list(args))
            result = tree_map_only(torch.Tensor, lambda t: _placed(t, device), aten._embedding_bag.default(*alike))
    defaults = (False, _SUM, False, None, False, -1)
    given: list[Any] = [*args, *defaults[len(args) - 3 :]]
    weight, reduction, scale, padding = given[0], given[4], given[6], given[8]
    dense = weight.stride(1) == 1 and (scale is None or scale.stride(0) == 1)
    if weight.dtype is not torch.bfloat16 or reduction != _SUM or padding >= 0 or not dense:
        return result
    output, bags, *rest = result
    return (output, bags.new_empty(0), *rest)


def _placed(traced: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    return torch.empty_strided(traced.shape, traced.stride(), dtype=traced.dtype, device=device)


_CORRECTIONS: Mapping[Any, _Correction] = {
    aten.native_layer_norm.default: _norm(weight=2),
    aten.native_group_norm.default: _norm(weight=1),
    aten._embedding_bag.default: _embedding_bag,
    aten._embedding_bag_forward_only.default: _embedding_bag,
}


def corrected(target: Any, args: Sequence[Any], result: Any) -> Any:
    """The traced ``result`` of an operator, with the dtypes and sizes that it really returns."""
    correction = _CORRECTIONS.get(target)
    return result if correction is None else correction(args, result)


def correct_graph(graph: GraphModule) -> None:
    """Corrects the traced values of a graph's nodes in place."""
    for node in graph.graph.nodes:
        if node.target not in _CORRECTIONS:
            continue
        args = torch.fx.map_arg(node.args, lambda n: n.meta["val"])
        node.meta["val"] = values = corrected(node.target, args, node.meta["val"])
        for user in node.users:
            if user.target is operator.getitem:
                user.meta["val"] = values[user.args[1]]
