"""A donor stays one when an output of its size is left for it."""

from __future__ import annotations

import pytest

from flagos_backend.ir.builder import Builder
from flagos_backend.ir.hlo import Alias, Module
from flagos_backend.ir.types import ArrayShape, ElementType
from flagos_backend.passes.donation import resolve_donation

E = ElementType


def module(
    parameters: list[ArrayShape], outputs: list[int], donors: tuple[int, ...], aliases: tuple[Alias, ...] = ()
) -> Module:
    """Returns the parameters that ``outputs`` names, as a tuple."""
    builder = Builder("m")
    values = [builder.parameter(shape) for shape in parameters]
    return Module("m", builder.build(builder.tuple([values[n] for n in outputs])), aliases, donors)


F4, F8, S4, BYTES = (
    ArrayShape(E.F32, (4,)),
    ArrayShape(E.F32, (2, 4)),
    ArrayShape(E.S32, (2, 2)),
    ArrayShape(E.U8, (16,)),
)


@pytest.mark.parametrize(
    ("parameters", "outputs", "kept"),
    [
        ([F4], [0], (0,)),
        ([F4, F8], [1], (1,)),
        ([F4, F4], [1], (0,)),
        ([F4, F4], [1, 1], (0, 1)),
        ([S4, F4, F8], [1], (0,)),
        ([BYTES, F4], [1, 1], (0, 1)),
        ([F8, F4], [], ()),
    ],
)
def test_sizes_decide(parameters: list[ArrayShape], outputs: list[int], kept: tuple[int, ...]) -> None:
    assert resolve_donation(module(parameters, outputs, tuple(range(len(parameters))))).donors == kept


def test_an_output_that_has_its_donor_is_not_free() -> None:
    told = module([F4, F4, F8], [0, 2], (0, 2), (Alias((0,), 1),))
    assert resolve_donation(told).donors == (2,)
    assert resolve_donation(told).aliases == told.aliases


def test_nothing_to_resolve_changes_nothing() -> None:
    told = module([F4], [0], (0,))
    assert resolve_donation(told) is told
