"""Communicator for launches whose devices do not all share memory. Host devices of one process do: they meet in it,
and one of them deals with the others. An accelerator deals for itself. Between in_process.py and transport.py."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Protocol, TypeVar

from flagos_backend.collectives import nccl
from flagos_backend.collectives.communicator import Combine, Communicator, Places, Reducer, Rendezvous
from flagos_backend.collectives.in_process import InProcessCommunicator
from flagos_backend.collectives.transport import Room, Transport, as_bytes, from_bytes, joined
from flagos_backend.process.torch_loading import Tensor, torch

Arrays = Sequence[Tensor]
Value = TypeVar("Value")

# Of so many members a collective of one array is one kernel, whose parameters say where it lies.
MOST_LENT_TO: Final = 16


class Peers(Protocol):
    """The members of a launch: what a transport tells apart. A process of host devices is one, with all of its
    participants; each accelerator is one of its own."""

    def process_of(self, participant: int) -> int:
        """The process that runs a participant."""
        ...

    def member_of(self, participant: int) -> int:
        """The member that a participant belongs to."""
        ...

    def transport(self, rendezvous: Rendezvous) -> Transport:
        """What moves arrays among the members of a rendezvous, for the caller's. Raises an error of the catalogue when
        nothing does."""
        ...

    @property
    def no_recording(self) -> str:
        """As of Communicator."""
        ...

    def check(self, rendezvous: Rendezvous) -> None:
        """Before a device of this process enqueues what was recorded of ``rendezvous``. Raises an error of the
        catalogue when it would wait for others in vain."""
        ...

    def launched(self, rendezvous: Rendezvous) -> None:
        """It did."""
        ...

    def abort(self, reason: str) -> None:
        """A launch failed in this process: the others must not wait for it."""
        ...


@dataclass(frozen=True, slots=True)
class _Party:
    """A rendezvous, seen by member. ``ranks[r]``: the ranks that member r of the transport has."""

    rendezvous: Rendezvous
    transport: Transport
    ranks: tuple[tuple[int, ...], ...]

    @property
    def own(self) -> tuple[int, ...]:
        return self.ranks[self.transport.rank]

    @property
    def order(self) -> list[int]:
        """The ranks by member."""
        return [rank for ranks in self.ranks for rank in ranks]

    @property
    def is_even(self) -> bool:
        return len({len(ranks) for ranks in self.ranks}) == 1

    @property
    def is_regular(self) -> bool:
        """Whether what the members hold one after another is in the order of ranks, and as much for each."""
        return self.is_even and self.order == sorted(self.order)


# Gets the contributions of this member's participants, in order; returns what each of them takes away.
Across = Callable[[_Party, Sequence[Arrays]], Sequence[Any]]


class MultiProcessCommunicator(Communicator):
    """One object serves one launch. Reductions combine each member's arrays in the order of ranks, then totals."""

    def __init__(self, peers: Peers, places: Places | None = None) -> None:
        """``places``: of a launch that is recorded."""
        self._peers = peers
        self._local = InProcessCommunicator()
        self._places = places
        self._output: Tensor | None = None

    @property
    def no_recording(self) -> str:  # type: ignore[override]
        return self._peers.no_recording

    def recorded(self, places: Places) -> MultiProcessCommunicator:
        return MultiProcessCommunicator(self._peers, places)

    def into(self, output: Tensor) -> MultiProcessCommunicator:
        """The same launch."""
        other = copy.copy(self)
        other._output = output
        return other

    def settled(self, result: Tensor, output: Tensor) -> Tensor:
        if self._places is not None and self._places.stands_for(result, output):
            return output
        return super().settled(result, output)

    def of_process(self, rendezvous: Rendezvous, value: Value) -> list[Value]:
        """What each participant that this process runs says, by rank; every one of them has to."""
        here = self._of_process(rendezvous)
        said: list[Value] = self._local.exchange(here, value, lambda values: [list(values)] * len(values))
        return said

    def begin_together(self, rendezvous: Rendezvous, begin: Callable[[], None]) -> None:
        """``begin`` enqueues what was recorded of the rendezvous. What the devices of a process enqueue waits for that
        of the others: none begins before all have come, and none goes on before all have begun."""
        here = self._of_process(rendezvous)
        self._peers.check(rendezvous)
        if here.size > 1:
            self._local.barrier(here)
        begin()
        self._peers.launched(rendezvous)
        if here.size > 1:
            self._local.barrier(here)

    def _of_process(self, rendezvous: Rendezvous) -> Rendezvous:
        process = self._peers.process_of(rendezvous.participant)
        here = tuple(p for p in rendezvous.participants if self._peers.process_of(p) == process)
        return replace(rendezvous, participants=here)

    def abort(self, code: int, message: str) -> None:
        """Fails this launch: for the participants of this process, and through its peers for the others."""
        self._local.abort(code, message)
        self._peers.abort(message)

    def exchange(self, rendezvous: Rendezvous, contribution: Any, combine: Combine) -> Any:
        """Contributions are sequences of arrays, equal in shape for all participants; every member combines them."""
        members = self._members(rendezvous)
        if members is None:
            return self._local.exchange(rendezvous, contribution, combine)

        def across(party: _Party, mine: Sequence[Arrays]) -> list[Any]:
            every = combine(_gather(party, mine))
            return [every[rank] for rank in party.own]

        return self._meet(rendezvous, members, contribution, across)

    def all_reduce(self, rendezvous: Rendezvous, arrays: Arrays, reducer: Reducer) -> list[Tensor]:
        members = self._members(rendezvous)
        if members is None:
            return self._local.all_reduce(rendezvous, arrays, reducer)

        def across(party: _Party, mine: Sequence[Arrays]) -> list[list[Tensor]]:
            arrays, transport = _reduction(mine, reducer), party.transport
            totals = transport.all_reduce(party.rendezvous.channel, arrays, reducer.combine, reducer.opcode)
            return [totals if i == 0 else [total.clone() for total in totals] for i in range(len(mine))]

        def copies(transport: Transport, array: Tensor) -> bool:
            return transport.copies(array, reducer.opcode)

        return list(self._meet(rendezvous, members, arrays, across, copies))

    def all_gather(self, rendezvous: Rendezvous, arrays: Arrays, dimension: int) -> list[Tensor]:
        members = self._members(rendezvous)
        if members is None:
            return self._local.all_gather(rendezvous, arrays, dimension)

        def across(party: _Party, mine: Sequence[Arrays]) -> list[list[Tensor]]:
            whole = _gather_joined(party, mine, dimension)
            return [whole if i == 0 else [array.clone() for array in whole] for i in range(len(mine))]

        return list(self._meet(rendezvous, members, arrays, across))

    def reduce_scatter(self, rendezvous: Rendezvous, arrays: Arrays, reducer: Reducer, dimension: int) -> list[Tensor]:
        members = self._members(rendezvous)
        if members is None:
            return self._local.reduce_scatter(rendezvous, arrays, reducer, dimension)

        def across(party: _Party, mine: Sequence[Arrays]) -> list[list[Tensor]]:
            parts = _scatter(party, _reduction(mine, reducer), reducer, dimension)
            # What several share would keep the memory of all.
            return [[part[i].clone() if len(mine) > 1 else part[i] for part in parts] for i in range(len(mine))]

        return list(self._meet(rendezvous, members, arrays, across))

    def all_to_all(self, rendezvous: Rendezvous, parts: Arrays) -> list[Tensor]:
        members = self._members(rendezvous)
        if members is None:
            return self._local.all_to_all(rendezvous, parts)
        routes = [(sender, receiver) for sender in range(rendezvous.size) for receiver in range(rendezvous.size)]

        def across(party: _Party, mine: Sequence[Arrays]) -> list[list[Tensor]]:
            sent = dict(zip(party.own, mine, strict=True))
            came = _route(party, routes, lambda sender, receiver: [sent[sender][receiver]], parts[:1])
            return [[came[sender, rank][0] for sender in range(rendezvous.size)] for rank in party.own]

        return list(self._meet(rendezvous, members, parts, across))

    def exchange_along(self, rendezvous: Rendezvous, array: Tensor, dimension: int) -> Tensor:
        members = self._members(rendezvous)
        if members is None or members != sorted(set(members)):
            return super().exchange_along(rendezvous, array, dimension)

        def across(party: _Party, mine: Sequence[Arrays]) -> list[Tensor]:
            return [party.transport.exchange(rendezvous.channel, mine[0][0])]

        parts = _in_parts(array, rendezvous.size, dimension)
        received: Tensor = self._meet(rendezvous, members, [parts], across)
        return received.reshape(array.shape) if dimension == 0 else torch.cat(received.unbind(), dim=dimension)

    def permute(self, rendezvous: Rendezvous, arrays: Arrays, source_of: Sequence[int | None]) -> list[Tensor] | None:
        members = self._members(rendezvous)
        if members is None:
            return self._local.permute(rendezvous, arrays, source_of)
        routes = [(source, rank) for rank, source in enumerate(source_of) if source is not None]

        def across(party: _Party, mine: Sequence[Arrays]) -> list[list[Tensor] | None]:
            sent = dict(zip(party.own, mine, strict=True))
            came = _route(party, routes, lambda sender, _: sent[sender], arrays)
            sources = [source_of[rank] for rank in party.own]
            return [None if s is None else came[s, rank] for s, rank in zip(sources, party.own, strict=True)]

        received = self._meet(rendezvous, members, arrays, across)
        return None if received is None else list(received)

    def broadcast(self, rendezvous: Rendezvous, arrays: Arrays) -> list[Tensor]:
        members = self._members(rendezvous)
        if members is None:
            return self._local.broadcast(rendezvous, arrays)

        def across(party: _Party, mine: Sequence[Arrays]) -> list[list[Tensor]]:
            root = next(member for member, ranks in enumerate(party.ranks) if 0 in ranks)
            given = mine[party.own.index(0)] if root == party.transport.rank else mine[0]
            received = [party.transport.broadcast(rendezvous.channel, array, root) for array in given]
            return [received if i == 0 else [array.clone() for array in received] for i in range(len(mine))]

        return list(self._meet(rendezvous, members, arrays, across))

    def _members(self, rendezvous: Rendezvous) -> list[int] | None:
        """The member of each participant; None when all are of one."""
        members = [self._peers.member_of(participant) for participant in rendezvous.participants]
        return members if len(set(members)) > 1 else None

    def _meet(
        self,
        rendezvous: Rendezvous,
        members: Sequence[int],
        contribution: Any,
        across: Across,
        copies: Callable[[Transport, Tensor], bool] = lambda transport, array: False,
    ) -> Any:
        """``across`` is called by one participant of each member, for all of its participants. ``copies``: whether it
        copies an array before the transport sees it."""

        def combine(mine: Sequence[Any], meet: Callable[[], None] = lambda: None) -> Sequence[Any]:
            transport = replace(self._peers.transport(rendezvous), meet=meet)
            if self._output is not None and len(mine) == 1:
                transport = replace(transport, room=Room(self._in_place_of(self._output, transport)))
            if self._places is not None:
                if transport.unlike_nccl:
                    raise RuntimeError(transport.unlike_nccl)  # it would begin now what is only recorded
                reduces = nccl.out_of_place(transport.group) if len(mine[0]) == 1 else None
                transport = replace(transport, begun=lambda channel: None, reduces=reduces)
                mine = [self._as_recorded(transport, arrays, copies) for arrays in mine]
            ranks = (tuple(r for r, own in enumerate(members) if own == member) for member in transport.members)
            return across(_Party(rendezvous, transport, tuple(ranks)), mine)

        member, here = members[rendezvous.rank], self._of_process(rendezvous)
        own = tuple(p for p, other in zip(rendezvous.participants, members, strict=True) if other == member)
        if own == here.participants:
            return self._local.exchange(here, contribution, combine)
        if self._places is not None:
            return combine([contribution])[0]
        # What a transport has begun cannot be taken back: nobody of this process begins before all of it have come.
        self._local.barrier(here)
        return combine([contribution], lambda: self._local.barrier(here))[0]

    def _as_recorded(
        self, transport: Transport, arrays: Arrays, copies: Callable[[Transport, Tensor], bool]
    ) -> Sequence[Tensor]:
        """What the transport is given: it may note in memory of its own where an array lies, which nobody patches. So
        it does where it begins many arrays at once, or meets many members."""
        places = self._places
        assert places is not None
        is_alone = len(arrays) == 1

        def given(array: Tensor) -> Tensor:
            if not places.moves(array) or copies(transport, array):
                return array
            stand_in = places.stand_in(array) if is_alone and transport.size <= MOST_LENT_TO else None
            return array.clone() if stand_in is None else stand_in

        return [given(array) for array in arrays]

    def _in_place_of(self, output: Tensor, transport: Transport) -> Tensor | None:
        """Where the transport may put what belongs in ``output``."""
        if self._places is None or not self._places.moves(output):
            return output
        return self._places.stand_in(output) if transport.size <= MOST_LENT_TO else None


def _gather(party: _Party, mine: Sequence[Arrays]) -> list[list[Tensor]]:
    """The contributions of all participants, in the order of ranks."""
    transport, like = party.transport, mine[0]
    if party.is_even:
        came = [list(column) for column in zip(*(a.flatten(0, 1) for a in _all_gather(party, mine)), strict=True)]
    else:
        own, size = as_bytes([array for arrays in mine for array in arrays]), sum(array.nbytes for array in like)
        sizes = [size * len(ranks) for ranks in party.ranks]
        received = transport.all_to_all(party.rendezvous.channel, [own] * transport.size, sizes)
        came = [_split(piece, like) for part in received for piece in _pieces(part, size)]
    by_rank = dict(zip(party.order, came, strict=True))
    return [by_rank[rank] for rank in range(len(came))]


def _gather_joined(party: _Party, mine: Sequence[Arrays], dimension: int) -> list[Tensor]:
    """The contributions of all participants, joined along ``dimension``."""
    if dimension == 0 and party.is_regular:
        # They lie one after another as they come.
        return [array.flatten(0, 2) for array in _all_gather(party, mine)]
    return [torch.cat(list(column), dim=dimension) for column in zip(*_gather(party, mine), strict=True)]


def _all_gather(party: _Party, mine: Sequence[Arrays]) -> list[Tensor]:
    """Each array of all: [members, participants of each, ...], where each member has as many."""
    columns = zip(*mine, strict=True)
    stacked = [column[0].unsqueeze(0) if len(column) == 1 else torch.stack(column) for column in columns]
    return party.transport.all_gather(party.rendezvous.channel, stacked)


def _pieces(contents: Tensor, size: int) -> Sequence[Tensor]:
    return torch.split(contents, size) if size else [contents]


def _reduction(mine: Sequence[Arrays], reducer: Reducer) -> Arrays:
    """The reduction over this member's participants; one's own arrays as they are, which the transport only reads."""
    return mine[0] if len(mine) == 1 else [reducer.combine(column) for column in zip(*mine, strict=True)]


def _scatter(party: _Party, arrays: Arrays, reducer: Reducer, dimension: int) -> list[Tensor]:
    """This member's participants' parts of the reductions of arrays: [participants here, ...] each."""
    transport, channel = party.transport, party.rendezvous.channel
    parts = [_in_parts(array, party.rendezvous.size, dimension) for array in arrays]
    if not party.is_even:
        totals = transport.all_reduce(channel, parts, reducer.combine, reducer.opcode)
        return [total[list(party.own)] for total in totals]
    ordered = parts if party.is_regular else [part[party.order] for part in parts]
    by_member = [part.reshape(transport.size, len(party.own), *part.shape[1:]) for part in ordered]
    return transport.reduce_scatter(channel, by_member, reducer.combine, reducer.opcode)


def _in_parts(array: Tensor, size: int, dimension: int) -> Tensor:
    """[size, ...]: the array split along a dimension."""
    if dimension == 0:
        return array.reshape(size, array.shape[0] // size, *array.shape[1:])
    return torch.stack(torch.tensor_split(array, size, dim=dimension))


def _route(
    party: _Party,
    routes: Sequence[tuple[int, int]],
    given: Callable[[int, int], Arrays],
    like: Arrays,
) -> dict[tuple[int, int], list[Tensor]]:
    """What this member's participants receive by ``routes``, pairs of ranks (sender, receiver). ``given``: what a
    participant of this member sends; shaped ``like`` everywhere."""
    own = set(party.own)
    size = sum(array.nbytes for array in like)
    empty = like[0].new_empty(0, dtype=torch.uint8)
    outgoing, incoming = [], []
    for ranks in party.ranks:
        there = set(ranks)
        sent = [as_bytes(given(s, r)) for s, r in routes if s in own and r in there]
        outgoing.append(joined(sent) if sent else empty)
        incoming.append([(s, r) for s, r in routes if s in there and r in own])
    received = party.transport.all_to_all(party.rendezvous.channel, outgoing, [size * len(pairs) for pairs in incoming])
    came: dict[tuple[int, int], list[Tensor]] = {}
    for part, pairs in zip(received, incoming, strict=True):
        for number, pair in enumerate(pairs):
            piece = part[number * size : (number + 1) * size]
            # What came alone has its storage for itself.
            is_alone = len(like) == 1 and 0 < piece.nbytes == piece.untyped_storage().nbytes()
            came[pair] = [piece.view(like[0].dtype).view(like[0].shape)] if is_alone else _split(piece, like)
    return came


def _split(contents: Tensor, like: Arrays) -> list[Tensor]:
    pieces = torch.split(contents, [array.nbytes for array in like])
    return [from_bytes(piece, array) for piece, array in zip(pieces, like, strict=True)]
