"""Eigenvalues of float32 by way of float64, where the vendor's library is slower without: on this host's memory."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from flagos_backend.devices.target import Target
from flagos_backend.ir.attributes import CustomCallAttributes
from flagos_backend.ir.builder import Builder
from flagos_backend.ir.hlo import Instruction
from flagos_backend.ir.opcode import Opcode
from flagos_backend.ir.types import ArrayShape, ElementType, TupleShape
from flagos_backend.kernels.reference.registry import Run
from flagos_backend.kernels.vendor import eigh

E = ElementType
H100 = Target("cuda", "nvidia", "sm_90", multiprocessors=132)
KINDS = {E.F32: torch.float32, E.C64: torch.complex64, E.F64: torch.float64}


def call(kind: ElementType, size: int, batch: tuple[int, ...] = (), *, lower: bool = True) -> Instruction:
    builder = Builder("entry")
    matrix = ArrayShape(kind, (*batch, size, size))
    values = ArrayShape(E.F64 if kind is E.F64 else E.F32, (*batch, size))
    attributes = CustomCallAttributes("flagos.eigh", json.dumps({"lower": lower}).encode())
    shape = TupleShape((matrix, values))
    return builder.add(Opcode.CUSTOM_CALL, [builder.parameter(matrix)], attributes, shape=shape)


@pytest.mark.parametrize("lower", [True, False])
@pytest.mark.parametrize("batch", [(), (3,)], ids=str)
@pytest.mark.parametrize("kind", [E.F32, E.C64], ids=lambda k: k.name)
def test_as_exact_as_what_is_rounded_at_the_end(
    kind: ElementType, batch: tuple[int, ...], lower: bool, rng: np.random.Generator
) -> None:
    a = torch.from_numpy(rng.standard_normal((*batch, 40, 40, 2))).view(*batch, 40, 80)[..., ::2].to(KINDS[kind])
    double, plain = eigh.variants(call(kind, 40, batch, lower=lower), H100)
    assert (plain.name, double.name) == ("", "in float64")
    exact = torch.linalg.eigvalsh(a.to(torch.promote_types(a.dtype, torch.float64)), UPLO="L" if lower else "U")
    for variant, eps in ((plain, 1e-4), (double, 1e-6)):
        vectors, values = variant.kernel(Run(), a)
        assert (vectors.dtype, values.dtype) == (a.dtype, torch.float32)
        torch.testing.assert_close(values.double(), exact, rtol=0, atol=eps * float(exact.abs().max()))
        triangle = a.tril() if lower else a.triu()
        whole = triangle + triangle.mH - torch.diag_embed(a.diagonal(dim1=-2, dim2=-1).real)
        torch.testing.assert_close(whole @ vectors, vectors * values[..., None, :], rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("kind", "size", "vendor"),
    [(E.F64, 64, "nvidia"), (E.F32, 31, "nvidia"), (E.F32, 513, "nvidia"), (E.F32, 64, "ascend")],
)
def test_where_the_library_is_as_it_is(kind: ElementType, size: int, vendor: str) -> None:
    assert len(eigh.variants(call(kind, size), Target("npu" if vendor == "ascend" else "cuda", vendor, "x"))) == 1
