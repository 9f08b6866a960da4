"""Our Triton QR factorisations against LAPACK's, in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from flagos_backend.importer import import_module
from flagos_backend.ir.hlo import Instruction
from flagos_backend.ir.opcode import Opcode
from flagos_backend.kernels.choice import implementations_of
from flagos_backend.kernels.implementation import Provider, Variant
from flagos_backend.kernels.reference.registry import Run
from flagos_backend.kernels.triton import qr
from support.against_xla import hlo_of_text
from support.kernels import target

KINDS = {"f32": torch.float32, "f64": torch.float64}


def instruction(name: str, operands: list[str], results: str) -> Instruction:
    given = " ".join(f"p{n} = {shape} parameter({n})" for n, shape in enumerate(operands))
    names = ", ".join(f"p{n}" for n in range(len(operands)))
    text = f'ENTRY e {{ {given} ROOT r = {results} custom-call({names}), custom_call_target="{name}" }}'
    module = import_module(hlo_of_text(text))
    (call,) = (i for i in module.entry.instructions if i.opcode is Opcode.CUSTOM_CALL)
    return call


def dims_of(*dims: int) -> str:
    return f"[{','.join(map(str, dims))}]"


def variant(name: str, call: Instruction) -> Variant:
    (ours,) = (i for i in implementations_of(name) if i.provider is Provider.TRITON)
    assert not ours.unsupported(call, target())
    (found,) = ours.variants(call, target())
    return found


def run(variant: Variant, *operands: torch.Tensor) -> list[torch.Tensor]:
    """On the device and back; the layout of operands stays."""
    found = variant.kernel(Run(asynchronous=True), *(operand.to(target().device_type) for operand in operands))
    return [result.cpu() for result in (found if isinstance(found, tuple) else (found,))]


def factored(a: torch.Tensor, names: tuple[str, str] = (qr.FACTORS[1], qr.PRODUCTS[1])) -> list[torch.Tensor]:
    """R and reflectors, their factors, and Q of as many columns as there are reflectors."""
    kind = next(name for name, dtype in KINDS.items() if dtype is a.dtype)
    *batch, rows, columns = a.shape
    steps = min(rows, columns)
    whole, factors, thin = (f"{kind}{dims_of(*batch, *d)}" for d in ((rows, columns), (steps,), (rows, steps)))
    factor = variant(names[0], instruction(names[0], [whole], f"({whole}, {factors})"))
    packed, taus = run(factor, a)
    product = variant(names[1], instruction(names[1], [thin, factors], thin))
    return [packed, taus, *run(product, packed[..., :steps], taus)]


def check(a: torch.Tensor) -> None:
    """Backward: Q is unitary, and times R what was factored, each as far as its own size goes."""
    tolerance = 4 * torch.finfo(a.dtype).eps
    packed, taus, q = (x.double() for x in factored(a))
    assert packed.shape == a.shape and taus.shape == (*a.shape[:-2], min(a.shape[-2:]))
    unit = torch.eye(q.shape[-1], dtype=torch.float64).expand(*q.shape[:-2], -1, -1)
    torch.testing.assert_close(q.mT @ q, unit, rtol=0, atol=tolerance * a.shape[-2])
    apart = torch.linalg.vector_norm(q @ packed[..., : q.shape[-1], :].triu() - a.double(), dim=-2)
    size = torch.linalg.vector_norm(a.double(), dim=-2)
    assert (apart <= tolerance * a.shape[-2] * size).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "dims",
    [(1, 1), (4, 4), (7, 3), (3, 7), (1, 5), (5, 1), (2, 3, 8, 8), (33, 20), (20, 33), (3, 64, 2), (90, 60)],
    ids=str,
)
def test_against_lapack(dims: tuple[int, ...], kind: str, rng: np.random.Generator) -> None:
    a = torch.from_numpy(rng.standard_normal(dims)).to(KINDS[kind])
    eps = torch.finfo(a.dtype).eps
    check(a)
    packed, taus, _ = factored(a)
    expected, factors = torch.geqrf(a.double())
    close = {"rtol": 0.0, "atol": 500 * eps * max(dims[-2:])}
    torch.testing.assert_close(packed.double(), expected, **close)
    torch.testing.assert_close(taus.double(), factors, **close)


@pytest.mark.parametrize("dims", [(8, 8), (9, 4), (4, 9)], ids=str)
@pytest.mark.parametrize("size", [1e-37, 1e-25, 1e25, 1e37])
def test_squares_that_no_float32_holds(size: float, dims: tuple[int, int], rng: np.random.Generator) -> None:
    a = torch.from_numpy(rng.uniform(-1, 1, dims)).float() * size
    check(a)


def test_nothing_to_reflect(rng: np.random.Generator) -> None:
    """Zeros, also below the diagonal only: LAPACK's reflectors are identities, and signs stay."""
    a = torch.from_numpy(rng.standard_normal((3, 6, 6))).float()
    a[0], a[1] = 0, a[1].triu()
    a[2, :, 2] = 0
    packed, taus, q = factored(a)
    assert (packed[:2] == a[:2]).all() and (taus[:2] == 0).all()
    assert (q[:2] == torch.eye(6)).all()
    check(a)


@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf])
def test_what_is_no_number_spoils_its_own_matrix(number: float, rng: np.random.Generator) -> None:
    a = torch.from_numpy(rng.standard_normal((2, 5, 5))).float()
    a[0, 3, 1] = number
    packed, _, q = factored(a)
    assert packed[0, 1:, 1:].isnan().any() and q[0].isnan().any()
    check(a[1:])
    assert packed[1].isfinite().all() and q[1].isfinite().all()


def test_transposed_operands_and_the_older_names(rng: np.random.Generator) -> None:
    a = torch.from_numpy(rng.standard_normal((2, 6, 9))).float()
    turned = factored(a.mT, (qr.FACTORS[0], qr.PRODUCTS[0]))
    for ours, expected in zip(turned, factored(a.mT.contiguous()), strict=True):
        assert torch.equal(ours, expected)


def test_more_columns_than_reflectors(rng: np.random.Generator) -> None:
    """As the whole of Q takes, of what is filled up with anything."""
    a = torch.from_numpy(rng.standard_normal((8, 3)))
    packed, taus, thin = factored(a)
    padded = torch.cat((packed, torch.from_numpy(rng.standard_normal((8, 5)))), 1)
    name = qr.PRODUCTS[1]
    call = instruction(name, ["f64[8,8]", "f64[3]"], "f64[8,8]")
    (whole,) = run(variant(name, call), padded, taus)
    torch.testing.assert_close(whole, torch.linalg.householder_product(padded, taus))
    torch.testing.assert_close(whole[:, :3], thin)


@pytest.mark.parametrize(
    ("shape", "reason"),
    [("f32[129,128]", "larger than"), ("f64[128,128]", "larger than"), ("c64[4,4]", "c64"), ("f32[0,4]", "nothing")],
)
def test_what_is_left_to_others(shape: str, reason: str) -> None:
    kind, dims = shape[:3], [int(size) for size in shape[4:-1].split(",")]
    name = qr.FACTORS[1]
    call = instruction(name, [shape], f"({shape}, {kind}[{min(dims)}])")
    (ours,) = (i for i in implementations_of(name) if i.provider is Provider.TRITON)
    assert reason in ours.unsupported(call, target())
