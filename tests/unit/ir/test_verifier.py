"""Structure rules: each broken on purpose. Shape rules are tested through the builder and the corpus."""

from dataclasses import replace

import pytest

from flagos_backend.errors import VerificationFailed
from flagos_backend.importer import import_module
from flagos_backend.ir.attributes import NONE, ParameterAttributes
from flagos_backend.ir.hlo import Alias, Computation, Instruction, Module
from flagos_backend.ir.opcode import Opcode
from flagos_backend.ir.types import ArrayShape, ElementType, TupleShape
from flagos_backend.ir.verifier import verify
from hlo_texts import HLO_TEXTS
from programs import PROGRAMS

F32 = ArrayShape(ElementType.F32, (2,))


def parameter(number):
    return Instruction(Opcode.PARAMETER, F32, (), ParameterAttributes(number), (), f"p{number}")


def negate(operand, name="n"):
    return Instruction(Opcode.NEGATE, F32, (operand,), NONE, (), name)


def module(instructions, root=None, **fields):
    return Module("m", Computation("main", tuple(instructions), root or instructions[-1]), **fields)


def assert_fails(broken, rule):
    with pytest.raises(VerificationFailed, match=rule):
        verify(broken)


def test_operand_after_its_user():
    p = parameter(0)
    assert_fails(module([negate(p), p]), "%p0 must stand before its user")


def test_instruction_twice():
    p = parameter(0)
    assert_fails(module([p, p]), "stands in its computation once")


def test_operand_of_another_computation():
    other = parameter(0)
    assert_fails(module([parameter(0), negate(other)]), "must stand before its user")


def test_root_outside():
    p = parameter(0)
    assert_fails(module([p], root=negate(p)), "the root %n must be one of the instructions")


def test_parameter_numbers():
    assert_fails(module([parameter(0), parameter(0)]), "one parameter 0")
    assert_fails(module([parameter(1)]), r"numbered from 0, got \[1\]")


def test_wrong_shape_names_operands_and_rule():
    p = parameter(0)
    wrong = Instruction(Opcode.NEGATE, ArrayShape(ElementType.F32, (3,)), (p,), NONE, (), "n", "jit(f)/neg")
    with pytest.raises(VerificationFailed) as caught:
        verify(module([p, wrong]))
    assert "makes f32[2]" in str(caught.value)
    assert "%n = f32[3] negate(f32[2]), from jit(f)/neg" in str(caught.value)
    assert caught.value.payloads["flagos.rule"] == b"negate of these operands makes f32[2]"


def test_aliases():
    p = parameter(0)
    pair = Instruction(Opcode.TUPLE, TupleShape((F32, F32)), (p, p), NONE, (), "t")
    verify(module([p, pair], aliases=(Alias((0,), 0), Alias((1,), 0))))
    assert_fails(module([p, pair], aliases=(Alias((2,), 0),)), "names no parameter or no output")
    assert_fails(module([p, pair], aliases=(Alias((0,), 1),)), "names no parameter or no output")
    assert_fails(module([p, pair], aliases=(Alias((0,), 0), Alias((0,), 0))), "takes over two parameters")
    assert_fails(module([p, pair], donors=(4,)), "no parameter 4")


@pytest.mark.parametrize("field", ["num_replicas", "num_partitions"])
def test_device_counts(field):
    assert_fails(replace(module([parameter(0)]), **{field: 0}), "at least one replica")


def array_instructions():
    """An instruction of the corpus for each opcode that makes an array."""
    sources = [p.hlo() for p in PROGRAMS.values()] + [t.hlo() for t in HLO_TEXTS.values()]
    seen = set()
    for source in sources:
        program = import_module(source)
        for computation in program.computations():
            for instruction in computation.instructions:
                if instruction.opcode not in seen and isinstance(instruction.shape, ArrayShape):
                    seen.add(instruction.opcode)
                    yield computation, instruction


# Their declared shape may be anything, or any array.
FREE = {Opcode.PARAMETER, Opcode.CUSTOM_CALL, Opcode.IOTA}


def wrong_shape(instruction):
    """A dimension more; another type where the dimensions are free."""
    shape = instruction.shape
    if instruction.opcode in (Opcode.BROADCAST, Opcode.RNG):
        return replace(shape, element_type=ElementType.F8E3M4)
    return replace(shape, dims=(*shape.dims, 7))


def test_every_opcode_is_held_to_its_shape():
    opcodes = set()
    for computation, instruction in array_instructions():
        if instruction.opcode in FREE:
            continue
        opcodes.add(instruction.opcode)
        wrong = replace(instruction, shape=wrong_shape(instruction))
        before = computation.instructions[: computation.instructions.index(instruction)]
        with pytest.raises(VerificationFailed) as caught:
            verify(Module("m", Computation("c", (*before, wrong), wrong)))
        assert f"%{instruction.name} = " in str(caught.value), instruction
    assert len(opcodes) > 85
