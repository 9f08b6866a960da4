"""The interface through which the devices of one launch talk. Kernels of collectives call it; each transport implements
``exchange`` and overrides the operations that it has natively."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, Protocol

from flagos_backend.ir.opcode import Opcode
from flagos_backend.process.torch_loading import Tensor, torch

# Gets every participant's contribution, in order; returns what each of them takes away, in the same order.
Combine = Callable[[Sequence[Any]], Sequence[Any]]


@dataclass(frozen=True, slots=True)
class Reducer:
    """What a reduction combines two arrays with. ``opcode``: set when ``function`` is one commutative operation on
    both, which a transport may have natively."""

    function: Callable[[Tensor, Tensor], Tensor]
    opcode: Opcode | None = None

    def combine(self, values: Sequence[Tensor]) -> Tensor:
        """All values, combined in order; new storage."""
        total = reduce(self.function, values)
        lent = {value.untyped_storage().data_ptr() for value in values}
        return total.clone() if total.untyped_storage().data_ptr() in lent else total


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """One collective as one participant sees it.

    ``participants`` are flattened ids (replica * num_partitions + partition) in the order that the program gives;
    ``participant`` is this one. ``channel`` names the instruction, alike on every participant; ``channel_id`` is the
    program's own number for it.
    """

    channel: Hashable
    participants: tuple[int, ...]
    participant: int
    channel_id: int | None = None

    @property
    def size(self) -> int:
        return len(self.participants)

    @property
    def rank(self) -> int:
        return self.participants.index(self.participant)


class Places(Protocol):
    """The arrays of a launch that is recorded, which lie somewhere else when the record is repeated."""

    def moves(self, array: Tensor) -> bool:
        """Whether the array is one of them, or a part of one."""
        ...

    def stand_in(self, array: Tensor) -> Tensor | None:
        """What a transport may be given for such an array: dense, of its shape, at an address of its own. What is
        recorded is used only if that address is found in it, and so can be replaced by the array's. None: there is
        none for this array, or another operation has it."""
        ...

    def stands_for(self, result: Tensor, array: Tensor) -> bool:
        """Whether ``result`` lies in what stands in for all of ``array``."""
        ...


class Communicator(ABC):
    """All operations block until every participant of the rendezvous has come, and raise when one of them cannot.

    Results are new storage, the same on every participant bit for bit: reductions combine in one order for all of them.
    Once an operation has returned, nobody reads the arrays that were given to it.

    ``no_recording``: why a device cannot record these operations, to repeat them later without the host, or "".
    """

    no_recording: str = "its devices meet on the host"

    @property
    def native_timeout(self) -> float:
        """Seconds that collectives wait which the native side carries out without this object; 0: there are none."""
        return 0.0

    def recorded(self, places: Places) -> Communicator:
        """For a launch that one device records by itself: nothing waits for another."""
        raise AssertionError(f"nothing is recorded where {self.no_recording}")

    def into(self, output: Tensor) -> Communicator:
        """For one operation with one result, which may be made in ``output``: dense, as large, and nobody else's."""
        return self

    def settled(self, result: Tensor, output: Tensor) -> Tensor:
        """``output``, which has what the operation of ``into`` gave: without a copy where it was made there."""
        return output if result.data_ptr() == output.data_ptr() else output.copy_(result)

    @abstractmethod
    def exchange(self, rendezvous: Rendezvous, contribution: Any, combine: Combine) -> Any:
        """Brings all contributions to one ``combine``, called once in the group, and returns this participant's part.

        Raises CollectiveAborted when another participant failed, CollectiveTimeout when one does not come.
        """

    def all_reduce(self, rendezvous: Rendezvous, arrays: Sequence[Tensor], reducer: Reducer) -> list[Tensor]:
        """Every participant gets the reduction of each array over all of them."""

        def combine(contributions: Sequence[Sequence[Tensor]]) -> list[list[Tensor]]:
            totals = [reducer.combine(column) for column in zip(*contributions, strict=True)]
            return [totals if rank == 0 else [t.clone() for t in totals] for rank in range(rendezvous.size)]

        return list(self.exchange(rendezvous, arrays, combine))

    def all_gather(self, rendezvous: Rendezvous, arrays: Sequence[Tensor], dimension: int) -> list[Tensor]:
        """Each array of all participants, joined along ``dimension`` in the order of ranks."""

        def combine(contributions: Sequence[Sequence[Tensor]]) -> list[list[Tensor]]:
            whole = [torch.cat(column, dim=dimension) for column in zip(*contributions, strict=True)]
            return [whole if rank == 0 else [w.clone() for w in whole] for rank in range(rendezvous.size)]

        return list(self.exchange(rendezvous, arrays, combine))

    def reduce_scatter(
        self, rendezvous: Rendezvous, arrays: Sequence[Tensor], reducer: Reducer, dimension: int
    ) -> list[Tensor]:
        """Each array's reduction, split along ``dimension``: every participant gets the part of its rank."""

        def combine(contributions: Sequence[Sequence[Tensor]]) -> list[list[Tensor]]:
            totals = [reducer.combine(column) for column in zip(*contributions, strict=True)]
            parts = [torch.tensor_split(total, rendezvous.size, dim=dimension) for total in totals]
            return [[part[rank].clone() for part in parts] for rank in range(rendezvous.size)]

        return list(self.exchange(rendezvous, arrays, combine))

    def all_to_all(self, rendezvous: Rendezvous, parts: Sequence[Tensor]) -> list[Tensor]:
        """``parts[i]`` goes to rank i; returns what came, by the sender's rank."""

        def combine(contributions: Sequence[Sequence[Tensor]]) -> list[list[Tensor]]:
            return [[sent[rank].clone() for sent in contributions] for rank in range(rendezvous.size)]

        return list(self.exchange(rendezvous, parts, combine))

    def exchange_along(self, rendezvous: Rendezvous, array: Tensor, dimension: int) -> Tensor:
        """The array's i-th part of ``size`` equal ones along ``dimension`` goes to rank i. Returns what came, joined
        along it by the sender's rank."""
        return torch.cat(self.all_to_all(rendezvous, torch.tensor_split(array, rendezvous.size, dimension)), dimension)

    def permute(
        self, rendezvous: Rendezvous, arrays: Sequence[Tensor], source_of: Sequence[int | None]
    ) -> list[Tensor] | None:
        """Rank r gets the arrays of rank ``source_of[r]``; None when that is None."""

        def combine(contributions: Sequence[Sequence[Tensor]]) -> list[list[Tensor] | None]:
            return [None if s is None else [array.clone() for array in contributions[s]] for s in source_of]

        received = self.exchange(rendezvous, arrays, combine)
        return None if received is None else list(received)

    def broadcast(self, rendezvous: Rendezvous, arrays: Sequence[Tensor]) -> list[Tensor]:
        """Every participant gets the arrays of rank 0."""
        received = self.permute(rendezvous, arrays, [0] * rendezvous.size)
        assert received is not None
        return received
