"""Graphs of which each row is computed alone, so that a program for more rows computes fewer. For specialization.py.

A row is an element of the first dimension, whose size is the one symbol of the graph. Such programs get their inputs
filled up with rows of zeros, and of their results the rows that were asked for are taken.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
from torch.fx import GraphModule, Node
from torch.fx.experimental.symbolic_shapes import free_symbols

from flagos_backend.frontends.torch.compile.lowering.table import Overload
from flagos_backend.frontends.torch.compile.outputs import is_view
from flagos_backend.frontends.torch.compile.segments import CompiledGraph

aten = torch.ops.aten

_ELEMENTWISE: Final = (aten._to_copy.default, aten.clone.default, aten.pow.Tensor_Scalar, aten.where.self)
_MADE: Final = (aten.full.default, aten.zeros.default, aten.ones.default, aten.empty.memory_format)
_RESHAPES: Final = (
    *(aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.expand.default),
    *(aten.detach.default, aten.alias.default),
)
#: Operators and the number of their argument that names dimensions, of which the first must be none.
_OTHER_DIMENSIONS: Final = {
    aten.unsqueeze.default: 1,
    aten.squeeze.dim: 1,
    aten.slice.Tensor: 1,
    aten.select.int: 1,
    aten.split.Tensor: 2,
    aten.split_with_sizes.default: 2,
    aten.unbind.int: 1,
    aten.cat.default: 1,
    aten.mean.dim: 1,
    aten.sum.dim_IntList: 1,
    aten.amax.default: 1,
    aten.amin.default: 1,
    aten._softmax.default: 1,
}

#: What is taken of the first dimension by x[:].
_ALL_ROWS: Final = (0, 0, torch.iinfo(torch.int64).max)


class NotByRows(Exception):
    """A part of the graph gives more than rows of its own."""


def is_by_rows(graph: GraphModule, outside: Callable[[Node], bool]) -> bool:
    """Whether each operator of the graph that PyTorch does not run between programs computes its rows alone."""
    symbols: set[Any] = set()
    for node in graph.graph.nodes:
        for value in _parts(node.meta.get("val")):
            symbols |= free_symbols(value) if value is not None else set()
    if len(symbols) != 1:
        return False
    return all(
        _keeps_rows(node)
        for node in graph.graph.nodes
        if node.op in ("placeholder", "call_function") and not outside(node)
    )


def enough(rows: int) -> int:
    """The number of rows, not below ``rows``, that programs are made for: two of them for each power of two."""
    power: int = 1 << max(rows - 1, 1).bit_length()
    smaller = power * 3 // 4
    return smaller if rows <= smaller else power


def row_count(graph: GraphModule, arguments: Sequence[Any]) -> int:
    """How many rows these inputs of a graph have."""
    inputs = zip(graph.graph.find_nodes(op="placeholder"), arguments, strict=True)
    return next(
        int(a if isinstance(a, int) else a.shape[0]) for node, a in inputs if _is_symbolic(node.meta.get("val"))
    )


def of_more_rows(graph: GraphModule, arguments: Sequence[Any], rows: int) -> list[Any]:
    """The inputs as they would be with so many rows, without their values."""
    inputs = zip(graph.graph.find_nodes(op="placeholder"), arguments, strict=True)
    return [_of_rows(a, rows) if _is_symbolic(node.meta.get("val")) else a for node, a in inputs]


def _of_rows(argument: Any, rows: int) -> Any:
    if not isinstance(argument, torch.Tensor):
        return rows
    return argument.new_empty_strided((rows, *argument.shape[1:]), argument.stride())


def filled_up(
    program: CompiledGraph, part: GraphModule, traced: Mapping[Node, Any], larger: Sequence[Any], rows: int
) -> CompiledGraph:
    """A part of a graph for ``traced``'s rows, by a program for ``rows``. ``larger``: what its outputs are in that
    program. Raises NotByRows where outputs share memory with inputs, or would lie otherwise."""
    count, inputs, numbers = 0, [], []
    for number, node in enumerate(part.graph.find_nodes(op="placeholder")):
        value = traced[node]
        if not _is_symbolic(node.meta.get("val")):
            continue
        if not isinstance(value, torch.Tensor):
            numbers.append(number)  # of rows
            continue
        if value.numel() and not all(value.stride()):
            raise NotByRows
        count = value.shape[0]
        inputs.append((number, (rows, *value.shape[1:]), value.stride()))
    shortened = []
    for number, node in enumerate(_outputs(part)):
        if not _is_symbolic(node.meta.get("val")):
            continue
        if _shares_input(node) or traced[node].stride() != larger[number].stride():
            raise NotByRows
        shortened.append(number)

    def run(given: list[Any]) -> list[Any]:
        for number in numbers:
            given[number] = rows
        for number, shape, strides in inputs:
            full = given[number].new_empty_strided(shape, strides)
            full[:count].copy_(given[number])
            full[count:].zero_()  # a place that is in every array
            given[number] = full
        results = list(program(given))
        for number in shortened:
            results[number] = results[number][:count]
        return results

    return run if inputs or numbers else program


def outputs_as_traced(part: GraphModule, traced: Mapping[Node, Any]) -> list[Any]:
    return [traced[node] for node in _outputs(part)]


def _outputs(part: GraphModule) -> list[Node]:
    nodes: Any = part.graph.output_node().args[0]
    return list(nodes)


def _shares_input(node: Node) -> bool:
    while is_view(node):
        node = node.args[0]  # type: ignore[assignment]
    return node.op != "call_function"


def _parts(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, list | tuple) else (value,)


def _is_symbolic(value: Any) -> bool:
    return bool(free_symbols([part for part in _parts(value) if part is not None]))


def _has_rows(value: Any) -> bool:
    """Whether a symbolic value is a tensor of rows, and symbolic in nothing else."""
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided or not value.dim():
        return False
    count, *sizes = value.shape
    is_symbol = isinstance(count, torch.SymInt) and bool(count.node.expr.is_Symbol)
    return is_symbol and not _is_symbolic((*sizes, *value.stride(), value.storage_offset()))


def _keeps_rows(node: Node) -> bool:
    value = node.meta.get("val")
    if node.op == "placeholder":
        return not _is_symbolic(value) or isinstance(value, torch.SymInt) or _has_rows(value)
    if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
        return False  # arithmetic on the number of rows
    operands = node.all_input_nodes
    tensors = [operand for operand in operands if _is_of_tensors(operand)]
    if not any(_is_symbolic(operand.meta.get("val")) for operand in operands):
        return not _is_symbolic(value)
    if not all(_has_rows(part) for part in _parts(value)):
        return False
    sizes_only = len(tensors) < len(operands)  # of which numbers may be made nothing but sizes
    return _rule(node, tensors, may_have_sizes=sizes_only)


def _is_of_tensors(node: Node) -> bool:
    return all(isinstance(part, torch.Tensor) for part in _parts(node.meta.get("val")))


def _rule(node: Node, tensors: list[Node], *, may_have_sizes: bool) -> bool:
    target = node.target
    if target in _MADE:
        return not isinstance(node.args[1] if target is aten.full.default else None, Node)
    if target in _RESHAPES:
        return _is_symbolic(tensors[0].meta["val"])
    if may_have_sizes or not isinstance(target, Overload):
        return target is operator.getitem
    symbolic = [_is_symbolic(tensor.meta["val"]) for tensor in tensors]
    if target is aten.slice.Tensor and node.args[1:] == _ALL_ROWS:
        return True
    if target in _OTHER_DIMENSIONS:
        return all(symbolic) and 0 not in _dimensions(node, tensors[0].meta["val"])
    if target is aten.permute.default:
        return bool(node.args[1][0] == 0)  # type: ignore[index]
    if target is aten.transpose.int:
        return 0 not in _dimensions(node, tensors[0].meta["val"]) and node.args[2] not in (0, -_rank(tensors[0]))
    if target in (aten.mm.default, aten.addmm.default):
        return symbolic[-2:] == [True, False]
    if target in (aten.embedding.default, aten.index_select.default):
        return symbolic == [False, True] and bool(target is aten.embedding.default or node.args[1] == 0)
    if target in _ELEMENTWISE or torch.Tag.pointwise in target.tags:
        rank = node.meta["val"].dim()
        return all(_rank(tensor) == rank for tensor, has in zip(tensors, symbolic, strict=True) if has)
    return False


def _rank(node: Node) -> int:
    return int(_parts(node.meta["val"])[0].dim())


def _dimensions(node: Node, value: Any) -> set[int]:
    """Those that an operator names, counted from the first; all where it names none."""
    rank = _parts(value)[0].dim()
    position = _OTHER_DIMENSIONS.get(node.target, 1)  # type: ignore[call-overload]
    named = node.args[position] if len(node.args) > position else None
    if isinstance(named, int):
        named = [named]
    if not isinstance(named, list | tuple) or not named:
        return {0}
    after = int(node.target is aten.unsqueeze.default)  # a dimension may be added behind the last
    return {dimension % (rank + after) for dimension in named}
