"""Our Triton kernel of row orders in the interpreter, and LU that uses it, against swaps one by one."""

import numpy as np
import pytest
import torch

from flagos_backend.devices.target import Target
from flagos_backend.importer import import_module
from flagos_backend.kernels.choice import implementations_of
from flagos_backend.kernels.implementation import Provider
from flagos_backend.kernels.reference.registry import Run
from flagos_backend.kernels.triton import swaps
from support.against_xla import hlo_of_text

SIMULATED = Target("cpu", "simulated", multiprocessors=4, warp_size=4)


@pytest.fixture(autouse=True)
def small_programs(monkeypatch):
    """So that the rows of one matrix are several programs."""
    monkeypatch.setattr(swaps, "_MAX_BLOCK", 8)


def swapped(pivots, rows):
    order = np.tile(np.arange(rows), (*pivots.shape[:-1], 1))
    for place in np.ndindex(pivots.shape[:-1]):
        for i, other in enumerate(pivots[place]):
            order[place][[i, other]] = order[place][[other, i]]
    return order


@pytest.mark.parametrize(("batch", "count", "rows"), [((), 20, 20), ((3,), 1, 1), ((2, 2), 5, 17), ((2,), 0, 3)])
@pytest.mark.parametrize("back", [False, True], ids=["as LU swaps", "with any row"])
def test_order(batch, count, rows, back, rng):
    pivots = rng.integers(0 if back else np.arange(count), rows, (*batch, count), dtype=np.int32)
    found = swaps.row_order(torch.from_numpy(pivots), rows)
    assert found.dtype is torch.int32
    np.testing.assert_array_equal(found, swapped(pivots, rows))


def lu_of(dims):
    *batch, rows, columns = dims
    shapes = [f"f64{list(dims)}", f"s32{[*batch, min(rows, columns)]}", f"s32{[*batch, rows]}"]
    a, pivots, order = (shape.replace(" ", "") for shape in shapes)
    text = f'ROOT r = ({a}, {pivots}, {order}) custom-call(a), custom_call_target="flagos.lu"'
    return import_module(hlo_of_text(f"\nENTRY e {{\n  a = {a} parameter(0)\n  {text}\n}}")).entry.root


@pytest.mark.parametrize("dims", [(9, 9), (2, 3, 12, 5), (3, 5, 12), (0, 4, 4), (4, 0)])
def test_lu(dims, rng):
    (vendor,) = (i for i in implementations_of("flagos.lu") if i.provider is Provider.VENDOR)
    instruction = lu_of(dims)
    (variant,) = vendor.variants(instruction, SIMULATED)
    a = rng.standard_normal(dims)
    lu, pivots, order = (x.numpy() for x in variant.kernel(Run(asynchronous=True), torch.from_numpy(a)))
    np.testing.assert_array_equal(order, swapped(pivots, dims[-2]))
    k = min(dims[-2:])
    lower = np.tril(lu[..., :k], -1) + np.eye(dims[-2], k)
    np.testing.assert_allclose(lower @ np.triu(lu[..., :k, :]), np.take_along_axis(a, order[..., None], -2), atol=1e-10)


def test_a_singular_matrix_is_no_failure():
    instruction = lu_of((2, 3, 3))
    (vendor,) = (i for i in implementations_of("flagos.lu") if i.provider is Provider.VENDOR)
    (variant,) = vendor.variants(instruction, SIMULATED)
    a = np.stack([np.zeros((3, 3)), np.diag([1.0, 2, 3])[::-1]])
    lu, pivots, order = (x.numpy() for x in variant.kernel(Run(asynchronous=True), torch.from_numpy(a)))
    np.testing.assert_array_equal(order, swapped(pivots, 3))
    np.testing.assert_array_equal(lu[1], np.diag([1.0, 2, 3]))
