"""Products through ATen's matrix products: integers are exact modulo their width, floats as the reference has them."""

import pytest
import torch

from flagos_backend.devices.target import HOST, Target
from flagos_backend.ir.attributes import CustomCallAttributes, DotAttributes
from flagos_backend.ir.builder import Builder
from flagos_backend.ir.opcode import DotAlgorithm, Opcode, Precision
from flagos_backend.ir.types import ArrayShape, ElementType
from flagos_backend.kernels.choice import implementations_of
from flagos_backend.kernels.implementation import Provider, operation_of
from flagos_backend.kernels.reference import registry
from flagos_backend.kernels.reference.registry import Run
from flagos_backend.kernels.reference.storage import from_bytes
from flagos_backend.kernels.vendor import dot

E = ElementType
SIMULATED = Target("cpu", "simulated")
INTEGERS = [E.S8, E.U8, E.S16, E.U16, E.S32, E.U32, E.S64, E.U64]


def instruction(lhs, rhs, result, size=33, batch=False):
    lead = (2,) if batch else ()
    builder = Builder("dot")
    operands = [builder.parameter(ArrayShape(e, (*lead, *d))) for e, d in ((lhs, (7, size)), (rhs, (size, 5)))]
    n = len(lead)
    attributes = DotAttributes((n + 1,), (n,), tuple(range(n)), tuple(range(n)))
    return builder.add(Opcode.DOT, operands, attributes, shape=ArrayShape(result, (*lead, 7, 5)))


def check(call, rng):
    """Random bits, so that every product wraps around."""
    operands = [from_bytes(rng.bytes(o.shape.num_bytes), o.shape) for o in call.operands]
    expected = registry.prepare(call)(Run(), *operands)
    for variant in dot.variants(call, SIMULATED):
        assert torch.equal(variant.kernel(Run(), *operands), expected), variant.name


@pytest.mark.parametrize("element", INTEGERS, ids=lambda e: e.name)
def test_integers(element, rng):
    check(instruction(element, element, element), rng)
    check(instruction(element, element, element, batch=True), rng)


@pytest.mark.parametrize(("operand", "result"), [(E.S8, E.S32), (E.U8, E.S32), (E.S16, E.S64), (E.U32, E.U64)])
@pytest.mark.parametrize("size", [1, 33, 300, 1200])
def test_wider_results(operand, result, size, rng):
    check(instruction(operand, operand, result, size), rng)
    check(instruction(operand, operand, result, size, batch=True), rng)


def test_the_largest_sums_are_exact():
    """Of as many products as f32 takes, and one more."""
    for operand, least, sizes in ((E.S8, -128, (1024, 1025)), (E.U8, 255, (256, 257))):
        for size in sizes:
            call = instruction(operand, operand, E.S32, size)
            dtype = torch.int8 if operand is E.S8 else torch.uint8
            operands = [torch.full(o.shape.dims, least, dtype=dtype) for o in call.operands]
            for variant in dot.variants(call, SIMULATED):
                assert torch.equal(variant.kernel(Run(), *operands), torch.full((7, 5), least**2 * size).int())


@pytest.mark.parametrize("result", [E.S8, E.S16, E.S32, E.S64, E.U32])
@pytest.mark.parametrize("dims", [(1, 1, 1), (17, 8, 8), (16, 24, 40), (40, 31, 9), (33, 64, 128)])
@pytest.mark.parametrize("transposed", [False, True], ids=["rows", "columns"])
def test_bytes(result, dims, transposed, rng):
    """Of sizes that CUDA's product takes, as they lie too, and that are filled up; either side may lie transposed."""
    rows, contracted, columns = dims
    builder = Builder("dot")
    shapes = [(contracted, rows), (columns, contracted)] if transposed else [(rows, contracted), (contracted, columns)]
    operands = [builder.parameter(ArrayShape(E.S8, dims)) for dims in shapes]
    attributes = DotAttributes((0,), (1,)) if transposed else DotAttributes((1,), (0,))
    call = builder.add(Opcode.DOT, operands, attributes, shape=ArrayShape(result, (rows, columns)))
    as_they_lie = ["bytes"] if contracted % 64 == columns % 64 == 0 else []
    assert [v.name for v in dot.variants(call, SIMULATED)] == ["bytes, contracted last", *as_they_lie, "floats"]
    check(call, rng)


@pytest.mark.parametrize(
    ("call", "target"),
    [
        (lambda: instruction(E.S8, E.U8, E.S32), SIMULATED),
        (lambda: instruction(E.S8, E.S8, E.S64, size=1 << 17), SIMULATED),
        (lambda: instruction(E.S8, E.S8, E.S32, size=0), SIMULATED),
        (lambda: instruction(E.S8, E.S8, E.S32), Target("chip", "vendor")),
        (lambda: instruction(E.S8, E.S8, E.S32), Target("xla", "vendor")),
    ],
    ids=["unsigned", "sums beyond 32 bits", "nothing", "no torch", "no product"],
)
def test_where_bytes_are_multiplied_as_floats(call, target):
    (variant,) = dot.variants(call(), target)
    assert variant.name == ""


def test_many_matrices_of_bytes_are_one_product_of_floats():
    builder = Builder("dot")
    operands = [builder.parameter(ArrayShape(E.S8, (9, *dims))) for dims in ((7, 5), (5, 6))]
    call = builder.add(Opcode.DOT, operands, DotAttributes((2,), (1,), (0,), (0,)), shape=ArrayShape(E.S32, (9, 7, 6)))
    (variant,) = dot.variants(call, SIMULATED)
    assert variant.name == ""


@pytest.mark.parametrize(("lhs", "result"), [(E.F32, E.F32), (E.F64, E.F64), (E.BF16, E.F32), (E.F16, E.F32)])
def test_floats(lhs, result, rng):
    call = instruction(lhs, lhs, result, batch=True)
    operands = [torch.from_numpy(rng.standard_normal(o.shape.dims)) for o in call.operands]
    operands = [o.to(registry.prepare(call)(Run(), *operands).dtype) if lhs is result else o for o in operands]
    narrow = {E.BF16: torch.bfloat16, E.F16: torch.float16}
    operands = [o.to(narrow[lhs]) if lhs in narrow else o for o in operands]
    (variant,) = dot.variants(call, SIMULATED)
    expected = registry.prepare(call)(Run(), *operands)
    torch.testing.assert_close(variant.kernel(Run(), *operands), expected, rtol=1e-5, atol=1e-4)


def test_what_it_lacks():
    assert "no vendor" in dot.unsupported(instruction(E.F32, E.F32, E.F32), HOST)
    assert "no product" in dot.unsupported(instruction(E.F8E4M3FN, E.F8E4M3FN, E.F32), SIMULATED)
    assert "not exact" in dot.unsupported(instruction(E.S64, E.S64, E.S64, size=1 << 22), SIMULATED)


@pytest.mark.parametrize(
    ("precision", "algorithm", "allowed"),
    [
        (Precision.DEFAULT, DotAlgorithm.UNSET, True),
        (Precision.HIGH, DotAlgorithm.UNSET, False),
        (Precision.HIGHEST, DotAlgorithm.UNSET, False),
        (Precision.DEFAULT, DotAlgorithm.F32_F32_F32, False),
        (Precision.HIGHEST, DotAlgorithm.TF32_TF32_F32, True),
    ],
)
def test_tensor_float(precision, algorithm, allowed):
    """HLO's default precision allows TF32, as XLA does."""
    attributes = DotAttributes((1,), (0,), precision=precision, algorithm=algorithm)
    assert attributes.allows_tensor_float is allowed


@pytest.mark.parametrize("size", [33, 80, 258])
def test_a_row_that_is_not_finite_stays_alone(size):
    call = instruction(E.BF16, E.BF16, E.BF16, size, batch=True)
    (variant,) = dot.variants(call, SIMULATED)
    lhs, rhs = (torch.randn(o.shape.dims).to(torch.bfloat16) for o in call.operands)
    lhs[:, 4] = torch.inf
    found = variant.kernel(Run(), lhs, rhs)
    assert found[:, [0, 1, 2, 3, 5, 6]].isfinite().all() and not found[:, 4].isfinite().any()


@pytest.mark.parametrize("dims", [(17, 8, 8), (20, 9, 5), (64, 64, 64)])
def test_the_call_of_the_product(dims, rng):
    rows, contracted, columns = dims
    builder = Builder("int_mm")
    operands = [builder.parameter(ArrayShape(E.S8, dims)) for dims in ((rows, contracted), (contracted, columns))]
    attributes = CustomCallAttributes("aten::_int_mm.default")
    call = builder.add(Opcode.CUSTOM_CALL, operands, attributes, shape=ArrayShape(E.S32, (rows, columns)))
    (vendor,) = (i for i in implementations_of(operation_of(call)) if i.provider is Provider.VENDOR)
    assert vendor.unsupported(call, HOST) and not vendor.unsupported(call, SIMULATED)
    a, b = (from_bytes(rng.bytes(o.shape.num_bytes), o.shape) for o in call.operands)
    for variant in vendor.variants(call, SIMULATED):
        for right in (b, b.mT.contiguous().mT):
            assert torch.equal(variant.kernel(Run(), a, right), a.int() @ right.int()), variant.name
