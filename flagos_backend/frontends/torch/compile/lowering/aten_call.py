"""An operator left whole: the custom call ``aten::<op>.<overload>`` that kernels/reference/aten.py runs."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.utils._pytree import tree_leaves, tree_map_only

from flagos_backend.frontends.torch.compile.dtypes import ELEMENT_TYPE, STORED_TYPE
from flagos_backend.frontends.torch.compile.errors import NoLoweringError
from flagos_backend.frontends.torch.compile.layout import layout_of
from flagos_backend.frontends.torch.compile.lowering.emitter import Emitter
from flagos_backend.frontends.torch.compile.lowering.table import Overload
from flagos_backend.frontends.torch.compile.placement import is_supported
from flagos_backend.ir.attributes import CustomCallAttributes
from flagos_backend.ir.builder import Builder
from flagos_backend.ir.hlo import Instruction
from flagos_backend.ir.opcode import Opcode
from flagos_backend.ir.types import ArrayShape, Shape, TupleShape

aten = torch.ops.aten

# Operators that are left whole because ATen's own kernel is what runs best; leaving one whole is no fallback. Those of
# them that have a rule for accelerators are left whole on the host alone, and where the rule does not have a case.
_WHOLE = """
_log_softmax _log_softmax_backward_data _safe_softmax _softmax _softmax_backward_data
_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention_for_cpu_backward
_native_batch_norm_legit _native_batch_norm_legit_functional _native_batch_norm_legit_no_training
native_batch_norm_backward native_group_norm native_group_norm_backward native_layer_norm
native_layer_norm_backward _fused_rms_norm _fused_rms_norm_backward
addmm addmv addr baddbmm convolution convolution_backward
embedding embedding_dense_backward index gather scatter scatter_add index_put index_select index_add
argmax argmin cummax cummin cumprod cumsum logcumsumexp max min sort topk
gelu gelu_backward silu silu_backward native_dropout native_dropout_backward
nll_loss_forward nll_loss_backward nll_loss2d_forward nll_loss2d_backward mse_loss mse_loss_backward
max_pool2d_with_indices max_pool2d_with_indices_backward avg_pool2d avg_pool2d_backward
_adaptive_avg_pool2d _adaptive_avg_pool2d_backward
"""
WHOLE: frozenset[str] = frozenset(f"aten::{name}" for name in _WHOLE.split())

# What they compute depends on how their first argument lies in memory, so it is laid out as it was when traced.
_READS_STRIDES = frozenset({aten.as_strided.default, aten.as_strided_scatter.default})

_NAMED = ((torch.dtype, "dtype"), (torch.layout, "layout"), (torch.memory_format, "memory_format"))


def views_read_as_they_lie(graph: Graph) -> dict[int, Node]:
    """The inputs, by number, that must begin where their memory does, as they did when traced, and what says so."""
    numbers = {node: number for number, node in enumerate(graph.find_nodes(op="placeholder"))}
    found: dict[int, Node] = {}
    for reader in graph.nodes:
        source = reader
        while isinstance(source.target, Overload) and _views_its_first(source.target):
            source = source.args[0]
        if reader.target in _READS_STRIDES and source in numbers:
            found[numbers[source]] = reader
    return found


def _views_its_first(target: Overload) -> bool:
    first = next(iter(target._schema.arguments), None)
    return target in _READS_STRIDES or (first is not None and first.alias_info is not None)


def _span(sizes: Sequence[int], strides: Sequence[int]) -> int:
    return 1 + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True)) if all(sizes) else 0


def _refuse_reading_around(target: Overload, arguments: Sequence[Any], keywords: Mapping[str, Any]) -> None:
    names = [argument.name for argument in target._schema.arguments]
    given = dict(zip(names, arguments, strict=False)) | dict(keywords)
    x, offset = given["self"], given.get("storage_offset") or 0
    if x.storage_offset() or offset + _span(given["size"], given["stride"]) > _span(x.shape, x.stride()):
        raise NoLoweringError("it reads the memory around a view")


def draws_random_numbers(target: Overload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call of ``target`` does: attention is tagged so and draws nothing where it leaves nothing out."""
    if torch.Tag.nondeterministic_seeded not in target.tags:
        return False
    names = [argument.name for argument in target._schema.arguments]
    if "dropout_p" not in names:
        return True
    number = names.index("dropout_p")
    return bool((args[number] if number < len(args) else kwargs.get("dropout_p", 0.0)) != 0)


def call_aten(
    emitter: Emitter,
    target: Overload,
    result: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    traced: tuple[Sequence[Any], Mapping[str, Any]],
    effect: bool,
) -> Any:
    """Emits ``target`` as it is; what it gives has the structure of ``result``, its traced value. ``traced`` are the
    traced ``args`` and ``kwargs``. Raises NoLoweringError for what cannot cross."""
    if target in _READS_STRIDES:
        _refuse_reading_around(target, *traced)
    writer = _Writer()
    config = {
        "arguments": [
            writer.encode(value, known, strides=number == 0 and target in _READS_STRIDES)
            for number, (value, known) in enumerate(zip(args, traced[0], strict=True))
        ],
        "keywords": {name: writer.encode(value, traced[1][name]) for name, value in kwargs.items()},
        "results": None if isinstance(result, torch.Tensor) else _kept(result),
    }
    dtypes = [_dtype_of_bits(tensor) for tensor in _tensors(result)]
    if any(dtypes):
        config["dtypes"] = dtypes
    orders = [_order(tensor) for tensor in _tensors(result)]
    if any(orders):
        config["orders"] = orders
    attributes = CustomCallAttributes(
        f"aten::{target._schema.name.removeprefix('aten::')}.{target._overloadname}",
        json.dumps(config, allow_nan=False).encode(),
        # Nobody asks for the value of an assertion: it runs for its effect.
        has_side_effect=effect or draws_random_numbers(target, args, kwargs) or not _tensors(result),
    )
    lying = [t if order is None else t.permute(order) for t, order in zip(_tensors(result), orders, strict=True)]
    shape = result_shape(lying[0] if isinstance(result, torch.Tensor) else lying)
    call = emitter.builder.add(Opcode.CUSTOM_CALL, writer.operands, attributes, shape=shape)
    permutations = iter(orders)

    def permuted(part: Instruction) -> Instruction:
        order = next(permutations)
        return part if order is None else emitter.transpose(part, [order.index(d) for d in range(len(order))])

    return tree_map_only(Instruction, permuted, unpack(emitter.builder, call, result))


def _order(tensor: torch.Tensor) -> list[int] | None:
    """The dimensions in the order in which they lie in memory; None for row-major ones and for what is not dense."""
    if tensor.is_contiguous() or not tensor.numel():
        return None
    layout = layout_of(tensor.shape, tensor.stride())
    return None if layout.is_row_major else list(layout.order)


def result_shape(result: Any) -> Shape:
    """One tensor is an array, everything else the tuple of the tensors in it."""
    if isinstance(result, torch.Tensor):
        return _array_shape(result)
    return TupleShape(tuple(_array_shape(tensor) for tensor in _tensors(result)))


def _array_shape(tensor: torch.Tensor) -> ArrayShape:
    kind = STORED_TYPE.get(tensor.dtype)
    if kind is None:
        raise NoLoweringError(f"{tensor.dtype} has no element type")
    return ArrayShape(kind, tuple(tensor.shape))


def holds_bits(*values: Any) -> bool:
    """Whether any traced tensor in the structures is held as bits, which only ATen computes with."""
    leaves = tree_leaves(values)
    return any(_dtype_of_bits(leaf) is not None for leaf in leaves if isinstance(leaf, torch.Tensor))


def _dtype_of_bits(tensor: torch.Tensor) -> str | None:
    """The name of a dtype that no element type stands for."""
    return None if tensor.dtype in ELEMENT_TYPE else str(tensor.dtype).removeprefix("torch.")


def unpack(builder: Builder, call: Instruction, result: Any) -> Any:
    """The value of a call in the structure of ``result``."""
    if isinstance(result, torch.Tensor):
        return call
    return _unpacked(builder, call, result, itertools.count())


def _unpacked(builder: Builder, call: Instruction, part: Any, numbers: Iterator[int]) -> Any:
    if isinstance(part, torch.Tensor):
        return builder.element(call, next(numbers))
    if isinstance(part, list | tuple):
        return [_unpacked(builder, call, inner, numbers) for inner in part]
    if part is None or isinstance(part, bool | int | float):
        return part
    raise NoLoweringError(f"it returns a {type(part).__name__}")


def _flat(result: Any) -> list[Any]:
    if isinstance(result, list | tuple):
        return [leaf for part in result for leaf in _flat(part)]
    return [result]


def _tensors(result: Any) -> list[torch.Tensor]:
    return [leaf for leaf in _flat(result) if isinstance(leaf, torch.Tensor)]


def _kept(result: Any) -> list[int]:
    return [index for index, leaf in enumerate(_flat(result)) if isinstance(leaf, torch.Tensor)]


class _Writer:
    """Arguments as JSON; collects the operands."""

    def __init__(self) -> None:
        self.operands: list[Instruction] = []

    def encode(self, value: Any, traced: Any, *, strides: bool = False) -> Any:
        """``strides``: write how a tensor lay when traced."""
        if isinstance(value, Instruction):
            return self._operand(value, traced, strides)
        if isinstance(value, list | tuple):
            return [self.encode(part, known) for part, known in zip(value, traced, strict=True)]
        if value is None or isinstance(value, bool | int | str):
            return value
        if isinstance(value, float):
            return value if math.isfinite(value) else {"float": repr(value)}
        if isinstance(value, complex):
            return {"complex": repr(value)}
        for kind, name in _NAMED:
            if isinstance(value, kind):
                return {name: str(value).removeprefix("torch.")}
        if isinstance(value, torch.device) and is_supported(value):
            return {"device": "here"}  # a program knows memory and no devices
        raise NoLoweringError(f"an argument is {value!r}")

    def _operand(self, value: Instruction, traced: torch.Tensor, strides: bool) -> dict[str, Any]:
        self.operands.append(value)
        written: dict[str, Any] = {"tensor": len(self.operands) - 1}
        dtype = _dtype_of_bits(traced)
        if dtype is not None:
            written["dtype"] = dtype
        if not traced.is_contiguous():
            written["strided"] = True
        if strides:
            written["strides"] = list(traced.stride())
        return written
