"""The loop nests that fusion makes of programs, for each target, and when two nests are equal, also as text."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from flagos_backend.codegen.cpu.fusion_policy import schedule as cpu_schedule
from flagos_backend.codegen.cpu.pipelines import native_pipeline
from flagos_backend.codegen.triton import schedule as triton_schedule
from flagos_backend.devices.target import Target
from flagos_backend.importer import import_module
from flagos_backend.ir.hlo import Instruction
from flagos_backend.loop_ir.flat import flatten
from flagos_backend.loop_ir.parser import parse_nest
from flagos_backend.loop_ir.printer import print_nest
from flagos_backend.loop_ir.region import Affine, Apply, Expression, Index, Literal, Load, Reduce, Region, Shift
from flagos_backend.passes.pass_manager import run_pipeline
from flagos_backend.passes.pipelines import optimize


def cpu_nests(hlo: bytes) -> Iterator[Region]:
    module = run_pipeline(native_pipeline(), optimize(import_module(hlo))).module
    for computation in module.computations():
        yield from (item for item in cpu_schedule(flatten(computation)).items if isinstance(item, Region))


def triton_nests(hlo: bytes, target: Target) -> Iterator[Region]:
    for computation in optimize(import_module(hlo), target).computations():
        yield from (item for item in triton_schedule(flatten(computation), target).items if isinstance(item, Region))


def same_nest(a: Region, b: Region) -> bool:
    """Whether the nests are one, but for the identity of expressions and of the arrays that they load and store.

    What one computes once the other does too. Arrays correspond one to one, and have one shape.
    """
    arrays: dict[Instruction, Instruction] = {}
    if a.dims != b.dims or len(a.expressions()) != len(b.expressions()) or len(a.stores) != len(b.stores):
        return False
    moved: dict[Expression, Expression] = {}

    def index(affine: Affine) -> Affine:
        return replace(affine, shifts=tuple(Shift(moved[s.start], s.limit, s.factor) for s in affine.shifts))

    def same_array(x: Instruction, y: Instruction) -> bool:
        return x.shape == y.shape and arrays.setdefault(x, y) is y

    def same(x: Expression, y: Expression) -> bool:
        if type(x) is not type(y) or x.element_type is not y.element_type:
            return False
        if isinstance(x, Literal):
            return x == y
        if isinstance(x, Index):
            return index(x.value) == y.value
        if isinstance(x, Load):
            guard = None if x.guard is None else moved[x.guard]
            return same_array(x.source, y.source) and index(x.index) == y.index and guard == y.guard
        if [moved[o] for o in x.operands] != list(y.operands):
            return False
        if isinstance(x, Reduce):
            return (x.combine, x.dims) == (y.combine, y.dims)
        assert isinstance(x, Apply)
        return (x.opcode, x.detail, x.order) == (y.opcode, y.detail, y.order)

    for x, y in zip(a.expressions(), b.expressions(), strict=True):
        if not same(x, y):
            return False
        moved[x] = y
    stores = all(
        same_array(s.target, t.target) and moved[s.value] == t.value and index(s.index) == t.index
        for s, t in zip(a.stores, b.stores, strict=True)
    )
    return stores and len(set(arrays.values())) == len(arrays)


def round_trips(nest: Region) -> None:
    """Asserts that ``nest``, printed and parsed, is the same, and prints the same."""
    text = print_nest(nest)
    parsed = parse_nest(text)
    assert same_nest(nest, parsed), text
    assert print_nest(parsed) == text
