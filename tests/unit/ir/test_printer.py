"""The text form of a program, word for word."""

import numpy as np

from flagos_backend.ir.attributes import CompareAttributes, DimensionsAttributes, WindowAttributes, WindowDimension
from flagos_backend.ir.builder import Builder
from flagos_backend.ir.hlo import Alias, Module
from flagos_backend.ir.opcode import Comparison, Opcode
from flagos_backend.ir.printer import print_instruction, print_module
from flagos_backend.ir.types import ArrayShape, ElementType

F32 = ElementType.F32


def test_module():
    add = Builder("add")
    add.add(Opcode.ADD, [add.parameter(ArrayShape(F32), "a"), add.parameter(ArrayShape(F32), "b")])
    main = Builder("main")
    main.metadata = "jit(f)/sum (model.py:7)"
    x = main.parameter(ArrayShape(F32, (3, 4)), "x")
    main.add(Opcode.REDUCE, [x, main.scalar(0, F32)], DimensionsAttributes((1,)), called=[add.build()], name="total")
    module = Module("f", main.build(), aliases=(Alias((), 0),), num_replicas=2)
    assert print_module(module) == (
        "module f, replicas=2, partitions=1\n"
        "  output [] takes over parameter 0 []\n"
        "\n"
        "add(%a.1: f32[], %b.1: f32[]) -> f32[] {\n"
        "  %a.1 = f32[] parameter(), number=0\n"
        "  %b.1 = f32[] parameter(), number=1\n"
        "  root %add.1 = f32[] add(%a.1, %b.1)\n"
        "}\n"
        "\n"
        "entry main(%x.1: f32[3,4]) -> f32[3] {\n"
        "  %x.1 = f32[3,4] parameter(), number=0  # jit(f)/sum (model.py:7)\n"
        "  %constant.1 = f32[] constant(0.0)  # jit(f)/sum (model.py:7)\n"
        "  root %total.1 = f32[3] reduce(%x.1, %constant.1), dimensions={1}, calls={add}  # jit(f)/sum (model.py:7)\n"
        "}"
    )


def test_constants():
    builder = Builder("b")
    assert print_instruction(builder.constant(np.array([[1, 2], [3, -4]], np.int8))).endswith("({{1, 2}, {3, -4}})")
    assert print_instruction(builder.constant(np.arange(99))).endswith("s64[99] constant({0, 1, 2, ...})")
    assert print_instruction(builder.scalar(1, ElementType.BF16)).endswith("bf16[] constant(0x803f)")


def test_attributes_that_differ_from_their_defaults():
    builder = Builder("b")
    x = builder.parameter(ArrayShape(F32, (8,)))
    compare = builder.add(Opcode.COMPARE, [x, x], CompareAttributes(Comparison.GE))
    assert print_instruction(compare).endswith("compare(%parameter.1, %parameter.1), direction=GE")
    maximum = Builder("maximum")
    maximum.add(Opcode.MAXIMUM, [maximum.parameter(ArrayShape(F32)) for _ in range(2)])
    window = WindowAttributes((WindowDimension(3, stride=2, padding_low=1),))
    pool = builder.add(Opcode.REDUCE_WINDOW, [x, builder.scalar(0, F32)], window, called=[maximum.build()])
    assert ", window={(size=3, stride=2, padding_low=1)}, calls={maximum}" in print_instruction(pool)
