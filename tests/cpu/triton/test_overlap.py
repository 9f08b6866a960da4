"""Collectives that have not ended when what comes behind them runs: plans wait for what they use, and write over
nothing that is still read. The oracle is the same plan over collectives that end at once."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

from flagos_backend.codegen.triton import schedule
from flagos_backend.collectives.communicator import Combine, Rendezvous
from flagos_backend.compile import accelerator_plan as plan
from flagos_backend.compile import overlap
from flagos_backend.compile.overlap import Wait, overlapped
from flagos_backend.devices.target import Target
from flagos_backend.ir.effects import COLLECTIVES
from flagos_backend.ir.hlo import Instruction, Module
from flagos_backend.kernels.reference.registry import Run
from flagos_backend.loop_ir.flat import flatten
from flagos_backend.loop_ir.region import Region
from support.square_programs import DEVICES, Alike, Square

TARGET = Target("cpu", vendor="simulated", architecture="host", multiprocessors=2, warp_size=1)
S = Square(8)
SIZE = S.size


class Late(Alike):
    """What is started has its results when it is waited for, of what its operands have by then: garbage until then,
    something else if they are written over, and an error if their memory is gone. ``most``: how many were under way at
    once."""

    def __init__(self) -> None:
        self._begun: list[Callable[[], None]] = []
        self._under_way: dict[Instruction, tuple[Sequence[Any], list[Callable[[], None]]]] = {}
        self.most = 0

    def exchange(self, rendezvous: Rendezvous, contribution: Any, combine: Combine) -> Any:
        results = super().exchange(rendezvous, contribution, combine)
        # Nobody but who started it has them.
        lent = [StorageWeakRef(array.untyped_storage()) for array in contribution]
        shapes = [(array.dtype, array.shape, array.stride(), array.storage_offset()) for array in contribution]

        def arrive() -> None:
            assert not any(storage.expired() for storage in lent), "an operand is gone"
            storages = [torch.UntypedStorage._new_with_weak_ptr(storage.cdata) for storage in lent]
            operands = [
                torch.empty(0, dtype=dtype).set_(storage, offset, shape, stride)
                for storage, (dtype, shape, stride, offset) in zip(storages, shapes, strict=True)
            ]
            ended = super(Late, self).exchange(rendezvous, operands, combine)
            for result, array in zip(tree_leaves(results), tree_leaves(ended), strict=True):
                result.copy_(array)

        for result in tree_leaves(results):
            result.fill_(torch.nan)
        self._begun.append(arrive)
        return results

    @contextlib.contextmanager
    def started(self, collective: Instruction, operands: Sequence[Any]) -> Iterator[None]:
        yield
        assert collective not in self._under_way
        self._under_way[collective], self._begun = (operands, self._begun), []
        self.most = max(self.most, len(self._under_way))

    def wait(self, collective: Instruction) -> None:
        assert collective in self._under_way, "it is waited for once"
        while collective in self._under_way:
            _, begun = self._under_way.pop(next(iter(self._under_way)))
            for arrive in begun:
                arrive()

    def wait_for_all(self) -> None:
        assert not self._under_way, "a whole plan has waited for all"


def items_of(module: Module) -> tuple[Region | Instruction | Wait, ...]:
    flat = flatten(module.entry)
    return overlapped(flat, schedule(flat, TARGET))


def run_both(module: Module, rng: np.random.Generator, donated: Sequence[int] = ()) -> Late:
    """The same results late and at once."""
    built = plan.build(module.entry, donated, torch.device("cpu"), TARGET)
    arguments = [rng.standard_normal((SIZE, SIZE)).astype(np.float32) for _ in module.entry.parameters]
    late, results = Late(), []
    for communicator, communication in ((Alike(), None), (late, late)):
        run = Run(num_partitions=DEVICES, communicator=communicator, communication=communication)
        with torch.inference_mode():
            # Aligned as a device's memory is, or a step would copy what it is to write over.
            taken = [torch.empty(SIZE, SIZE).copy_(torch.from_numpy(array)) for array in arguments]
            results.append(built.run(run, taken))
    late.wait_for_all()
    for ours, expected in zip(*results, strict=True):
        torch.testing.assert_close(ours, expected, rtol=0, atol=0)
        assert ours.isfinite().all()
    return late


def names(items: Sequence[Region | Instruction | Wait]) -> list[str]:
    """Waits as "wait x y", collectives and other calls by name, regions by what they make first."""
    found = []
    for item in items:
        if isinstance(item, Wait):
            found.append(" ".join(["wait", *(c.name for c in item.collectives)]))
        else:
            found.append(item.stores[0].target.name if isinstance(item, Region) else item.name)
    return found


def test_what_does_not_wait_comes_between(rng: np.random.Generator) -> None:
    """A gradient's sum while the next one is computed."""
    module = S.two_sums()
    assert names(items_of(module)) == ["d", "s", "e", "t", "wait s t"]
    assert run_both(module, rng).most == 2


def test_what_is_needed_comes_first(rng: np.random.Generator) -> None:
    """``e`` is between the collectives, and the second one does not need it; ``f`` is behind the wait for it."""
    module = S.module(
        f"""s = {S.total("x", 1)}
        d = {S.product("s", "y")}
        e = {S.product("d", "d")}
        t = {S.total("d", 2)}
        g = {S.product("t", "y")}
        f = {S.product("x", "y")}
        ROOT r = ({S.shape}, {S.shape}, {S.shape}) tuple(e, g, f)""",
        "xy",
    )
    assert names(items_of(module)) == ["s", "f", "wait s", "d", "t", "e", "wait t", "g"]
    run_both(module, rng)


def test_weights_are_gathered_early_but_not_all_at_once(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    layers = "\n".join(
        f"""g{n} = {S.gather(f"w{n}", n + 1)}
        h{n} = f32[{SIZE},{2 * SIZE}] dot(x{n}, g{n}), lhs_contracting_dims={{1}}, rhs_contracting_dims={{1}}
        x{n + 1} = {S.shape} slice(h{n}), slice={{[0:{SIZE}], [0:{SIZE}]}}"""
        for n in range(5)
    )
    module = S.module(f"{layers}\n ROOT r = {S.shape} tanh(x5)", ["x0", *(f"w{n}" for n in range(5))])
    order = names(items_of(module))
    starts = [name for name in order if name.startswith("g")]
    assert starts == [f"g{n}" for n in range(5)]
    assert order.index("g2") < order.index("wait g1") and order.index("wait g0") < order.index("g3")
    assert run_both(module, rng).most == 3
    monkeypatch.setattr(overlap, "AHEAD", 5)
    assert run_both(module, rng).most == overlap.UNDER_WAY
    monkeypatch.setattr(overlap, "UNDER_WAY", 1)
    assert run_both(module, rng).most == 1


@pytest.mark.parametrize("donated", [(), (0, 1)])
def test_nothing_is_written_over_that_is_read(donated: Sequence[int], rng: np.random.Generator) -> None:
    """``e`` could be written over ``d``, and ``u`` over ``x``, once they have been sent."""
    module = S.module(
        f"""d = {S.product("x", "y")}
        s = {S.total("d", 1)}
        e = {S.shape} exponential(d)
        g = {S.gather("x", 2)}
        z = s32[] constant(0)
        row = f32[1,{SIZE}] slice(y), slice={{[0:1], [0:{SIZE}]}}
        u = {S.shape} dynamic-update-slice(x, row, z, z)
        ROOT r = ({S.shape}, {S.shape}, f32[{2 * SIZE},{SIZE}], {S.shape}) tuple(s, e, g, u)
        """,
        "xy",
    )
    run_both(module, rng, donated)


def test_an_array_is_read_before_it_is_updated() -> None:
    """Which the collective needs, and ``d`` it does not."""
    module = S.module(
        f"""d = {S.product("x", "y")}
        z = s32[] constant(0)
        row = f32[1,{SIZE}] slice(y), slice={{[0:1], [0:{SIZE}]}}
        new = {S.shape} dynamic-update-slice(x, row, z, z)
        s = {S.total("new", 1)}
        ROOT r = ({S.shape}, {S.shape}, {S.shape}) tuple(d, s, new)""",
        "xy",
    )
    explained = plan.build(module.entry, (0,), torch.device("cpu"), TARGET).explain()
    assert " over #" in explained and "copy of" not in explained


def test_what_is_sent_stays_though_its_reader_has_another_copy(rng: np.random.Generator) -> None:
    """Regions read dense arrays: one that is not, as a solution by columns, is copied for all who read it later."""
    module = S.module(
        f"""d = {S.shape} triangular-solve(x, y), left_side=true, lower=true, transpose_a=NO_TRANSPOSE
        s = {S.total("d", 1)}
        e = {S.shape} tanh(d)
        w = {S.product("e", "e")}
        ROOT r = ({S.shape}, {S.shape}) tuple(w, s)""",
        "xy",
    )
    assert names(items_of(module)) == ["d", "s", "e", "w", "wait s"]
    run_both(module, rng)


def test_without_collectives_the_order_stays() -> None:
    module = S.module(f"d = {S.product('x', 'y')}\n ROOT r = {S.shape} tanh(d)", "xy")
    flat = flatten(module.entry)
    found = schedule(flat, TARGET)
    assert overlapped(flat, found) == found.items


@pytest.mark.parametrize("case", range(12))
def test_programs_of_chance(case: int, rng: np.random.Generator) -> None:
    module = S.module_of_chance(rng)
    order = [i.name for i in module.entry.instructions if i.opcode in COLLECTIVES]
    started = [order.index(name) for name in names(items_of(module)) if name in order]
    assert all(a < b for a, b in pairwise(started)) and len(started) == len(order)
    run_both(module, rng, (0, 1))
