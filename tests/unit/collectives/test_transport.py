"""Operations of a group that coalesces: what it was given it reads when the last one has begun, and keeps none of."""

from __future__ import annotations

import ctypes

import pytest
import torch

from flagos_backend.collectives.transport import Transport
from flagos_backend.errors import CollectiveFailed
from flagos_backend.ir.opcode import Opcode


class Deferred:
    """A group of one member. ``calls``: how many arrays each call had."""

    def __init__(self) -> None:
        self._begun: list[tuple[int, int, int]] | None = None
        self.calls: list[int] = []

    def _start_coalescing(self) -> None:
        assert self._begun is None
        self._begun = []

    def _end_coalescing(self) -> None:
        begun, self._begun = self._begun, None
        assert begun is not None
        self.calls.append(len(begun))
        for copy in begun:
            ctypes.memmove(*copy)

    def _copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        copy = target.data_ptr(), source.data_ptr(), source.nbytes
        if self._begun is None:
            self.calls.append(1)
            ctypes.memmove(*copy)
        else:
            self._begun.append(copy)

    def _allgather_base(self, target: torch.Tensor, source: torch.Tensor, options: object) -> None:
        if source.numel() == 3:
            raise RuntimeError("three bytes are too few")
        self._copy(target, source)

    def _reduce_scatter_base(self, target: torch.Tensor, source: torch.Tensor, options: object) -> None:
        self._copy(target, source)

    def allreduce(self, arrays: list[torch.Tensor], options: object) -> None:
        self._copy(arrays[0], arrays[0])


@pytest.fixture
def transport() -> Transport:
    return Transport(Deferred(), (0,), 0, "of one", "nccl", "device", coalesces=True)


def arrays() -> list[torch.Tensor]:
    """Of several types and sizes; two that do not lie in one piece, of which a copy has the place of the other's."""
    mixed = [torch.randn(5), torch.randn(0, 4), torch.randn(3, 2, dtype=torch.float64), torch.tensor(2.5)]
    return [torch.randn(64, 48).t(), torch.randn(64, 48).t(), *mixed, torch.randn(7)]


def test_gathers(transport: Transport) -> None:
    given = arrays()
    for array, whole in zip(given, transport.all_gather("c", given), strict=True):
        assert torch.equal(whole, array.unsqueeze(0))
    assert transport.group.calls == [6]


def test_sums(transport: Transport) -> None:
    given = arrays()
    before = [array.clone() for array in given]
    totals = transport.all_reduce("c", given, lambda values: values[0], Opcode.ADD)
    for array, total, expected in zip(given, totals, before, strict=True):
        assert torch.equal(total, expected) and torch.equal(array, expected)
        assert total.numel() == 0 or total.data_ptr() != array.data_ptr()
    assert transport.group.calls == [5, 1]  # each type is one call


def test_parts_of_sums(transport: Transport) -> None:
    given = [array.unsqueeze(0) for array in arrays()]
    parts = transport.reduce_scatter("c", given, lambda values: values[0], Opcode.ADD)
    for array, part in zip(given, parts, strict=True):
        assert torch.equal(part, array[0])


def test_a_start_that_fails_ends_the_call(transport: Transport) -> None:
    few = torch.zeros(3, dtype=torch.uint8)
    with pytest.raises(CollectiveFailed, match="three bytes are too few"):
        transport.all_gather("c", [torch.randn(4), few])
    (whole,) = transport.all_gather("c", [torch.ones(4)])
    assert torch.equal(whole, torch.ones(1, 4)) and transport.group.calls == [1, 1]


def test_a_group_that_does_not_coalesce_gets_one_array() -> None:
    group = Deferred()
    transport = Transport(group, (0,), 0, "of one", "flagcx", "device")
    given = arrays()
    for array, whole in zip(given, transport.all_gather("c", given), strict=True):
        assert torch.equal(whole, array.unsqueeze(0))
    for array, total in zip(given, transport.all_reduce("c", given, lambda v: v[0], Opcode.ADD), strict=True):
        assert torch.equal(total, array)
    assert group.calls == [1, 1, 1]  # of all bytes, and of each type


class Wrong:
    """A group of two whose members have an array each, and whose broadcast brings something else."""

    def _allgather_base(self, target: torch.Tensor, source: torch.Tensor, options: object) -> None:
        target.copy_(torch.cat([source, source + 1]))

    def broadcast(self, arrays: list[torch.Tensor], options: object) -> None:
        arrays[0].fill_(99)


@pytest.mark.parametrize("root", [0, 1])
@pytest.mark.parametrize("shape", [(), (3, 2), (0,)])
def test_a_broadcast_over_more_than_nccl_is_gathered(root: int, shape: tuple[int, ...]) -> None:
    group = Transport(Wrong(), (0, 1), 0, "of two", "flagcx", "device", unlike_nccl="two vendors")
    array = torch.randint(0, 100, shape, dtype=torch.uint8)
    assert torch.equal(group.broadcast("c", array, root), array + root)
