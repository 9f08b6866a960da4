"""Corrects what PyTorch traces otherwise than the CPU's kernels return: dtypes and sizes of what is saved for a
derivative, on which that then insists. Before backend.py partitions a graph."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._guards import detect_fake_mode
from torch.fx import GraphModule, Node
from torch.utils._pytree import tree_leaves, tree_map_only

from flagos_backend.torch.compile.placement import computes_on_host
from flagos_backend.torch.compile.sites import HOST
from flagos_backend.torch.norms import BATCH_NORMS

aten = torch.ops.aten

# Takes an operator's traced arguments and result.
_Correction = Callable[[Sequence[Any], Any], Any]
#: Tensors of a norm whose dtype its statistics have: of the first that is given, else of the input.
_PARAMETERS: Final = ("weight", "bias", "running_mean", "running_var")


def statistics_dtype(x: torch.Tensor, *parameters: torch.Tensor | None) -> torch.dtype:
    """What the CPU's norms of ``x`` save statistics in, which PyTorch traces in the dtype of ``x``."""
    given = next((parameter for parameter in parameters if parameter is not None), x)
    return given.dtype


def _norm(target: Any, *, anywhere: bool = False) -> _Correction:
    """Statistics are the results 1 and 2. ``anywhere``: on accelerators as on the host; of other norms PyTorch traces
    what accelerators return, and also for the device flagos, over whatever memory that is."""
    places = _places(target)
    parameters = [places[name] for name in _PARAMETERS if name in places]

    def correct(args: Sequence[Any], result: Any) -> Any:
        if not anywhere and not computes_on_host(args[0].device):
            return result
        output, mean, scale, *rest = result
        dtype = statistics_dtype(args[0], *(args[place] for place in parameters))
        return (output, mean.to(dtype), scale.to(dtype), *rest)

    return correct


def _batch_norm(target: Any) -> _Correction:
    """Where the statistics are known, the CPU hands on none of them."""
    places, correct_dtypes = _places(target), _norm(target)
    always = "no_training" not in str(target) and "no_update" not in str(target)

    def correct(args: Sequence[Any], result: Any) -> Any:
        output, mean, scale, *rest = correct_dtypes(args, result)
        is_training = args[places["training"]] if "training" in places else always
        if not is_training and computes_on_host(args[0].device):
            mean, scale = mean.new_empty(0), scale.new_empty(0)
        return (output, mean, scale, *rest)

    return correct


def _places(target: Any) -> dict[str, int]:
    return {argument.name: number for number, argument in enumerate(target._schema.arguments)}


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


def _nansum(args: Sequence[Any], result: Any) -> Any:
    """No dimensions are all of them, which PyTorch traces as none."""
    defaults: list[Any] = [None, False]
    x, dims, keeps = [*args, *defaults[len(args) - 1 :]]
    return result if dims is None or len(dims) else result.new_empty([1] * x.dim() if keeps else [])


def _placed(traced: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    return torch.empty_strided(traced.shape, traced.stride(), dtype=traced.dtype, device=device)


_CORRECTIONS: Mapping[Any, _Correction] = {
    **{target: _batch_norm(target) for target in BATCH_NORMS},
    aten.native_layer_norm.default: _norm(aten.native_layer_norm.default),
    aten.native_group_norm.default: _norm(aten.native_group_norm.default, anywhere=True),
    aten._embedding_bag.default: _embedding_bag,
    aten._embedding_bag_forward_only.default: _embedding_bag,
    aten.nansum.default: _nansum,
}


def corrected(target: Any, args: Sequence[Any], result: Any) -> Any:
    """The traced ``result`` of an operator, with the dtypes and sizes that it really returns."""
    correction = _CORRECTIONS.get(target)
    return result if correction is None else correction(args, result)


def correct_graph(graph: GraphModule) -> None:
    """Corrects the traced values of a graph's nodes in place, and of what is computed from them."""
    changed: set[Node] = set()
    for node in graph.graph.nodes:
        follows = any(operand in changed for operand in node.all_input_nodes)
        if node.op != "call_function" or (not follows and node.target not in _CORRECTIONS):
            continue
        before = node.meta["val"]
        args, kwargs = torch.fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
        after = _traced(node.target, args, kwargs) if follows else before
        node.meta["val"] = after = corrected(node.target, args, after)
        if _form(after) != _form(before):
            changed.add(node)


def _traced(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    if target is operator.getitem:
        return target(*args)
    mode = detect_fake_mode(tree_leaves((args, kwargs)))
    assert mode is not None, "graphs are traced on tensors without data"
    with mode, enable_python_dispatcher(), torch.no_grad():
        return target(*args, **kwargs)


def _form(value: Any) -> list[Any]:
    """What is known of a traced value that others depend on."""
    leaves = tree_leaves(value)
    return [(x.dtype, x.shape, x.stride()) if isinstance(x, torch.Tensor) else x for x in leaves]
