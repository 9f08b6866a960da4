"""Plans of accelerators that make their results where whoever runs them wants them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from flagos_backend.compile import accelerator_plan as plan
from flagos_backend.devices.target import Target
from flagos_backend.importer import import_module
from flagos_backend.kernels.reference.registry import Run
from support.against_xla import hlo_of_text
from support.passes import for_accelerator

HEAD = "x = f32[4,6] parameter(0)\n  y = f32[6,5] parameter(1)\n  "


@pytest.mark.parametrize(
    ("body", "result_buffers"),
    [
        ("ROOT r = f32[4,6] exponential(x)", 1),
        ("e = f32[4,6] exponential(x)\n  ROOT r = f32[24] reshape(e)", 1),
        ("d = f32[4,5] dot(x, y), lhs_contracting_dims={1}, rhs_contracting_dims={0}\n"
         "  ROOT r = (f32[4,5], f32[4,6]) tuple(d, x)", 2),
        ("d = f32[4,5] dot(x, y), lhs_contracting_dims={1}, rhs_contracting_dims={0}\n"
         "  e = f32[4,5] tanh(d)\n  ROOT r = f32[20] reshape(e)", 1),
        ("e = f32[4,6] exponential(x)\n  s = f32[4,6] sort(e), dimensions={1}, to_apply=less\n"
         "  ROOT r = (f32[4,6], f32[4,6]) tuple(e, s)", 2),
        ("e = f32[4,6] exponential(x)\n  ROOT r = (f32[4,6], f32[4,6]) tuple(e, e)", 2),
    ],
)  # fmt: skip
def test_results_are_made_in_their_places(body: str, result_buffers: int, rng: np.random.Generator) -> None:
    less = "less { a = f32[] parameter(0) b = f32[] parameter(1) ROOT c = pred[] compare(a, b), direction=LT }\n"
    module = for_accelerator(import_module(hlo_of_text(f"{less}ENTRY main {{\n  {HEAD}{body}\n}}")))
    target = Target("cpu", vendor="simulated", architecture="host", multiprocessors=2, warp_size=1)
    run, device = Run(), torch.device("cpu")
    built = plan.build(module.entry, (), device, target)
    arguments = [
        torch.from_numpy(rng.standard_normal(p.shape.dims).astype(np.float32)) for p in module.entry.parameters
    ]
    with torch.inference_mode():
        elsewhere = built.run(run, list(arguments))
        places = [torch.full(shape.dims, torch.nan) for shape in built.result_shapes]
        results = built.run(run, list(arguments), places)
    in_buffers = [result.data_ptr() == place.data_ptr() for result, place in zip(results, places, strict=True)]
    assert sum(slot in built.result_buffers for slot in built.results) >= sum(in_buffers) == result_buffers
    for result, expected in zip(results, elsewhere, strict=True):
        torch.testing.assert_close(result, expected, rtol=0, atol=0)
