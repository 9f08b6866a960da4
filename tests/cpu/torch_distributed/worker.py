"""One of three processes: PyTorch eager, or the same model in one process, is the oracle."""

from __future__ import annotations

import copy
import functools
import os
import time
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.utils._pytree import tree_leaves

from flagos_backend.frontends.torch import autoload
from flagos_backend.frontends.torch.compile import report
from support.processes import expect_error, make_checks

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
SEED = int(os.environ["FLAGOS_TEST_SEED"]) % 2**31


def generator(rank: int | None = None) -> torch.Generator:
    """Alike in all processes without a rank."""
    return torch.Generator().manual_seed(SEED + (0 if rank is None else rank + 1))


def compiled(function: Callable[..., Any], **arguments: Any) -> Callable[..., Any]:
    torch._dynamo.reset()
    report.clear()
    return torch.compile(function, backend="flagos", **arguments)


def reported(field: str) -> Counter[str]:
    """Operators of all programs since the last ``compiled``, by name."""
    counts: Counter[str] = Counter()
    for each in report.reports():
        counts.update(getattr(each, field))
    return Counter({name.removesuffix(".default").removeprefix("_c10d_functional."): n for name, n in counts.items()})


def assert_as_eager(function: Callable[..., Any], *inputs: Any) -> None:
    got = compiled(function, fullgraph=True)(*inputs)
    want = [collectives.wait_tensor(leaf) for leaf in tree_leaves(function(*inputs))]
    for a, b in zip(tree_leaves(got), want, strict=True):
        torch.testing.assert_close(a, b)


def every_collective_is_part_of_the_program() -> None:
    group = dist.group.WORLD
    x = torch.randn(2 * WORLD, 4, generator=generator(RANK))

    def function(x: Tensor) -> list[Tensor]:
        total = collectives.all_reduce(x * 2, "sum", group)
        gathered = collectives.all_gather_tensor(total + x, 0, group)
        return [
            total,
            gathered,
            collectives.all_gather_tensor(x, 1, group),
            collectives.reduce_scatter_tensor(gathered, "sum", 0, group),
            collectives.all_to_all_single(x, None, None, group),
            *(collectives.broadcast(x, source, group) for source in range(WORLD)),
        ]

    assert_as_eager(function, x)
    assert not reported("outside")
    lowered = reported("lowered")
    assert lowered["broadcast"] == WORLD
    assert lowered["all_gather_into_tensor"] == 2
    assert lowered["all_reduce"] == lowered["reduce_scatter_tensor"] == lowered["all_to_all_single"] == 1

    scalar = compiled(lambda x: collectives.all_gather_tensor(x, 0, group), fullgraph=True)
    assert scalar(torch.tensor(float(RANK))).tolist() == list(range(WORLD))  # gloo's own takes no scalars

    def in_place(x: Tensor) -> Tensor:
        dist.all_reduce(x, op=dist.ReduceOp.MAX)
        return x + 1

    got, want = x.clone(), x.clone()
    torch.testing.assert_close(compiled(in_place, fullgraph=True)(got), in_place(want))
    torch.testing.assert_close(got, want)
    assert not reported("outside")


_REDUCTIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": torch.add,
    "product": torch.mul,
    "min": torch.minimum,
    "max": torch.maximum,
    "band": torch.bitwise_and,
    "bor": torch.bitwise_or,
    "bxor": torch.bitwise_xor,
}
_INTEGERS = (torch.uint8, torch.int16, torch.int64)
_FLOATS = (torch.float16, torch.bfloat16, torch.float64)


def reductions_of_many_dtypes() -> None:
    """Whole numbers, so that every order gives the same; averages of them are compared within rounding."""
    group = dist.group.WORLD
    cases = [(dtype, name) for dtype in _INTEGERS for name in _REDUCTIONS]
    cases += [(dtype, name) for dtype in _FLOATS for name in ("sum", "product", "min", "max", "avg")]
    cases += [(torch.complex64, "sum"), (torch.complex128, "product")]
    given = [[torch.randint(0, 5, (7,), generator=generator(r)).to(dtype) for dtype, _ in cases] for r in range(WORLD)]

    def function(tensors: list[Tensor]) -> list[Tensor]:
        return [collectives.all_reduce(x, name, group) for x, (_, name) in zip(tensors, cases, strict=True)]

    got = compiled(function, fullgraph=True)(given[RANK])
    for (dtype, name), a, column in zip(cases, got, zip(*given, strict=True), strict=True):
        want = functools.reduce(_REDUCTIONS["sum" if name == "avg" else name], column)
        if name == "avg":
            want = (want.double() / WORLD).to(dtype)
        torch.testing.assert_close(a, want, msg=lambda text, case=f"{name} of {dtype}": f"{case}: {text}")
    assert reported("lowered")["all_reduce"] == len(cases)
    assert not reported("outside")


def coalesced_collectives() -> None:
    """Of several dtypes, which gloo's own are not; the oracle is each by itself."""
    group = dist.group.WORLD
    x = torch.randn(WORLD, 4, generator=generator(RANK))
    inputs = [x, x[:, 0].double(), x.sum(1)]

    def function(inputs: list[Tensor]) -> list[Tensor]:
        return [
            *collectives.all_reduce_coalesced(inputs, "sum", group),
            *collectives.all_gather_into_tensor_coalesced(inputs, group),
            *collectives.reduce_scatter_tensor_coalesced(inputs, "sum", [0, 0, 0], group),
        ]

    got = compiled(function, fullgraph=True)(inputs)
    want = [collectives.all_reduce(x, "sum", group) for x in inputs]
    want += [collectives.all_gather_tensor(x, 0, group) for x in inputs]
    want += [collectives.reduce_scatter_tensor(x, "sum", 0, group) for x in inputs]
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, collectives.wait_tensor(b))
    lowered = reported("lowered")
    assert {name: n for name, n in lowered.items() if "coalesced" in name} == {
        "all_reduce_coalesced": 1,
        "all_gather_into_tensor_coalesced": 1,
        "reduce_scatter_tensor_coalesced": 1,
    }
    assert not reported("outside")


def parts_of_different_sizes_are_called_back() -> None:
    group = dist.group.WORLD
    sent = [rank + 1 for rank in range(WORLD)]
    x = torch.randn(sum(sent), 2, generator=generator(RANK))

    def function(x: Tensor) -> Tensor:
        return collectives.all_to_all_single(x * 2, [RANK + 1] * WORLD, sent, group) + 1

    assert_as_eager(function, x)
    assert reported("outside") == {"all_to_all_single": 1}


def collectives_in_subgroups() -> None:
    """In the first, the order of ranks is not that of the processes."""
    for ranks in ([2, 0], [1, 2]):
        group = dist.new_group(ranks, sort_ranks=False) if ranks == [2, 0] else dist.new_group(ranks)
        if RANK not in ranks:
            continue

        def function(x: Tensor, group: Any = group) -> list[Tensor]:
            gathered = collectives.all_gather_tensor(x, 0, group)
            return [gathered, collectives.broadcast(x, 1, group), collectives.all_reduce(x, "sum", group)]

        assert_as_eager(function, torch.randn(3, generator=generator(RANK)))
        assert not reported("outside")
    dist.barrier()


def a_result_that_only_one_process_uses() -> None:
    """The others come to it all the same."""
    group = dist.group.WORLD

    def function(x: Tensor) -> Tensor:
        total = collectives.wait_tensor(collectives.all_reduce(x, "sum", group))
        return total + 1 if RANK == 0 else x - 1

    x = torch.full((3,), float(RANK))
    got = compiled(function, fullgraph=True)(x)
    assert got.tolist() == [sum(range(WORLD)) + 1.0 if RANK == 0 else RANK - 1.0] * 3
    assert reported("lowered")["all_reduce"] == 1


def tensors_of_the_device() -> None:
    group = dist.group.WORLD
    x = torch.randn(5, generator=generator(RANK))
    got = compiled(lambda x: collectives.all_reduce(x * 2, "sum", group), fullgraph=True)(x.to("flagos"))
    assert got.device.type == "flagos"
    want = sum(torch.randn(5, generator=generator(rank)) * 2 for rank in range(WORLD))
    torch.testing.assert_close(got.cpu(), want)


class _Copy(torch.autograd.Function):
    """The same on all processes; its gradient is the sum of theirs."""

    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return collectives.all_reduce(gradient, "sum", dist.group.WORLD)


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        return collectives.all_reduce(x, "sum", dist.group.WORLD)

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient


def _mlp_weights() -> tuple[Tensor, Tensor, Tensor]:
    own, width = generator(), 2 * WORLD
    sizes = ((2 * WORLD, 8), (width, 8), (4, width))
    x, up, down = (torch.randn(size, dtype=torch.float64, generator=own) for size in sizes)
    return x, up, down


def tensor_parallel_mlp() -> None:
    """Megatron's: the first weight split by rows, the second by columns, in float64."""
    whole = [tensor.requires_grad_() for tensor in _mlp_weights()]
    x, up, down = (tensor.detach() for tensor in whole)
    mine = [x.clone(), up.chunk(WORLD)[RANK].clone(), down.chunk(WORLD, 1)[RANK].clone()]
    x, up, down = (tensor.requires_grad_() for tensor in mine)

    def mlp(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
        return _Sum.apply(F.gelu(_Copy.apply(x) @ up.T) @ down.T).square().sum()

    loss = compiled(mlp, fullgraph=True)(x, up, down)
    loss.backward()
    expected = (F.gelu(whole[0] @ whole[1].T) @ whole[2].T).square().sum()
    expected.backward()
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(x.grad, whole[0].grad)
    torch.testing.assert_close(up.grad, whole[1].grad.chunk(WORLD)[RANK])
    torch.testing.assert_close(down.grad, whole[2].grad.chunk(WORLD, 1)[RANK])
    assert reported("lowered")["all_reduce"] == 2  # one forward, one backward
    assert not reported("outside")


def sequence_parallel_mlp() -> None:
    """Rows gathered before and scattered after, by the collectives that PyTorch itself derives."""
    whole = [tensor.requires_grad_() for tensor in _mlp_weights()]
    mine = [whole[0].detach().chunk(WORLD)[RANK], whole[1].detach().chunk(WORLD)[RANK]]
    mine += [whole[2].detach().chunk(WORLD, 1)[RANK]]
    x, up, down = (tensor.clone().requires_grad_() for tensor in mine)
    group = dist.group.WORLD

    def mlp(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
        rows = collectives.all_gather_tensor_autograd(x, 0, group)
        return collectives.reduce_scatter_tensor_autograd(F.gelu(rows @ up.T) @ down.T, "sum", 0, group).square().sum()

    compiled(mlp, fullgraph=True)(x, up, down).backward()
    (F.gelu(whole[0] @ whole[1].T) @ whole[2].T).square().sum().backward()
    torch.testing.assert_close(x.grad, whole[0].grad.chunk(WORLD)[RANK])
    torch.testing.assert_close(up.grad, whole[1].grad.chunk(WORLD)[RANK])
    torch.testing.assert_close(down.grad, whole[2].grad.chunk(WORLD, 1)[RANK])
    lowered = reported("lowered")
    assert lowered["all_gather_into_tensor"] == lowered["reduce_scatter_tensor"] == 2
    assert not reported("outside")


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


def _model() -> tuple[Model, Model, Tensor, Tensor]:
    """A model, the same in float64, and a batch of all processes."""
    torch.manual_seed(SEED)
    model = Model()
    return model, copy.deepcopy(model).double(), torch.randn(6 * WORLD, 8), torch.randn(6 * WORLD, 4)


def _train(while_training: Callable[[], AbstractContextManager[None]]) -> None:
    model, reference, x, y = _model()
    step = compiled(nn.parallel.DistributedDataParallel(model))
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, reference)]
    mine = slice(6 * RANK, 6 * RANK + 6)
    with while_training():
        for _ in range(2):
            optimizers[0].zero_grad()
            F.mse_loss(step(x[mine]), y[mine]).backward()
            optimizers[0].step()
    for _ in range(2):
        optimizers[1].zero_grad()
        F.mse_loss(reference(x.double()), y.double()).backward()
        optimizers[1].step()
    for a, b in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-5)
    assert report.reports()
    assert not reported("outside")


def distributed_data_parallel() -> None:
    """Its own reducer runs beside the programs."""
    _train(nullcontext)


def distributed_data_parallel_with_reductions_in_the_graph() -> None:
    with torch._dynamo.config.patch(optimize_ddp="python_reducer"):
        _train(lambda: torch._dynamo.compiled_autograd._enable(torch.compile(backend="flagos")))
    assert reported("lowered")["all_reduce"] >= 4  # one for each parameter


def fully_sharded_blocks() -> None:
    """FSDP2's own collectives go around the compiled blocks."""
    model, reference, x, y = _model()
    torch._dynamo.reset()
    report.clear()
    mesh = init_device_mesh("cpu", (WORLD,))
    for layer in (model.up, model.down):
        fully_shard(layer, mesh=mesh)
        layer.forward = torch.compile(layer.forward, backend="flagos")
    fully_shard(model, mesh=mesh)
    mine = slice(6 * RANK, 6 * RANK + 6)
    F.mse_loss(model(x[mine]), y[mine]).backward()
    F.mse_loss(reference(x.double()), y.double()).backward()
    for a, b in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(a.grad.full_tensor().double(), b.grad, rtol=1e-4, atol=1e-5)  # type: ignore[attr-defined]
    assert len(report.reports()) == 4  # forward and backward of both


def dtensor() -> None:
    mesh = init_device_mesh("cpu", (WORLD,))
    a, b = (torch.randn(size, generator=generator()) for size in ((2 * WORLD, 6), (6, 4)))

    def function(a: Any, b: Any) -> Any:
        return (a @ b).redistribute(mesh, [Replicate()]).sum(0)

    got = compiled(function, fullgraph=True)(
        distribute_tensor(a, mesh, [Shard(0)]), distribute_tensor(b, mesh, [Replicate()])
    )
    torch.testing.assert_close(got.to_local(), (a @ b).sum(0))
    assert reported("lowered")["all_gather_into_tensor"] == 1
    assert not reported("outside")


def a_group_that_is_gone() -> None:
    group = dist.new_group([0, 1, 2])
    # A default argument is no global that Dynamo would watch.
    step = compiled(lambda x, group=group: collectives.all_reduce(x, "sum", group), fullgraph=True)
    assert step(torch.ones(2)).tolist() == [3, 3]
    name = group.group_name
    dist.destroy_process_group(group)
    expect_error(lambda: step(torch.ones(2)), "FLAGOS-506", f"'{name}'", "%all-reduce")


def a_peer_that_hangs() -> None:
    """Process 2 does not come: the group's own timeout counts."""
    group = dist.new_group([0, 1, 2], timeout=timedelta(seconds=2))
    step = compiled(lambda x: collectives.all_reduce(x, "sum", group), fullgraph=True)
    assert step(torch.ones(2)).tolist() == [3, 3]
    dist.barrier()
    if RANK == 2:
        time.sleep(3)
        return
    patterns = ("FLAGOS-505", r"among the processes \[0, 1, 2\]", f"group {group.group_name}", f"At process {RANK}")
    expect_error(lambda: step(torch.ones(2)), "%all-reduce", *patterns)


def a_peer_that_ends() -> None:
    group = dist.group.WORLD
    step = compiled(lambda x: collectives.all_reduce(x, "sum", group), fullgraph=True)
    assert step(torch.ones(2)).tolist() == [3, 3]
    if RANK == 2:
        os._exit(0)
    expect_error(lambda: step(torch.ones(2)), "FLAGOS-504", "%all-reduce", r"among the processes \[0, 1, 2\]")


CHECKS = (
    every_collective_is_part_of_the_program,
    reductions_of_many_dtypes,
    coalesced_collectives,
    parts_of_different_sizes_are_called_back,
    collectives_in_subgroups,
    a_result_that_only_one_process_uses,
    tensors_of_the_device,
    tensor_parallel_mlp,
    sequence_parallel_mlp,
    distributed_data_parallel,
    distributed_data_parallel_with_reductions_in_the_graph,
    fully_sharded_blocks,
    dtensor,
    a_group_that_is_gone,
    a_peer_that_hangs,
    a_peer_that_ends,
)

if __name__ == "__main__":
    reason = autoload.enable()
    assert not reason, reason
    # Whoever waits for a process that failed a check does not wait for long.
    rendezvous: Any = {"init_method": os.environ["RENDEZVOUS"], "rank": RANK, "world_size": WORLD}
    dist.init_process_group("gloo", timeout=timedelta(seconds=60), **rendezvous)
    make_checks(CHECKS)
