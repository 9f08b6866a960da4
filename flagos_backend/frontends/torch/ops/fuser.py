"""A pipeline of fusible operations as one autograd function, by a plan that fusions make.

A plan depends only on what a compiler guards: which operation first needs a gradient, and which fusions are registered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from flagos_backend.frontends.torch.ops.operation import BasicOperation, FusibleOperation, OperationContext

Fusion = Callable[..., list[FusibleOperation]]
"""func(ops, *, recipe) -> ops: replaces runs of operations by fused ones."""


@dataclass(frozen=True)
class Step:
    """One operation of a plan and the places of its basic operations in the pipeline."""

    operation: FusibleOperation
    first: int
    last: int


@dataclass(frozen=True)
class Plan:
    """How the basic operations of a pipeline run: forward in order, backward from the last step."""

    forward: tuple[Step, ...]
    backward: tuple[Step, ...]


@dataclass(frozen=True)
class Routes:
    """Where extra inputs come from and extra outputs go: (operation, slot) of the producer, or None for the caller."""

    sources: tuple[tuple[tuple[int, int] | None, ...], ...]
    to_caller: tuple[tuple[bool, ...], ...]


def _routes(ops: Sequence[BasicOperation]) -> Routes:
    """Match named channels. Raises ValueError for a name with two producers, none, or only a later one."""
    producers: dict[str, tuple[int, int]] = {}
    for index, op in enumerate(ops):
        for slot, (name, _) in op._output_channels.items():
            if name in producers:
                raise ValueError(
                    f"channel {name!r} has multiple producers: operations {producers[name][0]} and {index}. Rename one."
                )
            producers[name] = (index, slot)
    sources: list[tuple[tuple[int, int] | None, ...]] = []
    for index, op in enumerate(ops):
        row: list[tuple[int, int] | None] = []
        for slot in range(op.num_extra_inputs):
            channel = op._input_channels.get(slot)
            producer = None if channel is None else producers.get(channel)
            if channel is not None and producer is None:
                raise ValueError(
                    f"channel {channel!r} has no producer, and operation {index} ({type(op).__name__}) reads it"
                )
            if producer is not None and producer[0] >= index:
                raise ValueError(
                    f"channel {channel!r} has no earlier producer: operation {index} ({type(op).__name__}) reads it, "
                    f"and operation {producer[0]} produces it later. Move the producer before it."
                )
            row.append(producer)
        sources.append(tuple(row))
    to_caller = tuple(
        tuple(op._output_channels.get(slot, ("", True))[1] for slot in range(op.num_extra_outputs)) for op in ops
    )
    return Routes(tuple(sources), to_caller)


def _steps(operations: Iterable[FusibleOperation], ops: Sequence[BasicOperation]) -> tuple[Step, ...]:
    """Number the operations of a plan. Raises RuntimeError where they are not exactly the pipeline's."""
    steps: list[Step] = []
    expanded: list[BasicOperation] = []
    for operation in operations:
        parts = operation.expand()
        steps.append(Step(operation, len(expanded), len(expanded) + len(parts)))
        expanded.extend(parts)
    if len(expanded) != len(ops) or any(a is not b for a, b in zip(expanded, ops, strict=True)):
        raise RuntimeError(
            f"a fusion changed the operations of a pipeline: {[type(op).__name__ for op in ops]} "
            f"became {[type(op).__name__ for op in expanded]}. A fusion may only group neighbours."
        )
    return tuple(steps)


class _Run:
    """The arguments of one call that are not tensors."""

    def __init__(
        self,
        fuser: OperationFuser,
        plan: Plan,
        requires: list[bool],
        input_requires: bool,
        kwargs: list[dict[str, Any]],
        counts: list[int],
        extra: int,
    ) -> None:
        self.fuser = fuser
        self.plan = plan
        self.requires = requires
        self.input_requires = input_requires
        self.kwargs = kwargs
        self.counts = counts
        self.extra = extra


Produced = list[tuple[torch.Tensor | None, ...]]
"""Extra outputs of each basic operation that ran."""


def _extra_inputs(
    run: _Run, step: Step, given: Sequence[torch.Tensor], used: int, produced: Produced
) -> tuple[list[tuple[torch.Tensor, ...]], int]:
    """The extra inputs of a step, and how many of the caller's are used by then.

    What comes from an operation of the same step is its own affair: None.
    """
    rows: list[tuple[torch.Tensor, ...]] = []
    for index in range(step.first, step.last):
        row: list[Any] = []
        for source in run.fuser.routes.sources[index]:
            if source is None:
                row.append(given[used])
                used += 1
            elif source[0] >= step.first:
                row.append(None)
            else:
                tensor = produced[source[0]][source[1]]
                assert tensor is not None
                if not step.operation.splits_forward and run.requires[source[0]] and tensor.is_floating_point():
                    # A whole forward may ask the tensor whether it takes part in the backward.
                    tensor = tensor.detach().requires_grad_()
                row.append(tensor)
        rows.append(tuple(row))
    return rows, used


def _check_produced(run: _Run, step: Step, rows: Sequence[Sequence[torch.Tensor | None]]) -> None:
    """Raise RuntimeError where a step leaves out an extra output that something behind it or the caller needs."""
    for index, row in zip(range(step.first, step.last), rows, strict=True):
        name = type(run.fuser.ops[index]).__name__
        if len(row) != run.fuser.ops[index].num_extra_outputs:
            raise RuntimeError(
                f"{type(step.operation).__name__} returned {len(row)} extra outputs of {name}, "
                f"which has {run.fuser.ops[index].num_extra_outputs}"
            )
        for slot, tensor in enumerate(row):
            if tensor is not None:
                continue
            if run.fuser.routes.to_caller[index][slot]:
                raise RuntimeError(
                    f"{type(step.operation).__name__} returned None for extra output {slot} of {name}, which is public"
                )
            if any((index, slot) in sources for sources in run.fuser.routes.sources[step.last :]):
                raise RuntimeError(
                    f"{type(step.operation).__name__} returned None for extra output {slot} of {name}, "
                    "which is read outside its forward fusion"
                )


def _forward(
    run: _Run, input_: torch.Tensor, given: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, list[torch.Tensor], list[OperationContext]]:
    """Run the forward steps of a plan: the output, the extra outputs of the caller, the filled contexts."""
    ops, routes = run.fuser.ops, run.fuser.routes
    contexts = [
        OperationContext(needed, before)
        for needed, before in zip(run.requires, [run.input_requires, *run.requires[:-1]], strict=True)
    ]
    produced: Produced = []
    x, shares, used = input_, True, 0
    for step in run.plan.forward:
        extra_inputs, used = _extra_inputs(run, step, given, used, produced)
        before = ops[step.first - 1].get_grad_output_quantizer() if step.first else None
        behind = ops[step.last].get_input_quantizer() if step.last < len(ops) else None
        kwargs = run.kwargs[step.first : step.last]
        own = contexts[step.first : step.last]
        operation = step.operation
        extra_outputs: Sequence[Sequence[torch.Tensor]]
        if operation.splits_forward:
            requires = run.requires[step.first : step.last]
            y, extra_outputs, saved = operation.fuser_forward_compute(
                x,
                requires_grad=requires,
                basic_op_extra_inputs=extra_inputs,
                prev_op_grad_output_quantizer=before,
                next_op_input_quantizer=behind,
                basic_op_kwargs=kwargs,
            )
            operation.fuser_forward_save_ctx(
                own,
                x,
                saved,
                requires_grad=requires,
                basic_op_extra_inputs=extra_inputs,
                prev_op_grad_output_quantizer=before,
                next_op_input_quantizer=behind,
                basic_op_kwargs=kwargs,
            )
        else:
            y, extra_outputs = operation.fuser_forward(
                own,
                x,
                basic_op_extra_inputs=extra_inputs,
                prev_op_grad_output_quantizer=before,
                next_op_input_quantizer=behind,
                basic_op_kwargs=kwargs,
            )
        _check_produced(run, step, extra_outputs)
        shares = shares and (operation.returns_input or y is x)
        produced.extend(tuple(row) for row in extra_outputs)
        x = y
    outputs = [x]
    for row, wanted in zip(produced, routes.to_caller, strict=True):
        for tensor, keep in zip(row, wanted, strict=True):
            if keep:
                assert tensor is not None
                outputs.append(tensor)
    x, *extra = _apart(outputs, [input_, *given], shares)
    return x, extra, contexts


def _apart(outputs: list[torch.Tensor], inputs: list[torch.Tensor], shares: bool) -> list[torch.Tensor]:
    """The outputs, each a tensor of its own: autograd and compilers take no tensor twice.

    Eagerly what an operation returns as it was stays the same memory; a compiler gets a copy.
    """
    compiling = torch.compiler.is_compiling()
    seen = list(inputs)
    result: list[torch.Tensor] = []
    for place, tensor in enumerate(outputs):
        same = any(tensor is other for other in seen)
        seen.append(tensor)
        if compiling and (same or (shares and place == 0)):
            tensor = tensor.clone()
        elif same:
            tensor = tensor.view_as(tensor)
        result.append(tensor)
    return result


def _sum(a: torch.Tensor | None, b: torch.Tensor | None) -> torch.Tensor | None:
    if a is None or b is None:
        return a if b is None else b
    return a + b


def _backward(
    run: _Run, contexts: list[OperationContext], grad: torch.Tensor, grad_outputs: Sequence[torch.Tensor | None]
) -> tuple[torch.Tensor | None, list[torch.Tensor | None], list[torch.Tensor | None]]:
    """Run the backward steps of a plan: gradients of the input, the caller's extra inputs, all parameters."""
    ops, routes = run.fuser.ops, run.fuser.routes
    grads: list[list[torch.Tensor | None]] = []
    position = 0
    for wanted in routes.to_caller:
        row: list[torch.Tensor | None] = []
        for keep in wanted:
            row.append(grad_outputs[position] if keep else None)
            position += int(keep)
        grads.append(row)
    parameters: list[list[torch.Tensor | None]] = [[None] * count for count in run.counts]
    inputs: list[list[torch.Tensor | None]] = [[None] * len(sources) for sources in routes.sources]
    x: torch.Tensor | None = grad
    for step in reversed(run.plan.backward):
        if not any(run.requires[step.first : step.last]):
            x = None
            break
        if x is None:
            raise RuntimeError(
                f"{type(ops[step.last]).__name__} returned no gradient of its input, "
                f"and {type(ops[step.last - 1]).__name__} before it needs one"
            )
        extra: list[tuple[Any, ...]] = [tuple(grads[index]) for index in range(step.first, step.last)]
        x, grad_params, grad_inputs = step.operation.fuser_backward(
            contexts[step.first : step.last], x, basic_op_grad_extra_outputs=extra
        )
        for offset in range(step.last - step.first):
            index = step.first + offset
            if grad_params[offset]:
                parameters[index] = list(grad_params[offset])
            if len(parameters[index]) != run.counts[index]:
                raise RuntimeError(
                    f"{type(ops[index]).__name__} returned {len(parameters[index])} parameter gradients "
                    f"for {run.counts[index]} parameters"
                )
            for slot, (source, value) in enumerate(zip(routes.sources[index], grad_inputs[offset], strict=True)):
                if source is None:
                    inputs[index][slot] = value
                else:
                    grads[source[0]][source[1]] = _sum(grads[source[0]][source[1]], value)
    caller = [
        value
        for row, sources in zip(inputs, routes.sources, strict=True)
        for value, source in zip(row, sources, strict=True)
        if source is None
    ]
    return x, caller, [value for row in parameters for value in row]


class _Pipeline(torch.autograd.Function):
    """All operations of a pipeline as one node of the autograd graph."""

    @staticmethod
    def forward(ctx: Any, input_: torch.Tensor, run: _Run, *tensors: torch.Tensor) -> Any:
        output, extra, contexts = _forward(run, input_, tensors[: run.extra])
        saved: list[torch.Tensor | None] = []
        for context in contexts:
            saved.extend(context.to_save)
        ctx.save_for_backward(*saved)
        ctx.sizes = [len(context.to_save) for context in contexts]
        for context in contexts:
            context.to_save = ()
        ctx.run = run
        ctx.attributes = [dict(context.__dict__) for context in contexts]
        if extra:
            return (output, *extra)
        return output

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor, *grad_extra: torch.Tensor) -> Any:
        # New contexts: a compiler lets a backward change only what it made itself.
        contexts: list[OperationContext] = []
        position = 0
        saved = ctx.saved_tensors
        for attributes, size in zip(ctx.attributes, ctx.sizes, strict=True):
            context = OperationContext()
            for name, value in attributes.items():
                setattr(context, name, value)
            context.saved_tensors = tuple(saved[position : position + size])
            position += size
            contexts.append(context)
        grad_input, grad_inputs, grad_params = _backward(ctx.run, contexts, grad, grad_extra)
        return (grad_input, None, *grad_inputs, *grad_params)


@dataclass(frozen=True)
class _Piece:
    """The operations start to stop of a pipeline as one of their own.

    `sources`: for each of its extra inputs the operation and slot outside it, or None for the caller.
    """

    fuser: OperationFuser
    start: int
    stop: int
    sources: tuple[tuple[int, int] | None, ...]


class OperationFuser:
    """Runs fusible operations one behind the other, by a plan of fused ones."""

    forward_backward_fusion_functions: ClassVar[list[Fusion]] = []
    forward_fusion_functions: ClassVar[list[Fusion]] = []
    backward_fusion_functions: ClassVar[list[Fusion]] = []
    registrations: ClassVar[int] = 0

    def __init__(self, ops: Iterable[FusibleOperation], routes: Routes | None = None) -> None:
        self.ops: tuple[BasicOperation, ...] = tuple(part for op in ops for part in op.expand())
        if not self.ops:
            raise ValueError("a pipeline needs at least one operation")
        self.routes = _routes(self.ops) if routes is None else routes
        self.num_extra_inputs = sum(source is None for row in self.routes.sources for source in row)
        self._pieces = self._split_around_whole_forwards()
        for op in self.ops:
            op._extra_tensor_channels_locked = True
            op.pre_first_fuser_forward()

    @property
    def _basic_op_extra_input_sources(self) -> list[list[tuple[int, int] | None]]:
        """The producer of each extra input of each basic operation; None: the caller."""
        return [list(row) for row in self.routes.sources]

    @property
    def _forward_ops(self) -> list[tuple[FusibleOperation, list[int]]]:
        """The operations of the forward where all need a gradient, with the places of their basic ones."""
        return [(s.operation, list(range(s.first, s.last))) for s in self.plan(0).forward]

    @property
    def _backward_ops(self) -> list[tuple[FusibleOperation, list[int]]]:
        """The same of the backward."""
        return [(s.operation, list(range(s.first, s.last))) for s in self.plan(0).backward]

    @torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
    def _make_plan(self, first: int, registrations: int) -> None:
        """Keep the plan where `first` is the first operation that needs a gradient (their number: none does)."""
        name = f"_plan_{first}_{registrations}"
        if not hasattr(self, name):
            # Operations before the first that needs a gradient have no backward to fuse.
            start = first if first < len(self.ops) else 0
            joint = [*self.ops[:start], *self._fuse(OperationFuser.forward_backward_fusion_functions, self.ops[start:])]
            forward = self._fuse(OperationFuser.forward_fusion_functions, joint)
            backward = [*joint[:start], *self._fuse(OperationFuser.backward_fusion_functions, joint[start:])]
            setattr(self, name, Plan(_steps(forward, self.ops), _steps(backward, self.ops)))

    def plan(self, first: int) -> Plan:
        """The plan for the fusions of now. Under a compiler it is made while tracing, and guarded by its key."""
        registrations = OperationFuser.registrations
        self._make_plan(first, registrations)
        # An attribute for each: a compiler that knows a dictionary does not see what is put into it while it traces.
        plan: Plan = getattr(self, f"_plan_{first}_{registrations}")
        return plan

    @staticmethod
    def _fuse(functions: Iterable[Fusion], ops: Sequence[FusibleOperation]) -> list[FusibleOperation]:
        fused = list(ops)
        for function in functions:
            fused = function(fused, recipe=None)
        return fused

    def __call__(
        self, input_: torch.Tensor, *extra_inputs: torch.Tensor, basic_op_kwargs: list[dict[str, Any]] | None = None
    ) -> Any:
        """The output, followed by the extra outputs of the caller if there are any.

        Raises ValueError for a wrong number of extra inputs or of keyword dictionaries.
        """
        if len(extra_inputs) != self.num_extra_inputs:
            raise ValueError(f"this pipeline takes {self.num_extra_inputs} extra inputs, got {len(extra_inputs)}")
        kwargs: list[dict[str, Any]] = [{} for _ in self.ops] if basic_op_kwargs is None else basic_op_kwargs
        if len(kwargs) != len(self.ops):
            raise ValueError(f"basic_op_kwargs needs {len(self.ops)} dictionaries, got {len(kwargs)}")
        if torch.compiler.is_compiling():
            if self._pieces:
                return self._run_pieces(input_, extra_inputs, kwargs)
            for step in (*self.plan(0).forward, *self.plan(0).backward):
                if step.operation.leaves_graph:
                    return step.operation.run_outside_graph(self, input_, extra_inputs, kwargs)
        return self.run(input_, extra_inputs, kwargs)

    def _split_around_whole_forwards(self) -> tuple[_Piece, ...]:
        """Pipelines that a compiler takes one by one: an operation that leaves the graph, and each run between such.

        A channel from one to another is an extra output of the one and an extra input of the other. Empty where there
        is nothing to split.
        """
        if len(self.ops) == 1 or not any(op.leaves_graph for op in self.ops):
            return ()
        starts = [0]
        for index in range(1, len(self.ops)):
            if self.ops[index].leaves_graph or self.ops[index - 1].leaves_graph:
                starts.append(index)
        pieces: list[_Piece] = []
        for start, stop in zip(starts, [*starts[1:], len(self.ops)], strict=True):
            own, later = self.routes.sources[start:stop], self.routes.sources[stop:]
            crossing = {source for row in later for source in row if source is not None}
            sources = tuple(
                tuple(None if s is None or s[0] < start else (s[0] - start, s[1]) for s in row) for row in own
            )
            to_caller = tuple(
                tuple(keep or (start + place, slot) in crossing for slot, keep in enumerate(row))
                for place, row in enumerate(self.routes.to_caller[start:stop])
            )
            fuser = OperationFuser(self.ops[start:stop], Routes(sources, to_caller))
            pieces.append(_Piece(fuser, start, stop, tuple(s for row in own for s in row if s is None or s[0] < start)))
        return tuple(pieces)

    def _run_pieces(self, x: torch.Tensor, extra_inputs: tuple[torch.Tensor, ...], kwargs: list[dict[str, Any]]) -> Any:
        kept: list[list[torch.Tensor]] = [[] for _ in self.ops]
        used = 0
        for piece in self._pieces:
            given: list[torch.Tensor] = []
            for source in piece.sources:
                if source is None:
                    given.append(extra_inputs[used])
                    used += 1
                else:
                    given.append(kept[source[0]][source[1]])
            result = piece.fuser(x, *given, basic_op_kwargs=kwargs[piece.start : piece.stop])
            if not isinstance(result, tuple):
                x = result
                continue
            x, position = result[0], 1
            for place, row in enumerate(piece.fuser.routes.to_caller):
                for keep in row:
                    # What nobody asks for is not there; the main output keeps its place.
                    kept[piece.start + place].append(result[position] if keep else x)
                    position += int(keep)
        extra_outputs = [
            kept[index][slot]
            for index, row in enumerate(self.routes.to_caller)
            for slot, keep in enumerate(row)
            if keep
        ]
        return (x, *extra_outputs) if extra_outputs else x

    def run(self, input_: torch.Tensor, extra_inputs: tuple[torch.Tensor, ...], kwargs: list[dict[str, Any]]) -> Any:
        """Run as one node of the autograd graph, or without one where nothing needs a gradient."""
        requires = self._requires(input_, extra_inputs)
        for op, needed in zip(self.ops, requires, strict=True):
            op.pre_fuser_forward(requires_grad=needed)
        first = requires.index(True) if True in requires else len(self.ops)
        plan = self.plan(first)
        parameters = [list(op.parameters(recurse=False)) for op in self.ops]
        counts = [len(row) for row in parameters]
        run = _Run(self, plan, requires, input_.requires_grad, kwargs, counts, len(extra_inputs))
        if first == len(self.ops):
            output, extra, _ = _forward(run, input_, extra_inputs)
            return (output, *extra) if extra else output
        flat = [parameter for row in parameters for parameter in row]
        return _Pipeline.apply(input_, run, *extra_inputs, *flat)  # type: ignore[no-untyped-call]

    def _requires(self, input_: torch.Tensor, extra_inputs: Sequence[torch.Tensor]) -> list[bool]:
        """Which operations take part in the backward: the first with something to differentiate, and all behind it."""
        needed = torch.is_grad_enabled() and input_.requires_grad
        requires: list[bool] = []
        used = 0
        for op, sources in zip(self.ops, self.routes.sources, strict=True):
            if torch.is_grad_enabled():
                for source in sources:
                    if source is None:
                        needed = needed or extra_inputs[used].requires_grad
                        used += 1
                for parameter in op.parameters(recurse=False):
                    needed = needed or parameter.requires_grad
            requires.append(needed)
        return requires


FusibleOperation.make_pipeline = OperationFuser


def _register(functions: list[Fusion], function: Fusion, prepend: bool) -> None:
    functions.insert(0 if prepend else len(functions), function)
    OperationFuser.registrations += 1


def register_forward_fusion(function: Fusion, prepend: bool = False) -> None:
    """Apply a fusion to the forward of every pipeline."""
    _register(OperationFuser.forward_fusion_functions, function, prepend)


def register_backward_fusion(function: Fusion, prepend: bool = False) -> None:
    """Apply a fusion to the backward of every pipeline."""
    _register(OperationFuser.backward_fusion_functions, function, prepend)


def register_forward_backward_fusion(function: Fusion, prepend: bool = False) -> None:
    """Apply a fusion to forward and backward of every pipeline at once, before the others."""
    _register(OperationFuser.forward_backward_fusion_functions, function, prepend)
