"""What a program on an accelerator may need is known, and compiled at once, before any kernel of it is taken."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import torch
from jax import lax

from flagos_backend.codegen.triton import RegionKernel, RegionKernels
from flagos_backend.compile import accelerator_plan, kernel_candidates
from flagos_backend.devices.target import Target
from flagos_backend.importer import import_module
from flagos_backend.kernels import tuning
from flagos_backend.kernels.choice import Candidates, candidates
from flagos_backend.kernels.reference.registry import Kernel
from flagos_backend.loop_ir.region import Region
from programs import hlo_bytes
from support.passes import for_accelerator

TARGET = Target("cpu", vendor="simulated", architecture="host", multiprocessors=2, warp_size=1)
X = jax.ShapeDtypeStruct((8, 8), jnp.float32)


def straight(x: jax.Array) -> Any:
    return jax.nn.softmax(x @ x) + lax.top_k(x, 8)[0], jnp.sort(x)


def counted_loop(x: jax.Array) -> Any:
    return lax.fori_loop(0, 5, lambda i, y: jnp.tanh(y @ x) + i, x)


def loop_until(x: jax.Array) -> Any:
    return lax.while_loop(lambda y: y.sum() < 9, lambda y: jnp.exp(y @ x).cumsum(0), x)


def branches(x: jax.Array) -> Any:
    return lax.cond(x[0, 0] > 0, lambda y: jnp.sort(y @ y), lambda y: lax.fori_loop(0, 3, lambda i, z: z @ z, y), x)


@pytest.mark.parametrize("function", [straight, counted_loop, loop_until, branches])
def test_nothing_new_is_needed_while_a_plan_is_built(
    function: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = for_accelerator(import_module(hlo_bytes(function, X))).entry
    made: list[object] = []

    def noted(what: Any, *arguments: Any, **keywords: Any) -> Candidates:
        made.append(what)
        return candidates(what, *arguments, **keywords)

    def together(kernels: Sequence[RegionKernel], warm_ups: Any, device: torch.device, measurements: Any) -> None:
        assert kernels
        made.append(device)

    def of_region(region: Region, *arguments: Any, **keywords: Any) -> RegionKernels:
        made.append(region)
        return of(region, *arguments, **keywords)

    of = RegionKernels.of
    monkeypatch.setattr(kernel_candidates, "candidates", noted)
    monkeypatch.setattr(RegionKernels, "of", of_region)
    monkeypatch.setattr(kernel_candidates, "warm_up_together", together)
    device = torch.device("cpu")
    kernels = kernel_candidates.KernelCandidates(TARGET, excess_precision=False)
    kernels.warm_up(entry, device)
    known = len(made)
    assert made[-1] is device and known > 2
    accelerator_plan._Builder(device, kernels).build(entry, (), entry=True)
    assert made[known:] == []


def _kernel(run: object) -> None: ...


KERNELS: dict[str, Kernel] = {"first": _kernel, "second": _kernel, "third": _kernel}
WARM_UPS: dict[str, Callable[[], object]] = {"first": list, "second": dict}


@pytest.mark.parametrize(
    ("times", "expected"),
    [
        (None, WARM_UPS),
        ({"first": 2.0, "second": 1.0}, {"second": dict}),
        ({"first": 2.0, "third": 1.0}, {}),
        ({"first": None, "second": None}, {"first": list}),
        ({"another": 1.0}, WARM_UPS),
    ],
)
def test_what_is_known_to_be_slower_is_not_waited_for(
    times: dict[str, float | None] | None, expected: Mapping[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuning, "_unmeasurable", lambda *_: "")
    monkeypatch.setattr(tuning, "_cache_path", lambda *_: None)
    monkeypatch.setattr(tuning, "_read", lambda _: times)
    task = tuning.Task("t", (), (), import_module(hlo_bytes(straight, X)).entry.root.shape)
    assert tuning.awaited(task, TARGET, KERNELS, 1.0, WARM_UPS) == expected


def test_where_nothing_is_measured_the_first_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "_unmeasurable", lambda *_: "the device is the host's memory")
    task = tuning.Task("t", (), (), import_module(hlo_bytes(straight, X)).entry.root.shape)
    assert tuning.awaited(task, TARGET, KERNELS, 1.0, WARM_UPS) == {"first": list}
