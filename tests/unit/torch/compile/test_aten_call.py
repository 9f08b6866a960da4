"""Operators left whole: what their calls leave behind."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from flagos_backend.frontends.torch.compile.errors import NoLoweringError
from flagos_backend.frontends.torch.compile.lowering.aten_call import result_shape, unpack
from flagos_backend.ir.attributes import CustomCallAttributes
from flagos_backend.ir.builder import Builder
from flagos_backend.ir.hlo import Instruction
from flagos_backend.ir.opcode import Opcode


def call(builder: Builder, result: object) -> Instruction:
    return builder.add(Opcode.CUSTOM_CALL, [], CustomCallAttributes("aten::f.x"), shape=result_shape(result))


def test_a_structure_is_taken_apart_in_order() -> None:
    builder = Builder("f")
    result = [torch.ones(2), (None, torch.ones(3)), 4, [torch.ones(5)]]
    first, (nothing, second), number, (third,) = unpack(builder, call(builder, result), result)
    assert [part.shape.dims for part in (first, second, third)] == [(2,), (3,), (5,)]
    assert (nothing, number) == (None, 4)


def test_what_is_no_tensor_and_no_number_is_refused() -> None:
    builder = Builder("f")
    result = [torch.ones(2), "text"]
    with pytest.raises(NoLoweringError, match="it returns a str"):
        unpack(builder, call(builder, result), result)


def test_nothing_is_kept_alive() -> None:
    """A program of many calls is freed when it is dropped, not when the garbage collector comes by."""
    gc.collect()
    gc.disable()
    try:
        builder = Builder("f")
        result = [torch.ones(2), torch.ones(3)]
        unpack(builder, call(builder, result), result)
        dropped = weakref.ref(builder)
        del builder
        assert dropped() is None
    finally:
        gc.enable()
