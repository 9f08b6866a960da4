"""One of two processes whose tensors are on the device flagos. What the other process gives is made here too, from the
seed, and reduced on the CPU: the oracle."""

from __future__ import annotations

import copy
import functools
import itertools
import os
import time
import types
import unittest.mock
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from flagos_backend.frontends.torch import autoload
from flagos_backend.frontends.torch.distributed import work as works
from support.processes import expect_error, make_checks

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
SEED = int(os.environ["FLAGOS_TEST_SEED"]) % 2**31
DEVICE = "flagos"
OTHER = 1 - RANK

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int32, torch.int64)
COMPLEX = (torch.complex64, torch.complex128)
DTYPES = (*FLOATS, *INTEGERS, torch.bool, *COMPLEX, torch.float8_e4m3fn)


def given(dtype: torch.dtype, *shape: int) -> list[Tensor]:
    """Of each process, small whole numbers: every order of adding them gives the same, in every dtype."""
    own = [torch.Generator().manual_seed(SEED + rank) for rank in range(WORLD)]
    return [torch.randint(0, 4, shape, generator=each).to(dtype) for each in own]


def here(tensor: Tensor) -> Tensor:
    return tensor.to(DEVICE)


def empty(dtype: torch.dtype, *shape: int) -> Tensor:
    return here(torch.zeros(shape).to(dtype))


def assert_bits(got: Tensor, want: Tensor, what: object) -> None:
    assert got.device.type == DEVICE, what
    assert got.dtype == want.dtype and got.shape == want.shape, what
    assert torch.equal(torch.view_as_real(got.cpu()) if got.is_complex() else got.cpu().float(), _plain(want)), what


def _plain(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor.float()


def groups() -> Iterator[tuple[str, dist.ProcessGroup]]:
    """Made by every name under which the device's tensors travel."""
    yield "no name", dist.group.WORLD
    for name in ("gloo", "flagos", "cpu:gloo,flagos:flagos"):
        yield name, dist.new_group(backend=name)


def what_moves_of_every_dtype() -> None:
    for dtype in DTYPES:
        parts = given(dtype, 2, 3)
        mine, whole = here(parts[RANK]), torch.cat([p.float() if dtype is DTYPES[-1] else p for p in parts]).to(dtype)

        sent = mine.clone()
        dist.broadcast(sent, 1)
        assert_bits(sent, parts[1], ("broadcast", dtype))

        listed = [empty(dtype, 2, 3) for _ in parts]
        dist.all_gather(listed, mine)
        for got, want in zip(listed, parts, strict=True):
            assert_bits(got, want, ("all_gather", dtype))

        joined = empty(dtype, 4, 3)
        dist.all_gather_into_tensor(joined, mine)
        assert_bits(joined, whole, ("all_gather_into_tensor", dtype))

        listed = [empty(dtype, 2, 3) for _ in parts]
        dist.gather(mine, listed if RANK == 0 else None)
        for got, want in zip(listed, parts if RANK == 0 else [], strict=RANK == 0):
            assert_bits(got, want, ("gather", dtype))

        got = empty(dtype, 2, 3)
        dist.scatter(got, [here(part) for part in parts] if RANK == 1 else None, src=1)
        assert_bits(got, parts[RANK], ("scatter", dtype))

        got = empty(dtype, 2, 3)
        dist.all_to_all_single(got, mine)
        want = torch.stack([part[RANK].float() if dtype is DTYPES[-1] else part[RANK] for part in parts]).to(dtype)
        assert_bits(got, want, ("all_to_all_single", dtype))

        rows = [empty(dtype, 3) for _ in parts]
        dist.all_to_all(rows, [row.contiguous() for row in mine.unbind()])
        for got, part in zip(rows, parts, strict=True):
            assert_bits(got, part[RANK], ("all_to_all", dtype))

    # Rank 0 sends nothing, rank 1 one row to rank 0 and two to itself.
    sizes = [[0, 0], [1, 2]]
    got, rows = empty(torch.float32, 1 + RANK, 2), here(torch.arange(6.0).reshape(3, 2)[: 3 * RANK])
    dist.all_to_all_single(got, rows, [row[RANK] for row in sizes], sizes[RANK])
    assert_bits(got, torch.arange(6.0).reshape(3, 2)[RANK : 1 + 2 * RANK], "uneven")


_REDUCTIONS: dict[Any, Callable[[Tensor, Tensor], Tensor]] = {
    dist.ReduceOp.SUM: torch.add,
    dist.ReduceOp.AVG: torch.add,
    dist.ReduceOp.PRODUCT: torch.mul,
    dist.ReduceOp.MIN: torch.minimum,
    dist.ReduceOp.MAX: torch.maximum,
    dist.ReduceOp.BAND: torch.bitwise_and,
    dist.ReduceOp.BOR: torch.bitwise_or,
    dist.ReduceOp.BXOR: torch.bitwise_xor,
}
_BITWISE = (dist.ReduceOp.BAND, dist.ReduceOp.BOR, dist.ReduceOp.BXOR)


def _cases() -> Iterator[tuple[torch.dtype, Any]]:
    for dtype, op in itertools.product((*FLOATS, *INTEGERS, torch.bool, *COMPLEX), _REDUCTIONS):
        if dtype.is_floating_point and op in _BITWISE:
            continue
        if dtype.is_complex and op not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            continue
        if dtype is torch.bool and op is dist.ReduceOp.AVG:
            continue
        yield dtype, op


def _reduced(op: Any, parts: list[Tensor]) -> Tensor:
    dtype = parts[0].dtype
    wide = parts if dtype.is_complex or dtype is torch.bool else [part.to(torch.float64) for part in parts]
    if op in _BITWISE and dtype is not torch.bool:
        wide = [part.to(torch.int64) for part in parts]
    total = functools.reduce(_REDUCTIONS[op], wide)
    if op is dist.ReduceOp.AVG:
        total = total / WORLD if dtype.is_floating_point or dtype.is_complex else (total / WORLD).trunc()
    return total.to(dtype)


def reductions_of_every_kind() -> None:
    """Averages of integers are rounded towards zero."""
    for dtype, op in _cases():
        parts = given(dtype, 4, 3)
        want = _reduced(op, parts)

        got = here(parts[RANK])
        dist.all_reduce(got, op)
        assert_bits(got, want, ("all_reduce", dtype, op))

        got = here(parts[RANK])
        dist.reduce(got, 1, op)
        if RANK == 1:
            assert_bits(got, want, ("reduce", dtype, op))

        got = empty(dtype, 2, 3)
        dist.reduce_scatter_tensor(got, here(parts[RANK]), op)
        assert_bits(got, want.chunk(WORLD)[RANK], ("reduce_scatter_tensor", dtype, op))

        got = empty(dtype, 2, 3)
        dist.reduce_scatter(got, [part.contiguous() for part in here(parts[RANK]).chunk(WORLD)], op)
        assert_bits(got, want.chunk(WORLD)[RANK], ("reduce_scatter", dtype, op))


def coalesced() -> None:
    parts = [given(torch.float32, 4), given(torch.float32, 2, 3)]
    totals = [here(of[RANK]) for of in parts]
    with dist._coalescing_manager():
        for total in totals:
            dist.all_reduce(total)
    wholes = [here(torch.zeros(2 * of[0].shape[0], *of[0].shape[1:])) for of in parts]
    with dist._coalescing_manager():
        for whole, of in zip(wholes, parts, strict=True):
            dist.all_gather_into_tensor(whole, here(of[RANK]))
    shares = [here(torch.zeros(of[0].shape[0] // 2, *of[0].shape[1:])) for of in parts]
    with dist._coalescing_manager():
        for share, of in zip(shares, parts, strict=True):
            dist.reduce_scatter_tensor(share, here(of[RANK]))
    for total, whole, share, of in zip(totals, wholes, shares, parts, strict=True):
        assert_bits(total, sum(of), "all_reduce")
        assert_bits(whole, torch.cat(of), "all_gather_into_tensor")
        assert_bits(share, sum(of).chunk(2)[RANK], "reduce_scatter_tensor")


def strides_and_sizes() -> None:
    """What lies between the elements of a strided tensor is left alone."""
    for dtype in (torch.float32, torch.int16, torch.complex128):
        parts = given(dtype, 4, 6)
        for view in (lambda x: x[:, ::2], lambda x: x.t(), lambda x: x[1:3, 1], lambda x: x[:, 0]):
            whole, want = here(parts[RANK]), parts[RANK].clone()
            view(want).copy_(view(parts[0]) + view(parts[1]))
            dist.all_reduce(view(whole))
            assert_bits(whole, want, (dtype, "all_reduce"))
            view(want).copy_(view(parts[1]))
            whole = here(parts[RANK])
            want = parts[RANK].clone()
            view(want).copy_(view(parts[1]))
            dist.broadcast(view(whole), 1, async_op=True).wait()
            assert_bits(whole, want, (dtype, "broadcast"))
        gathered = here(torch.zeros(4, 8).to(dtype)).t()
        dist.all_gather_into_tensor(gathered, here(parts[RANK]).t()[:4])
        assert_bits(gathered, torch.cat([part.t()[:4] for part in parts]), (dtype, "all_gather_into_tensor"))
    for shape in ((0,), (3, 0), ()):
        x = here(torch.ones(shape))
        dist.all_reduce(x)
        dist.broadcast(x, 0)
        listed = [here(torch.zeros(shape)) for _ in range(WORLD)]
        dist.all_gather(listed, x)
        for got in (x, *listed):
            assert_bits(got, torch.full(shape, 2.0), shape)


def works_and_futures() -> None:
    parts = given(torch.float32, 5)
    x = here(parts[RANK])
    work = dist.all_reduce(x, async_op=True)
    doubled = work.get_future().then(lambda future: future.value()[0] * 2)
    assert work.wait() and work.is_completed() and work.exception() is None
    assert_bits(work.result()[0], sum(parts), "result")
    assert work.result()[0].data_ptr() == x.data_ptr()
    assert_bits(doubled.wait(), sum(parts) * 2, "then")

    averaged = here(parts[RANK])
    work = dist.all_reduce(averaged, dist.ReduceOp.AVG, async_op=True)
    while not work.is_completed():
        time.sleep(0.001)
    assert_bits(averaged, sum(parts) / 2, "average")

    many = [here(parts[RANK]) for _ in range(20)]
    begun = [dist.all_reduce(each, async_op=True) for each in many]
    assert all(work.wait(timedelta(seconds=60)) for work in reversed(begun))
    for each in many:
        assert_bits(each, sum(parts), "many")
    assert dist.barrier(async_op=True).wait()


def works_in_the_order_of_a_stream() -> None:
    """As on an accelerator: who asks for a result has it made, and nothing waits in another thread."""
    parts = given(torch.float32, 5)
    x = here(parts[RANK])
    on_a_chip = types.SimpleNamespace(inner=torch.device("cuda"))
    with unittest.mock.patch.object(works, "runtime", lambda: on_a_chip):
        work = dist.all_reduce(x, dist.ReduceOp.AVG, async_op=True)
    assert_bits(work.get_future().value()[0], sum(parts) / 2, "future")
    assert work.wait() and work.is_completed() and work.exception() is None
    assert_bits(work.result()[0], sum(parts) / 2, "result, divided once")


def point_to_point() -> None:
    for dtype in DTYPES:
        parts = given(dtype, 3)
        got, work = empty(dtype, 3), None
        work = dist.isend(here(parts[RANK]), OTHER, tag=1)
        assert dist.recv(got, OTHER, tag=1) == OTHER
        work.wait()
        assert_bits(got, parts[OTHER], dtype)
    got = empty(torch.float32, 3)
    work = dist.isend(here(torch.full((3,), float(RANK))), OTHER)
    assert dist.recv(got) == OTHER  # from any
    work.wait()
    assert_bits(got, torch.full((3,), float(OTHER)), "any source")
    got, nothing = empty(torch.float32, 2), empty(torch.float32, 0)
    sent = here(torch.tensor([RANK, 7.0]))
    both = [(dist.isend, sent), (dist.irecv, got), (dist.isend, nothing), (dist.irecv, nothing.clone())]
    for work in dist.batch_isend_irecv([dist.P2POp(op, tensor, OTHER) for op, tensor in both]):
        work.wait()
    assert_bits(got, torch.tensor([OTHER, 7.0]), "batch")


def groups_of_every_name() -> None:
    for name, group in groups():
        x = here(torch.ones(3))
        dist.all_reduce(x, group=group)
        assert_bits(x, torch.full((3,), 2.0), name)
        for work in dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, x, OTHER, group), dist.P2POp(dist.irecv, got := torch.zeros_like(x), OTHER, group)]
        ):
            work.wait()
        assert_bits(got, torch.full((3,), 2.0), name)
        said: list[Any] = [None] * WORLD
        dist.all_gather_object(said, {"rank": RANK}, group=group)
        assert said == [{"rank": rank} for rank in range(WORLD)], name
        dist.barrier(group)
        if name != "flagos":
            y = torch.ones(2)
            dist.all_reduce(y, group=group)
            assert y.tolist() == [2, 2], name
    dist.monitored_barrier(dist.new_group(backend="gloo"))
    mesh = init_device_mesh(DEVICE, (WORLD,))
    assert mesh.get_local_rank() == RANK


def functional_collectives() -> None:
    parts = given(torch.float32, 4)
    for group in (dist.group.WORLD, dist.new_group(backend="flagos")):

        def function(x: Tensor, group: Any = group) -> Tensor:
            return collectives.all_gather_tensor(collectives.all_reduce(x * 2, "sum", group) + 1, 0, group)

        want = (sum(parts) * 2 + 1).repeat(2)
        assert_bits(collectives.wait_tensor(function(here(parts[RANK]))), want, "eager")
        torch._dynamo.reset()
        assert_bits(torch.compile(function, backend="flagos", fullgraph=True)(here(parts[RANK])), want, "compiled")


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


def _assert_trains(prepare: Callable[[Model], tuple[nn.Module, slice]]) -> None:
    """Two steps of a model on both processes, and of the same in float64 on one. ``prepare`` returns what is called,
    and which part of the batch this process has."""
    torch.manual_seed(SEED)
    model = Model()
    reference, x, y = copy.deepcopy(model).double(), torch.randn(12, 8), torch.randn(12, 4)
    model.to(DEVICE)
    called, mine = prepare(model)
    for module, batch in ((called, (here(x[mine]), here(y[mine]))), (reference, (x.double(), y.double()))):
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            F.mse_loss(module(batch[0]), batch[1]).backward()
            optimizer.step()
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        whole: Any = ours.detach()
        whole = whole.full_tensor() if hasattr(whole, "full_tensor") else whole
        assert whole.device.type == DEVICE
        torch.testing.assert_close(whole.cpu().double(), theirs.detach(), rtol=1e-4, atol=1e-5)


_MINE = slice(6 * RANK, 6 * RANK + 6)


def distributed_data_parallel() -> None:
    parallel = nn.parallel.DistributedDataParallel

    def hooked(model: Model) -> tuple[nn.Module, slice]:
        wrapped = parallel(model)
        wrapped.register_comm_hook(None, allreduce_hook)
        return wrapped, _MINE

    _assert_trains(lambda model: (parallel(model), _MINE))
    _assert_trains(lambda model: (parallel(model, gradient_as_bucket_view=True, bucket_cap_mb=0.0001), _MINE))
    _assert_trains(hooked)


def fully_sharded() -> None:
    mesh = init_device_mesh(DEVICE, (WORLD,))

    def prepare(model: Model) -> tuple[nn.Module, slice]:
        for layer in (model.up, model.down, model):
            fully_shard(layer, mesh=mesh)
        return model, _MINE

    _assert_trains(prepare)


def tensor_parallel() -> None:
    mesh = init_device_mesh(DEVICE, (WORLD,))
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    _assert_trains(lambda model: (parallelize_module(model, mesh, plan), slice(None)))


def dtensor() -> None:
    mesh = init_device_mesh(DEVICE, (WORLD,))
    a, b = (
        torch.randint(0, 4, size, generator=torch.Generator().manual_seed(SEED)).float() for size in ((4, 6), (6, 4))
    )
    rows, columns = distribute_tensor(here(a), mesh, [Shard(0)]), distribute_tensor(here(b), mesh, [Replicate()])
    product = rows @ columns
    assert_bits(product.full_tensor(), a @ b, "full")
    assert_bits(product.redistribute(mesh, [Shard(1)]).to_local(), (a @ b).chunk(2, 1)[RANK], "shard")
    assert_bits(product.sum().full_tensor(), (a @ b).sum(), "sum")


def what_is_refused() -> None:
    x = here(torch.ones(2))
    only = dist.new_group(backend="cpu:gloo")
    others = dist.new_group(backend="cuda:gloo")
    expect_error(lambda: dist.all_reduce(x, group=others), "FLAGOS-664", "those for cuda", "'cpu:gloo,flagos:flagos'")
    dist.all_reduce(x, group=only)  # gloo has the memory that is the device's
    assert_bits(x, torch.full((2,), 2.0), "cpu:gloo")
    with pytest.raises(ValueError, match="FLAGOS-665"):
        dist.all_gather([torch.zeros(2), here(torch.zeros(2))], x)
    with pytest.raises(TypeError, match="FLAGOS-666"):
        dist.all_reduce(here(torch.ones(2, dtype=torch.bool)), dist.ReduceOp.AVG)
    with pytest.raises((ValueError, RuntimeError)):
        dist.all_gather_into_tensor(here(torch.zeros(3)), x)
    dist.all_reduce(x)
    assert_bits(x, torch.full((2,), 4.0), "afterwards")


def sizes_that_differ() -> None:
    """PyTorch's own check of all peers, which TORCH_DISTRIBUTED_DEBUG=DETAIL turns on."""
    before = dist.get_debug_level()
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    group = dist.new_group(backend="flagos")
    dist.set_debug_level(before)
    x = here(torch.ones(2))
    dist.all_reduce(x, group=group)
    assert_bits(x, torch.full((2,), 2.0), "alike")
    expect_error(lambda: dist.all_reduce(here(torch.ones(2 + RANK)), group=group), "mismatch")


def a_peer_that_is_late() -> None:
    group = dist.new_group()
    if RANK == 0:
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=2), group)  # after all have come together
        patterns = (
            "allreduce_",
            "FLAGOS-505",
            rf"processes \[0, 1\].*group {group.group_name} \(gloo\)",
            "At process 0",
        )
        expect_error(lambda: dist.all_reduce(here(torch.ones(2)), group=group), *patterns)
    dist.barrier()


def a_peer_that_ends() -> None:
    if RANK == 1:
        os._exit(0)
    work = dist.all_reduce(here(torch.ones(2)), async_op=True)
    expect_error(work.wait, "allreduce_", "FLAGOS-504", r"processes \[0, 1\]", "At process 0")
    assert isinstance(work.exception(), RuntimeError)
    expect_error(lambda: work.get_future().wait(), "FLAGOS-504")
    expect_error(lambda: dist.all_reduce(here(torch.ones(2))), "FLAGOS-504")


CHECKS = (
    what_moves_of_every_dtype,
    reductions_of_every_kind,
    coalesced,
    strides_and_sizes,
    works_and_futures,
    works_in_the_order_of_a_stream,
    point_to_point,
    groups_of_every_name,
    functional_collectives,
    distributed_data_parallel,
    fully_sharded,
    tensor_parallel,
    dtensor,
    what_is_refused,
    sizes_that_differ,
    a_peer_that_is_late,
    a_peer_that_ends,
)

if __name__ == "__main__":
    warnings.simplefilter("ignore", FutureWarning)  # names of collectives that newer versions of PyTorch replace
    reason = autoload.enable()
    assert not reason, reason
    dist.init_process_group(
        init_method=os.environ["RENDEZVOUS"], rank=RANK, world_size=WORLD, timeout=timedelta(seconds=60)
    )
    make_checks(CHECKS)
