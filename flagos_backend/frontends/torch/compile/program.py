"""An FX graph of ATen operators to a serialized flagos.Program. Between specialization.py, which knows the sizes, and
executable.py, which runs it.
"""

from __future__ import annotations

import operator
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.fx import GraphModule, Node

from flagos_backend.frontends.torch.compile import device_contexts, placement
from flagos_backend.frontends.torch.compile.device_contexts import DeviceContext
from flagos_backend.frontends.torch.compile.dtypes import STORED_TYPE
from flagos_backend.frontends.torch.compile.errors import (
    FallbackRefused,
    NoLoweringError,
    UnsupportedNode,
    UnsupportedTensor,
)
from flagos_backend.frontends.torch.compile.layout import Layout, Strided, input_layout_of, layout_of
from flagos_backend.frontends.torch.compile.lowering.aten_call import (
    WHOLE,
    call_aten,
    draws_random_numbers,
    holds_bits,
)
from flagos_backend.frontends.torch.compile.lowering.emitter import Emitter
from flagos_backend.frontends.torch.compile.lowering.table import Overload, rule_of
from flagos_backend.frontends.torch.compile.nhwc_activations import BORDER
from flagos_backend.frontends.torch.compile.options import CompileOptions, Fallback
from flagos_backend.frontends.torch.compile.outputs import OutputPlan, is_token, plan_outputs
from flagos_backend.frontends.torch.compile.outside import name_of
from flagos_backend.frontends.torch.compile.report import GraphReport
from flagos_backend.importer import schema
from flagos_backend.importer.export import export_message
from flagos_backend.importer.options import EXCESS_PRECISION
from flagos_backend.ir.builder import Builder
from flagos_backend.ir.hlo import Alias, Instruction, Module
from flagos_backend.ir.strided_view import StridedView, strided_view
from flagos_backend.ir.types import ArrayShape

# The traced value of every node: tensors that hold no data, numbers, and structures of both.
Traced = Mapping[Node, Any]


@dataclass(frozen=True, slots=True)
class InputSpec:
    """A tensor that a program takes."""

    dtype: torch.dtype
    device: torch.device
    layout: Layout | Strided


@dataclass(frozen=True, slots=True)
class ResultSpec:
    """A tensor that a program returns. ``strides``: those that it was traced with, which are the layout's where that is
    dense."""

    dtype: torch.dtype
    device: torch.device
    layout: Layout
    strides: tuple[int, ...]
    target: int = -1  # the input of the program into whose memory it is written, if that can be


@dataclass(frozen=True, slots=True)
class BuiltProgram:
    """``inputs``: for each parameter the number of the graph's input, or a constant tensor of the graph, and how it
    lies. ``results``: how each output of the program lies. ``uses_rng_of_flagos``: whether it draws random numbers for
    tensors of the device flagos. ``device_context``: where it runs."""

    serialized: bytes | None  # None, as is the device context, when nothing is to be computed
    inputs: tuple[tuple[int | torch.Tensor, InputSpec], ...]
    results: tuple[ResultSpec, ...]
    outputs: OutputPlan
    uses_rng_of_flagos: bool
    device_context: DeviceContext | None
    report: GraphReport


def build_program(
    name: str,
    graph: GraphModule,
    traced: Traced,
    options: CompileOptions,
    *,
    dense_inputs: bool = False,
    written: Mapping[int, int] | None = None,
    graph_report: GraphReport | None = None,
) -> BuiltProgram:
    """``dense_inputs``: whether inputs that are not dense are taken as row-major copies, and not as they were traced.
    ``written``: as for plan_outputs. ``graph_report`` is added to where the program is a part of a graph.

    Raises UnsupportedTensor, UnsupportedNode or FallbackRefused, naming the node; RunsOutside.
    """
    told = graph_report or GraphReport(name)
    return _Translation(name, graph, traced, options, dense_inputs, told).run(written or {})


def place_of(node: Node) -> str:
    """The node, and the line of the user's program that it comes from."""
    lines = (node.meta.get("stack_trace") or "").strip().splitlines()
    frames = [line for line in lines if line.strip(" ^~")]  # without the marks under a line
    source = f", from {frames[-2].strip()}: {frames[-1].strip()}" if len(frames) > 1 else ""
    return f"%{node.name} = {name_of(node)}{source}"


_FRAME = re.compile(r'^ *File "([^"()\n]+)", line (\d+)', re.MULTILINE)
_TORCH = f"{Path(torch.__file__).parent}{os.sep}"


def metadata_of(node: Node) -> str:
    """``name (file:line)``, as frameworks' metadata is: the innermost line outside of PyTorch that made the node."""
    frames = _FRAME.findall(node.meta.get("stack_trace") or "")
    for file, line in reversed(frames):
        if not file.startswith(_TORCH):
            return f"{node.name} ({file}:{line})"
    return str(node.name)


# What they assert of sizes was checked when the graph was traced for these sizes.
ASSERTIONS = (
    torch.ops.aten._assert_scalar.default,
    torch.ops.aten.sym_constrain_range.default,
    torch.ops.aten.sym_constrain_range_for_size.default,
)


def is_collective(target: Any) -> bool:
    """Whether it is a functional collective of torch.distributed, which begins: wait_tensor ends it."""
    return isinstance(target, Overload) and target.namespace == "_c10d_functional" and "wait_tensor" not in str(target)


class RunsOutside(Exception):
    """This case of an operator has no form in a program, and PyTorch has to run it between programs."""

    def __init__(self, node: Node) -> None:
        super().__init__(node)
        self.node = node


def _has_effect(node: Node) -> bool:
    if node.target in ASSERTIONS:
        return False
    if is_collective(node.target):
        # The other processes come to it, whether or not this one uses what it gives.
        return True
    if isinstance(node.target, Overload) and torch.Tag.nondeterministic_seeded in node.target.tags:
        return draws_random_numbers(node.target, node.args, node.kwargs)
    return node.is_impure()


class _Translation:
    def __init__(
        self,
        name: str,
        graph: GraphModule,
        traced: Traced,
        options: CompileOptions,
        dense_inputs: bool,
        told: GraphReport,
    ) -> None:
        self._input_layout = layout_of if dense_inputs else input_layout_of
        self._graph, self._traced, self._options = graph, dict(traced), options
        self._builder = Builder(name)
        self._emitter = Emitter(self._builder)
        self._values: dict[Node, Any] = {}
        self._inputs: list[tuple[int | torch.Tensor, InputSpec]] = []
        self._effects = False
        self._uses_rng_of_flagos = False
        self._report = told

    def run(self, written: Mapping[int, int]) -> BuiltProgram:
        outputs = plan_outputs(self._graph, self._traced, written)
        positions = {n: i for i, n in enumerate(self._graph.graph.find_nodes(op="placeholder"))}
        needed = self._needed(outputs)
        # Parameters first, all of them: their numbers are those of the inputs.
        for node in self._graph.graph.nodes:
            if node in needed and node.op in ("placeholder", "get_attr"):
                self._leaf(node, positions)
        specs = [self._result(node) for node in outputs.computed]
        specs += [self._written(position) for _, position in outputs.writes]
        device_context = self._device_context(specs)
        self._emitter.on_host = device_context.is_host
        for node in self._graph.graph.nodes:
            if node in needed and node.op == "call_function":
                self._builder.metadata = metadata_of(node)
                self._values[node] = self._node(node)
        self._builder.metadata = ""
        if not outputs.computed and not outputs.writes and not self._effects:
            return BuiltProgram(None, (), (), outputs, False, None, self._report)
        nodes = [*outputs.computed, *(node for node, _ in outputs.writes)]
        roots = [self._physical(self._values[node], spec) for node, spec in zip(nodes, specs, strict=True)]
        entry = self._builder.build(self._builder.tuple(roots))
        aliases = tuple(Alias((number,), spec.target) for number, spec in enumerate(specs) if spec.target >= 0)
        envelope = schema.Program(schema_version=1, producer=f"torch {torch.__version__}")
        envelope.module.CopyFrom(export_message(Module(self._report.name, entry, aliases=aliases)))
        envelope.num_replicas = envelope.num_partitions = 1
        if self._options.excess_precision is not None:
            envelope.options[EXCESS_PRECISION] = str(int(self._options.excess_precision))
        if self._emitter.channels:
            groups = envelope.process_groups
            groups.rank, groups.size = torch.distributed.get_rank(), torch.distributed.get_world_size()
            groups.names.update(self._emitter.channels)
        return BuiltProgram(
            envelope.SerializeToString(),
            tuple(self._inputs),
            tuple(specs),
            outputs,
            self._uses_rng_of_flagos,
            device_context,
            self._report,
        )

    def _device_context(self, results: Sequence[ResultSpec]) -> DeviceContext:
        try:
            return device_contexts.device_context_of(
                [*(spec.device for _, spec in self._inputs), *(spec.device for spec in results)]
            )
        except ValueError as error:
            raise UnsupportedTensor(fact=f"others beside it: {error}", place=self._report.name) from None

    def _needed(self, outputs: OutputPlan) -> set[Node]:
        """What the computed outputs and the effects depend on."""
        needed: set[Node] = set()
        waiting = [*outputs.computed, *(node for node, _ in outputs.writes)]
        for node in self._graph.graph.nodes:
            if node.op == "call_function" and _has_effect(node):
                waiting.append(node)
        while waiting:
            node = waiting.pop()
            if node not in needed:
                needed.add(node)
                waiting.extend(node.all_input_nodes)
        return needed

    # ---- The border

    def _result(self, node: Node) -> ResultSpec:
        tensor = self._traced[node]
        self._check(node, tensor)
        strides = node.meta.get(BORDER, tensor).stride()
        return ResultSpec(tensor.dtype, tensor.device, layout_of(tensor.shape, strides), tuple(strides))

    def _written(self, position: int) -> ResultSpec:
        """What lies as the input of the graph at ``position``, in its memory."""
        target = next(n for n, (source, _) in enumerate(self._inputs) if isinstance(source, int) and source == position)
        spec = self._inputs[target][1]
        assert isinstance(spec.layout, Layout)
        return ResultSpec(spec.dtype, spec.device, spec.layout, spec.layout.strides, target)

    def _check(self, node: Node, tensor: torch.Tensor) -> None:
        fact = ""
        if tensor.layout is not torch.strided or tensor.is_quantized:
            fact = f"the layout {tensor.layout}" if not tensor.is_quantized else "quantized numbers"
        elif not placement.is_supported(tensor.device):
            fact = f"the device {tensor.device}"
        elif tensor.dtype not in STORED_TYPE:
            fact = f"the dtype {tensor.dtype}"
        if fact:
            raise UnsupportedTensor(fact=fact, place=place_of(node))

    def _leaf(self, node: Node, positions: Mapping[Node, int]) -> None:
        if node.op == "get_attr":
            value = operator.attrgetter(str(node.target))(self._graph)
            if not isinstance(value, torch.Tensor):
                self._values[node] = value  # the body of a higher-order operator
                return
            traced: Any = value
            self._traced[node] = value
            source: int | torch.Tensor = value.detach()
        else:
            traced, source = self._traced[node], positions[node]
            if not isinstance(traced, torch.Tensor) or is_token(node):
                self._values[node] = None if is_token(node) else traced
                return
        self._check(node, traced)
        layout = self._input_layout(traced.shape, node.meta.get(BORDER, traced).stride())
        self._inputs.append((source, InputSpec(traced.dtype, traced.device, layout)))
        parameter = self._builder.parameter(ArrayShape(STORED_TYPE[traced.dtype], layout.physical), node.name)
        self._values[node] = self._seen(parameter, layout)

    def _seen(self, parameter: Instruction, layout: Layout | Strided) -> Instruction:
        """The tensor of that layout in the memory that a parameter is."""
        if isinstance(layout, Layout):
            return self._emitter.transpose(parameter, layout.inverse)
        core = layout.core
        if core is not None:
            kept = self._emitter.transpose(parameter, core.inverse)
        else:
            sizes = [layout.sizes[d] for d in layout.kept]
            kept = strided_view(
                self._builder, parameter, sizes, StridedView(tuple(layout.strides[d] for d in layout.kept))
            )
        whole = len(layout.kept) == len(layout.sizes)
        return kept if whole else self._builder.broadcast(kept, layout.sizes, layout.kept)

    def _physical(self, value: Instruction, spec: ResultSpec) -> Instruction:
        return self._emitter.transpose(value, spec.layout.order)

    # ---- Nodes

    def _node(self, node: Node) -> Any:
        result = self._traced[node]
        if isinstance(result, bool | int | float):
            return result  # arithmetic on sizes, which are known
        if node.target is operator.getitem:
            container, index = node.args
            return self._values[container][index]  # type: ignore[index]
        args = torch.fx.map_arg(node.args, self._values.__getitem__)
        kwargs = torch.fx.map_arg(node.kwargs, self._values.__getitem__)
        try:
            assert isinstance(node.target, Overload), node.target
            return self._operator(node, node.target, result, args, kwargs)
        except NoLoweringError as error:
            raise UnsupportedNode(target=node.target, reason=error, place=place_of(node)) from None

    def _operator(self, node: Node, target: Overload, result: Any, args: Any, kwargs: Any) -> Any:
        name = str(target)
        traced = self._traced_arguments(node)
        rule = rule_of(target, on_host=self._emitter.on_host)
        if rule is not None and not holds_bits(result, traced):
            try:
                value = rule(self._emitter, result, *args, **kwargs)
                self._report.lowered[name] += 1
                self._effects |= _has_effect(node)
                return value
            except NoLoweringError:
                pass  # this case of it has none, so it runs as itself
        if target.namespace != "aten":
            raise RunsOutside(node)
        return self._whole(node, target, result, args, kwargs, traced)

    def _traced_arguments(self, node: Node) -> tuple[Any, Any]:
        arguments: tuple[Any, Any] = torch.fx.map_arg((node.args, node.kwargs), self._traced.__getitem__)
        return arguments

    def _whole(self, node: Node, target: Overload, result: Any, args: Any, kwargs: Any, traced: Any) -> Any:
        if target._schema.name in WHOLE:
            self._report.whole[str(target)] += 1
        else:
            self._refuse_fallback(node)
            self._report.fallback[str(target)] += 1
        effect = _has_effect(node)
        self._effects |= effect
        on_flagos = any(map(placement.is_flagos, torch.utils._pytree.tree_leaves(result)))
        self._uses_rng_of_flagos |= on_flagos and draws_random_numbers(target, args, kwargs)
        return call_aten(self._emitter, target, result, args, kwargs, traced, effect)

    def _refuse_fallback(self, node: Node) -> None:
        if self._options.fallback is Fallback.ERROR:
            raise FallbackRefused(target=node.target, place=place_of(node))
