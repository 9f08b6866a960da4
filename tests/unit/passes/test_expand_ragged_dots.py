"""Ragged dots as windows of rows, against sums in float64."""

from __future__ import annotations

import numpy as np
import pytest

from flagos_backend.devices.target import HOST, Target
from flagos_backend.ir.attributes import DotAttributes, RaggedDotAttributes
from flagos_backend.ir.builder import Builder
from flagos_backend.ir.hlo import Instruction, Module
from flagos_backend.ir.opcode import Opcode
from flagos_backend.ir.ragged_dots import ragged_dot_of
from flagos_backend.ir.types import ArrayShape, ElementType
from flagos_backend.ir.verifier import verify
from flagos_backend.passes.expand_ragged_dots import expand_ragged_dots, most_windows, windows_for
from flagos_backend.passes.ragged_windows import Windows, expansion
from support.against_xla import run_module
from support.numbers import NUMPY_DTYPE
from support.passes import SIMULATED

E = ElementType
H200 = Target("cuda", "nvidia", "sm_90", multiprocessors=132)
EXTENTS = {"m": 13, "k": 6, "n": 5, "b": 2, "c": 3, "g": 4}
# Operands, sizes and result by letter: m rows, k contracted, n columns, g groups, b and c batches.
FORMS = {
    "rows": ("mk", "gkn", "g", "mn", "m"),
    "rows minor, groups last": ("km", "kng", "g", "mn", "m"),
    "rows of batches": ("bmk", "bgkn", "g", "bmn", "m"),
    "groups of batches": ("bmk", "gbkn", "bg", "bmn", "m"),
    "batch behind": ("mkb", "gknb", "g", "bmn", "m"),
    "rows in rows": ("cmk", "gkn", "cg", "cmn", "m"),
    "contracting": ("mk", "mn", "g", "gkn", "m"),
    "contracting, minor": ("km", "nm", "g", "gkn", "m"),
    "contracting of batches": ("bkm", "bmn", "bg", "gbkn", "m"),
    "contracting of two": ("cmk", "mcn", "cg", "gkn", "m"),
    "batch": ("mbk", "mkn", "g", "mbn", "m"),
    "batch of batches": ("cmk", "mcn", "cg", "cmkn", "m"),
}
SIZES = [(4, 0, 5, 4), (2, 3, 1, 0), (0, 0, 0, 0), (13, 0, 0, 0), (9, 9, 9, 9), (0, 1, 0, 12), (1, 1, 1, 1)]


def ragged_dot(form: str, kind: ElementType = E.F32, made: ElementType | None = None, **sizes: int) -> Module:
    extents = EXTENTS | sizes
    lhs, rhs, groups, result, ragged = FORMS[form]
    is_batch = ragged in lhs and ragged in rhs and ragged in result
    contracting = [d for d in lhs if d in rhs and d not in result]
    batch = [d for d in result if d in lhs and d in rhs]
    sides = [tuple(side.index(d) for d in letters) for letters in (contracting, batch) for side in (lhs, rhs)]
    group = (rhs.index("g"),) if "g" in rhs else ()
    attributes = RaggedDotAttributes(DotAttributes(*sides), (lhs.index(ragged),), group)
    assert not (is_batch and group)
    builder = Builder("entry")
    operands = [builder.parameter(ArrayShape(kind, tuple(extents[d] for d in side))) for side in (lhs, rhs)]
    operands.append(builder.parameter(ArrayShape(E.S32, tuple(extents[d] for d in groups))))
    shape = ArrayShape(made or kind, tuple(extents[d] for d in result))
    builder.add(Opcode.RAGGED_DOT, operands, attributes, shape=shape)
    return Module("test", builder.build())


def arguments(module: Module, sizes: tuple[int, ...], rng: np.random.Generator) -> list[np.ndarray]:
    """Groups of the last dimension of batches are those of the first in another order."""
    made = []
    for parameter in module.entry.parameters[:2]:
        shape = parameter.shape
        assert isinstance(shape, ArrayShape)
        made.append(rng.standard_normal(shape.dims).astype(NUMPY_DTYPE[shape.element_type]))
    shape = module.entry.parameters[2].shape
    assert isinstance(shape, ArrayShape)
    rows = [np.roll(sizes, turn) for turn in range(max(1, shape.num_elements // max(1, len(sizes))))]
    return [*made, np.array(rows, np.int32).reshape(shape.dims)]


def exact(form: str, given: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """The sums, and those of magnitudes."""
    lhs, rhs, groups, result, _ = FORMS[form]
    a, b = (x.astype(np.float64) for x in given[:2])
    sizes = given[2]
    ends = np.minimum(np.cumsum(sizes, axis=-1), EXTENTS["m"])
    begins = np.concatenate((np.zeros_like(ends[..., :1]), ends[..., :-1]), axis=-1)
    rows = np.arange(EXTENTS["m"])
    member = ((rows >= begins[..., None]) & (rows < ends[..., None])).astype(np.float64)
    letters = groups + "m"
    if "g" not in rhs and "g" not in result:
        member, letters = member.sum(axis=-2), groups[:-1] + "m"
    spec = f"{lhs},{rhs},{letters}->{result}"
    return np.einsum(spec, a, b, member), np.einsum(spec, abs(a), abs(b), member)


def instruction_of(module: Module) -> Instruction:
    return module.entry.root


def expanded(module: Module, windows: Windows) -> Module:
    root = instruction_of(module)
    builder = Builder("entry")
    operands = [builder.parameter(operand.shape) for operand in root.operands]
    builder.add(Opcode.CALL, operands, called=[expansion(ragged_dot_of(root), windows)])
    return Module("test", builder.build())


def alternatives(module: Module) -> list[Windows]:
    """All that the model may choose: windows of all rows, in a loop or not, and of some."""
    ragged = ragged_dot_of(instruction_of(module))
    whole = [Windows(ragged.length, ragged.groups, unrolled) for unrolled in (False, True)]
    if ragged.prefix:
        return whole
    return [*whole, *(Windows(rows, most_windows(ragged, rows)) for rows in (1, 2, 4, 8))]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_every_window(form: str, sizes: tuple[int, ...], rng: np.random.Generator) -> None:
    module = ragged_dot(form)
    given = arguments(module, sizes, rng)
    sums, magnitudes = exact(form, given)
    for made in (module, *(expanded(module, windows) for windows in alternatives(module))):
        verify(made)
        (found,) = run_module(made, given)
        assert (abs(found - sums) <= 1e-6 * magnitudes + 1e-30).all()


@pytest.mark.parametrize("form", ["rows", "contracting", "batch"])
@pytest.mark.parametrize(
    ("kind", "made"), [(E.BF16, E.BF16), (E.F16, E.F32), (E.BF16, E.F32), (E.F64, E.F64), (E.S32, E.S32)], ids=str
)
def test_types(form: str, kind: ElementType, made: ElementType, rng: np.random.Generator) -> None:
    module = ragged_dot(form, kind, made)
    given = arguments(module, (4, 3, 0, 5), rng)
    sums, magnitudes = exact(form, given)
    # One rounding to eight bits, and of each sum one to the type that it is added up in.
    rounding, bits = (2.0**-8, 20) if made is E.BF16 else (0.0, {E.F32: 20, E.F64: 49, E.S32: 60}[made])
    for windows in alternatives(module):
        (found,) = run_module(expanded(module, windows), given)
        difference = abs(found.astype(np.float64) - sums)
        assert (difference <= rounding * abs(sums) + 2.0**-bits * magnitudes).all()


@pytest.mark.parametrize("form", ["rows", "contracting"])
def test_what_is_not_a_number_stays_in_its_group(form: str, rng: np.random.Generator) -> None:
    module = ragged_dot(form)
    given = arguments(module, (4, 3, 0, 5), rng)
    given[0][5] = np.nan  # the second group's
    if form == "rows":
        given[1][3] = np.inf
    for windows in alternatives(module):
        (found,) = run_module(expanded(module, windows), given)
        finite = np.isfinite(found).all(axis=tuple(range(1, found.ndim)))
        clean = [row != 5 and not 7 <= row < 12 for row in range(13)] if form == "rows" else [True, False, True, True]
        assert finite.tolist() == clean


@pytest.mark.parametrize("target", [HOST, SIMULATED, H200], ids=lambda t: t.architecture or t.vendor or "host")
@pytest.mark.parametrize("form", FORMS)
def test_none_is_left_but_grouped_products(form: str, target: Target, rng: np.random.Generator) -> None:
    module = ragged_dot(form)
    made = expand_ragged_dots(module, target)
    opcodes = {i.opcode for computation in made.computations() for i in computation.instructions}
    assert Opcode.RAGGED_DOT not in opcodes
    given = arguments(module, (3, 2, 0, 4), rng)
    sums, magnitudes = exact(form, given)
    (found,) = run_module(made, given)
    assert (abs(found - sums) <= 1e-6 * magnitudes).all()


def test_grouped_products_are_left_to_the_library() -> None:
    module = ragged_dot("rows", E.BF16, k=16, n=24)
    assert expand_ragged_dots(module, H200) is module
    one = ragged_dot("rows", E.BF16, k=16, n=24, g=1)
    assert instruction_of(expand_ragged_dots(one, H200)).opcode is Opcode.CALL
    assert instruction_of(expand_ragged_dots(module, SIMULATED)).opcode is Opcode.CALL


@pytest.mark.parametrize("letter", list("mkng"))
@pytest.mark.parametrize("form", ["rows", "contracting", "batch"])
def test_nothing(form: str, letter: str) -> None:
    module = ragged_dot(form, **{letter: 0})
    made = expand_ragged_dots(module, HOST)
    verify(made)
    shapes = [parameter.shape for parameter in module.entry.parameters]
    given = [
        np.ones(s.dims, np.float32 if n < 2 else np.int32) for n, s in enumerate(shapes) if isinstance(s, ArrayShape)
    ]
    (found,) = run_module(made, given)
    result = instruction_of(module).shape
    assert isinstance(result, ArrayShape)
    assert found.shape == result.dims
    assert not found.any()


def test_windows_by_cost() -> None:
    """Experts of many rows are cut; few rows are few windows, for each reads a matrix."""

    def chosen(rows: int, groups: int, width: int) -> Windows:
        module = ragged_dot("rows", E.F32, m=rows, g=groups, k=width, n=width)
        return windows_for(ragged_dot_of(instruction_of(module)), HOST)

    many = chosen(8192, 64, 512)
    assert 8192 + 64 * many.rows >= many.rows * many.count  # at most twice the products there are
    assert many.rows * many.count < 3 * 8192
    assert chosen(16, 64, 512).count <= 16
    assert chosen(64, 2, 8) == Windows(64, 2)
