"""Decides whether a program runs as native tiles, and runs the library calls of one that does.

Between codegen/cpu/emitter.py, which writes the program, and bridge.py, which hands it to native/tile_program.cc.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from flagos_backend.codegen.cpu.emitter import NativeCode, emit
from flagos_backend.codegen.cpu.lower.instruction import Call
from flagos_backend.codegen.cpu.steps import NotNativeError
from flagos_backend.compile import machine_code
from flagos_backend.compile.machine_code import MachineCode
from flagos_backend.compile.native_collectives import NativeCollective, native_collective
from flagos_backend.compile.plan_builder import build_plan
from flagos_backend.compile.stages import stage
from flagos_backend.ir.attributes import ParameterAttributes
from flagos_backend.ir.hlo import Computation, Instruction, Module
from flagos_backend.ir.opcode import Opcode
from flagos_backend.ir.strided_view import StridedView
from flagos_backend.ir.types import ArrayShape, ElementType, Shape, leaves
from flagos_backend.kernels.reference.registry import Run
from flagos_backend.process import torch_loading
from flagos_backend.process.torch_loading import torch

# A library call from native code costs about as much as this many operations of a Python plan save.
_OPERATIONS_PER_CALL = 2
# Who multiplies: native/cpu/blas.cc reads it too. A BLAS that torch brought before is taken anyway; otherwise importing
# torch would take longer than most programs run.
_PRODUCTS, _OF_TORCH = "FLAGOS_CPU_PRODUCTS", ("mkl", "onednn")

# (run, operands, for each result where it goes or None) -> the tensors that go nowhere, in order
LibraryCall = Callable[[Run, list[torch.Tensor], Sequence[torch.Tensor | None]], list[torch.Tensor]]


@dataclass(frozen=True, eq=False)
class NativePart:
    """A native program, its compiled functions, and what runs each of its library calls. ``collectives``: what devices
    of one process do in a call's place."""

    code: NativeCode
    machine_code: MachineCode | None
    calls: tuple[LibraryCall, ...]
    collectives: tuple[NativeCollective | None, ...]


def native_part(
    module: Module, argument_aliases: Sequence[int], excess_precision: bool, replicas: int, partitions: int
) -> tuple[NativePart | None, str]:
    """The native form of ``module`` for launches of so many devices, or None and why it has none; the rest as for
    codegen.cpu.emitter.emit.

    Raises the errors of errors.py as build_plan does.
    """
    try:
        code = emit(module, argument_aliases, excess_precision, machine_code.is_available())
    except NotNativeError as error:
        return None, str(error)
    collectives = tuple(native_collective(call, replicas, partitions) for call in code.calls)
    calls = collectives.count(None)
    if code.operations < _OPERATIONS_PER_CALL * calls:
        return None, f"{calls} library calls to {code.operations} native operations"
    if code.multiplies and os.environ.get(_PRODUCTS) in _OF_TORCH:
        with stage("loading PyTorch"):
            torch_loading.load()
    with stage("machine code"):
        functions = MachineCode(code.llvm, code.functions) if any(code.functions) else None
    return NativePart(code, functions, tuple(_library_call(call) for call in code.calls), collectives), ""


def _library_call(call: Call) -> LibraryCall:
    """Computes the call's instruction from tensors; copies results to where the program wants them, if anywhere."""
    with torch.inference_mode():
        plan = build_plan(_computation_of(call))

    def run_call(run: Run, operands: list[torch.Tensor], results: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
        callee_allocated = []
        for result, value in zip(results, plan.run(run, operands), strict=True):
            if result is None:
                callee_allocated.append(value if isinstance(value, torch.Tensor) else _token())
            elif isinstance(value, torch.Tensor):
                result.copy_(value)
        return callee_allocated

    return run_call


def _token() -> torch.Tensor:
    """What stands for a token in memory."""
    return torch.empty(0, dtype=torch.uint8)


def _computation_of(call: Call) -> Computation:
    """The call's instruction alone, on flat parameters."""
    parameters = [
        Instruction(Opcode.PARAMETER, shape, attributes=ParameterAttributes(number), name=f"operand.{number}")
        for number, shape in enumerate(call.operands)
    ]
    instructions: list[Instruction] = list(parameters)
    rest = iter(_operands(call, parameters, instructions))
    operands = tuple(_pack(operand.shape, rest, instructions) for operand in call.instruction.operands)
    instruction = replace(call.instruction, operands=operands)
    instructions.append(instruction)
    return Computation(call.instruction.name, tuple(instructions), instruction)


def _operands(call: Call, parameters: list[Instruction], instructions: list[Instruction]) -> Iterator[Instruction]:
    """The call's flat operands, made of the buffers that they stand in."""
    flat = [leaf for operand in call.instruction.operands for leaf in leaves(operand.shape)]
    for parameter, view, shape in zip(parameters, call.views, flat, strict=True):
        if shape.element_type is ElementType.TOKEN:
            instructions.append(Instruction(Opcode.AFTER_ALL, shape, name=f"{parameter.name}.token"))
            yield instructions[-1]
            continue
        if view is None:
            yield parameter
            continue
        assert isinstance(parameter.shape, ArrayShape)
        line = ArrayShape(shape.element_type, (parameter.shape.num_elements,))
        instructions.append(Instruction(Opcode.RESHAPE, line, (parameter,), name=f"{parameter.name}.line"))
        strided = StridedView(view.strides, view.offset).attributes()
        instructions.append(
            Instruction(Opcode.CUSTOM_CALL, shape, (instructions[-1],), strided, name=f"{parameter.name}.view")
        )
        yield instructions[-1]


def _pack(shape: Shape, values: Iterator[Instruction], instructions: list[Instruction]) -> Instruction:
    """The next of ``values``, or a tuple of them as ``shape`` says, which joins the ``instructions``."""
    if isinstance(shape, ArrayShape):
        return next(values)
    elements = tuple(_pack(element, values, instructions) for element in shape.elements)
    packed = Instruction(Opcode.TUPLE, shape, elements, name="operands")
    instructions.append(packed)
    return packed
