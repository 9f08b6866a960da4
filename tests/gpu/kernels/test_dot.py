"""Matrix products of every type on the accelerator, by every provider, against exact ones on the host."""

import pytest
import torch

from flagos_backend.devices.accelerator import TorchAccelerator
from flagos_backend.ir.attributes import DotAttributes
from flagos_backend.ir.builder import Builder
from flagos_backend.ir.opcode import Opcode, Precision
from flagos_backend.ir.types import ArrayShape, ElementType
from flagos_backend.kernels.choice import implementations_of
from flagos_backend.kernels.implementation import Provider
from flagos_backend.kernels.reference import registry
from flagos_backend.kernels.reference.registry import Run
from flagos_backend.kernels.reference.storage import dtype_of

E = ElementType
DEVICE = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
TOLERANCE = {E.F16: 2e-3, E.BF16: 1e-2, E.F32: 2e-6, E.F64: 1e-14, E.C64: 2e-6, E.C128: 1e-14}
SAME = [E.F16, E.BF16, E.F32, E.F64, E.C64, E.C128, E.S8, E.S32, E.S64, E.U8]
PAIRS = [*((e, e) for e in SAME), (E.BF16, E.F32), (E.F16, E.F32), (E.S8, E.S32)]


@pytest.mark.parametrize(("element", "result"), PAIRS, ids=lambda e: e.name)
@pytest.mark.parametrize("batch", [False, True])
def test_dot(element, result, batch, rng):
    lead = (3,) if batch else ()
    builder = Builder("product")
    lhs = builder.parameter(ArrayShape(element, (*lead, 33, 70)))
    rhs = builder.parameter(ArrayShape(element, (*lead, 45, 70)))
    n = len(lead)
    attributes = DotAttributes((n + 1,), (n + 1,), tuple(range(n)), tuple(range(n)), precision=Precision.HIGHEST)
    dot = builder.add(Opcode.DOT, [lhs, rhs], attributes, shape=ArrayShape(result, (*lead, 33, 45)))
    arguments = [torch.from_numpy(rng.standard_normal(o.shape.dims) * 50).to(dtype_of(element)) for o in (lhs, rhs)]
    exact = registry.prepare(dot)(Run(), *arguments)
    target = TorchAccelerator(DEVICE.type, 0).target
    ran = set()
    for implementation in implementations_of("dot"):
        if implementation.provider is Provider.REFERENCE or implementation.unsupported(dot, target):
            continue
        for variant in implementation.variants(dot, target):
            found = variant.kernel(Run(), *(a.to(DEVICE) for a in arguments)).cpu()
            assert found.dtype == exact.dtype
            if result in TOLERANCE:
                worst = max(TOLERANCE[element], TOLERANCE[result])
                scale = float(exact.abs().max().double())
                torch.testing.assert_close(found, exact, rtol=0, atol=worst * scale)
            else:
                assert torch.equal(found, exact)
            ran.add(implementation.provider)
    assert Provider.VENDOR in ran
