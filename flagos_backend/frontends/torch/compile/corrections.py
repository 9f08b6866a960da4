"""Corrects what PyTorch traces otherwise than its kernels return: dtypes and sizes of what is saved for a derivative,
on which that then insists, and how results lie in memory. Before backend.py partitions a graph, and for
decompositions.py."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._guards import detect_fake_mode
from torch._prims_common import compute_elementwise_output_strides, suggest_memory_format
from torch.fx import GraphModule, Node
from torch.utils._pytree import tree_leaves, tree_map_only

from flagos_backend.frontends.torch.compile.placement import computes_on_host, inner_device, is_flagos
from flagos_backend.frontends.torch.corrected import BATCH_NORMS, IMAGE_OPERATORS

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
        output = _lies_as(0)(args, output)
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
    if not computes_on_host(args[0].device):
        return result
    result = _of_inner(aten._embedding_bag.default)(args, result)
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


def _of_inner(target: Any) -> _Correction:
    """For a tensor of the device flagos, what PyTorch traces for the device that computes for it. Of an unknown device
    it assumes that images are row-major."""

    def correct(args: Sequence[Any], result: Any) -> Any:
        device = args[0].device
        if not is_flagos(args[0]):
            return result
        mode = detect_fake_mode(args)
        assert mode is not None, "graphs are traced on tensors without data"
        inner = inner_device(device)
        with mode:
            alike = tree_map_only(torch.Tensor, lambda t: _placed(t, inner), list(args))
            return tree_map_only(torch.Tensor, lambda t: _placed(t, device), target(*alike))

    return correct


def _lies_as(number: int, *, anywhere: bool = False) -> _Correction:
    """A first result that lies as the image that is argument ``number``; row-major where that is permuted otherwise.
    ``anywhere``: on accelerators as on the host."""

    def correct(args: Sequence[Any], result: Any) -> Any:
        if not anywhere and not computes_on_host(args[0].device):
            return result
        if isinstance(result, torch.Tensor):
            return result.contiguous(memory_format=suggest_memory_format(args[number]))
        first, *rest = result
        return (None if first is None else correct(args, first), *rest)

    return correct


def _elementwise(*places: int) -> _Correction:
    """Results that lie as PyTorch's loops over elements lay them: by the first operand that tells two dimensions apart.
    ``places``: the arguments in the order in which the loop is given them, all tensors without."""

    def correct(args: Sequence[Any], result: Any) -> Any:
        given = [args[place] for place in places] if places else args
        operands = [value for value in given if isinstance(value, torch.Tensor)]

        def lay(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.dim() < 2:  # a sum of them, too
                return tensor
            strides = compute_elementwise_output_strides(*(operand.expand(tensor.shape) for operand in operands))
            return _laid(tensor, strides)

        return tree_map_only(torch.Tensor, lay, result)

    return correct


def _laid(tensor: torch.Tensor, strides: Sequence[int]) -> torch.Tensor:
    """The tensor in dense memory whose dimensions are in the order of ``strides``."""
    order = sorted(range(tensor.dim()), key=lambda d: -strides[d])
    physical = tensor.permute(order)
    if physical.is_contiguous():
        return tensor
    return physical.contiguous().permute([order.index(d) for d in range(tensor.dim())])


def _row_major(args: Sequence[Any], result: Any) -> Any:
    """Results that are row-major, however the operands lie; None for those that nobody asked for."""
    return tree_map_only(torch.Tensor, torch.Tensor.contiguous, result)


def _row_major_on_host(args: Sequence[Any], result: Any) -> Any:
    """The same where the host computes; accelerators' loops over elements lay them as the operands."""
    first = next(value for value in args if isinstance(value, torch.Tensor))
    return _row_major(args, result) if computes_on_host(first.device) else result


def _placed(traced: torch.Tensor, device: torch.device) -> torch.Tensor:
    return torch.empty_strided(traced.shape, traced.stride(), dtype=traced.dtype, device=device)


#: How results lie, of operators taken apart or left whole.
_LAYOUTS: Final[Mapping[Any, _Correction]] = {
    aten.channel_shuffle.default: _lies_as(0),
    aten.max_unpool2d.default: _lies_as(0),
    aten.reflection_pad3d.default: _lies_as(0),
    aten.replication_pad3d.default: _lies_as(0),
    aten.roll.default: _lies_as(0),
    aten.reflection_pad2d_backward.default: _lies_as(1),
    aten.reflection_pad3d_backward.default: _lies_as(1),
    aten.replication_pad2d_backward.default: _lies_as(1),
    aten.replication_pad3d_backward.default: _lies_as(1),
    aten.native_batch_norm_backward.default: _lies_as(1, anywhere=True),
    aten._log_softmax_backward_data.default: _row_major,
    aten.glu_backward.default: _row_major,
    aten.huber_loss_backward.default: _row_major,
    aten.log_sigmoid_forward.default: _row_major_on_host,
    aten.mse_loss_backward.default: _row_major,
    aten.native_layer_norm_backward.default: _row_major,
    aten.pow.Scalar: _row_major_on_host,
    aten.smooth_l1_loss_backward.default: _row_major,
    aten._prelu_kernel_backward.default: _elementwise(1, 2, 0),
    aten.binary_cross_entropy.default: _elementwise(0),
    aten.binary_cross_entropy_backward.default: _elementwise(1),
    aten.elu_backward.default: _elementwise(),
    aten.hardsigmoid_backward.default: _elementwise(),
    aten.hardswish_backward.default: _elementwise(),
    aten.hardtanh_backward.default: _elementwise(),
    aten.huber_loss.default: _elementwise(0),
    aten.leaky_relu_backward.default: _elementwise(1, 0),
    aten.log_sigmoid_backward.default: _elementwise(0),
    aten.logaddexp.default: _elementwise(),
    aten.logit_backward.default: _elementwise(),
    aten.softplus_backward.default: _elementwise(),
    aten.threshold_backward.default: _elementwise(1, 0),
    aten.xlogy.Tensor: _elementwise(),
}
_CORRECTIONS: Final[Mapping[Any, _Correction]] = {
    **_LAYOUTS,
    **{target: _batch_norm(target) for target in BATCH_NORMS},
    **{target: _of_inner(target) for target in IMAGE_OPERATORS},
    aten.native_layer_norm.default: _norm(aten.native_layer_norm.default),
    aten.native_group_norm.default: _norm(aten.native_group_norm.default, anywhere=True),
    aten._embedding_bag.default: _embedding_bag,
    aten._embedding_bag_forward_only.default: _embedding_bag,
    aten.nansum.default: _nansum,
}


def lying_as_whole(target: Any, rule: Callable[..., Any]) -> Callable[..., Any]:
    """The decomposition ``rule`` of an operator with results that lie as the operator's own."""
    lay = _LAYOUTS.get(target)
    if lay is None:
        return rule

    @functools.wraps(rule)
    def decomposition(*args: Any, **keywords: Any) -> Any:
        result = rule(*args, **keywords)
        return result if result is NotImplemented else lay(args, result)

    return decomposition


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
        if node.target is aten.view.default and follows:
            # Of what lies otherwise than traced, the sizes may only be had by a copy.
            node.target = aten.reshape.default
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
