"""Holds a module to SPEC.md: structure, then the shape rule of every instruction. Runs after import and passes."""

from __future__ import annotations

from flagos_backend.errors import VerificationFailed
from flagos_backend.ir.attributes import ParameterAttributes
from flagos_backend.ir.hlo import Computation, Instruction, Module
from flagos_backend.ir.inference import Operation, RuleBroken, Signature, infer_shape
from flagos_backend.ir.opcode import Opcode
from flagos_backend.ir.types import Shape, TupleShape


def verify(module: Module) -> None:
    """Raises VerificationFailed naming the first instruction that breaks a rule, its operands' shapes and the rule."""
    signatures: dict[int, Signature] = {}
    for computation in module.computations():
        signatures[id(computation)] = _verify_computation(computation, signatures)
    _verify_aliases(module)
    if module.num_replicas < 1 or module.num_partitions < 1:
        rule = f"there must be at least one replica and partition, not {module.num_replicas}, {module.num_partitions}"
        raise VerificationFailed(rule=rule, place=f"module {module.name!r}")


def _verify_computation(computation: Computation, signatures: dict[int, Signature]) -> Signature:
    seen: set[int] = set()
    parameters: dict[int, Shape] = {}
    for instruction in computation.instructions:
        if id(instruction) in seen:
            raise VerificationFailed.at(instruction, rule="an instruction stands in its computation once")
        for operand in instruction.operands:
            if id(operand) not in seen:
                rule = f"operand %{operand.name} must stand before its user, in computation {computation.name!r}"
                raise VerificationFailed.at(instruction, rule=rule)
        seen.add(id(instruction))
        _verify_shape(instruction, signatures)
        if instruction.opcode is Opcode.PARAMETER:
            number = instruction.attributes_as(ParameterAttributes).number
            if number in parameters:
                raise VerificationFailed.at(instruction, rule=f"there must be one parameter {number}")
            parameters[number] = instruction.shape
    place = f"computation {computation.name!r}"
    if id(computation.root) not in seen:
        raise VerificationFailed(rule=f"the root %{computation.root.name} must be one of the instructions", place=place)
    if sorted(parameters) != list(range(len(parameters))):
        raise VerificationFailed(rule=f"parameters must be numbered from 0, got {sorted(parameters)}", place=place)
    return Signature(tuple(parameters[number] for number in range(len(parameters))), computation.root.shape)


def _verify_shape(instruction: Instruction, signatures: dict[int, Signature]) -> None:
    operation = Operation(
        instruction.opcode,
        tuple([operand.shape for operand in instruction.operands]),
        instruction.attributes,
        tuple([signatures[id(callee)] for callee in instruction.called]) if instruction.called else (),
        instruction.shape,
    )
    try:
        shape = infer_shape(operation)
    except RuleBroken as broken:
        raise VerificationFailed.at(instruction, rule=str(broken)) from None
    if shape != instruction.shape:
        raise VerificationFailed.at(instruction, rule=f"{instruction.opcode} of these operands makes {shape}")


def _element(shape: Shape, path: tuple[int, ...]) -> Shape | None:
    for index in path:
        if not isinstance(shape, TupleShape) or not 0 <= index < len(shape.elements):
            return None
        shape = shape.elements[index]
    return shape


def _verify_aliases(module: Module) -> None:
    parameters = module.entry.parameters
    place = f"the aliases of module {module.name!r}"
    for donor in module.donors:
        if not 0 <= donor < len(parameters):
            raise VerificationFailed(rule=f"there is no parameter {donor} to donate", place=place)
    outputs = set()
    for alias in module.aliases:
        parameter = parameters[alias.parameter_number].shape if 0 <= alias.parameter_number < len(parameters) else None
        given = None if parameter is None else _element(parameter, alias.parameter_index)
        taken = _element(module.entry.root.shape, alias.output_index)
        if given is None or taken is None:
            raise VerificationFailed(rule=f"{alias} names no parameter or no output", place=place)
        if alias.output_index in outputs:
            raise VerificationFailed(rule=f"output {alias.output_index} takes over two parameters", place=place)
        outputs.add(alias.output_index)
