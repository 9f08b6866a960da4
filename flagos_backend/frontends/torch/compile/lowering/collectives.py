"""Functional collectives of torch.distributed as HLO collectives. Participants are the processes of the default group;
each instruction's channel names the process group that it goes through."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _resolve_process_group

from flagos_backend.frontends.torch.compile.errors import NoLoweringError
from flagos_backend.frontends.torch.compile.lowering.emitter import Emitter, array
from flagos_backend.frontends.torch.compile.lowering.table import lowering
from flagos_backend.ir.attributes import CollectiveAttributes
from flagos_backend.ir.hlo import Instruction
from flagos_backend.ir.opcode import Opcode
from flagos_backend.ir.types import ElementType, TupleShape

c10d = torch.ops._c10d_functional

_REDUCTIONS: Final = {
    "sum": Opcode.ADD,
    "avg": Opcode.ADD,
    "product": Opcode.MULTIPLY,
    "min": Opcode.MINIMUM,
    "max": Opcode.MAXIMUM,
    "band": Opcode.AND,
    "bor": Opcode.OR,
    "bxor": Opcode.XOR,
}


def _processes(group: object) -> tuple[str, tuple[int, ...]]:
    """A group's name, and its processes by rank. Raises NoLoweringError for what names no group of this process."""
    name = group if isinstance(group, str) else getattr(group, "group_name", None)
    try:
        found = _resolve_process_group(name)  # type: ignore[arg-type]
        processes = tuple(dist.get_process_group_ranks(found))
    except (RuntimeError, ValueError, TypeError, KeyError) as error:
        raise NoLoweringError(f"there is no process group {group!r}: {error}") from None
    return str(name), processes


def _collective(
    emitter: Emitter,
    opcode: Opcode,
    operands: Sequence[Instruction],
    group: tuple[str, tuple[int, ...]],
    *,
    dimension: int | None = None,
    combiner: Opcode | None = None,
    first: int = 0,
) -> list[Instruction]:
    """``first``: the rank that the list of participants begins with."""
    name, processes = group
    participants = (processes[first], *(p for p in processes if p != processes[first])) if first else processes
    attributes = CollectiveAttributes((participants,), emitter.channel(name), True, dimension)
    called = () if combiner is None else (emitter.combiner(combiner, array(operands[0]).element_type),)
    result = emitter.builder.add(opcode, operands, attributes, called=called)
    if not isinstance(result.shape, TupleShape):
        return [result]
    return [emitter.builder.element(result, index) for index in range(len(operands))]


def _combiner(operand: Instruction, reduction: str) -> Opcode:
    kind, opcode = array(operand).element_type, _REDUCTIONS.get(reduction.lower())
    if opcode is None:
        raise NoLoweringError(f"the reduction {reduction!r} is none of HLO's")
    bitwise = opcode in (Opcode.AND, Opcode.OR, Opcode.XOR)
    fits = kind.is_integer if bitwise else kind is not ElementType.PRED
    if reduction == "avg":
        fits = kind.is_float
    if kind.is_complex:
        fits = opcode in (Opcode.ADD, Opcode.MULTIPLY)
    if not fits:
        raise NoLoweringError(f"{reduction!r} does not reduce {kind}")
    return opcode


def _averaged(emitter: Emitter, total: Instruction, reduction: str, size: int) -> Instruction:
    if reduction != "avg":
        return total
    shape = array(total)
    return emitter.add(Opcode.DIVIDE, total, emitter.operand(size, shape.element_type, shape.dims))


def _reduced(
    emitter: Emitter, opcode: Opcode, inputs: Sequence[Instruction], reduction: str, group: Any, dimension: int | None
) -> list[Instruction]:
    """The inputs of each dtype in one instruction."""
    found = _processes(group)
    combiners = [_combiner(x, reduction) for x in inputs]
    kinds = [array(x).element_type for x in inputs]
    results: dict[int, Instruction] = {}
    for kind in dict.fromkeys(kinds):
        numbers = [number for number, other in enumerate(kinds) if other is kind]
        operands = [inputs[number] for number in numbers]
        totals = _collective(emitter, opcode, operands, found, dimension=dimension, combiner=combiners[numbers[0]])
        for number, total in zip(numbers, totals, strict=True):
            results[number] = _averaged(emitter, total, reduction, len(found[1]))
    return [results[number] for number in range(len(inputs))]


@lowering(c10d.all_reduce.default)
def _all_reduce(emitter: Emitter, result: Any, x: Instruction, reduction: str, group: Any) -> Instruction:
    return _reduced(emitter, Opcode.ALL_REDUCE, [x], reduction, group, None)[0]


@lowering(c10d.all_reduce_coalesced.default)
def _all_reduce_coalesced(
    emitter: Emitter, result: Any, inputs: Sequence[Instruction], reduction: str, group: Any
) -> list[Instruction]:
    return _reduced(emitter, Opcode.ALL_REDUCE, inputs, reduction, group, None)


@lowering(c10d.all_gather_into_tensor.default)
def _all_gather(emitter: Emitter, result: Any, x: Instruction, size: int, group: Any) -> Instruction:
    return _all_gather_coalesced(emitter, [result], [x], size, group)[0]


@lowering(c10d.all_gather_into_tensor_coalesced.default)
def _all_gather_coalesced(
    emitter: Emitter, result: Any, inputs: Sequence[Instruction], size: int, group: Any
) -> list[Instruction]:
    found = _processes(group)
    vectors = [emitter.reshape(x, array(x).dims or (1,)) for x in inputs]
    return _collective(emitter, Opcode.ALL_GATHER, vectors, found, dimension=0)


@lowering(c10d.reduce_scatter_tensor.default)
def _reduce_scatter(
    emitter: Emitter, result: Any, x: Instruction, reduction: str, size: int, group: Any
) -> Instruction:
    return _reduce_scatter_coalesced(emitter, [result], [x], reduction, size, group)[0]


@lowering(c10d.reduce_scatter_tensor_coalesced.default)
def _reduce_scatter_coalesced(
    emitter: Emitter, result: Any, inputs: Sequence[Instruction], reduction: str, size: int, group: Any
) -> list[Instruction]:
    return _reduced(emitter, Opcode.REDUCE_SCATTER, inputs, reduction, group, 0)


@lowering(c10d.all_to_all_single.default)
def _all_to_all(
    emitter: Emitter, result: Any, x: Instruction, received: Sequence[int], sent: Sequence[int], group: Any
) -> Instruction:
    found = _processes(group)
    if len({*received, *sent}) > 1:
        # Its programs would differ in shapes from process to process, which HLO's may not.
        raise NoLoweringError(f"parts of sizes {list(sent)} and {list(received)} are not one size")
    return _collective(emitter, Opcode.ALL_TO_ALL, [x], found, dimension=0)[0]


@lowering(c10d.broadcast.default)
def _broadcast(emitter: Emitter, result: Any, x: Instruction, source: int, group: Any) -> Instruction:
    return _collective(emitter, Opcode.COLLECTIVE_BROADCAST, [x], _processes(group), first=source)[0]


@lowering(c10d.wait_tensor.default)
def _wait(emitter: Emitter, result: Any, x: Instruction) -> Instruction:
    # An instruction's value is there when it is used.
    return x
