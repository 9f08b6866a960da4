"""Communicator for launches whose devices do not all share memory. Host devices of one process do: they meet in it,
and one of them deals with the others. An accelerator deals for itself. Between in_process.py and transport.py."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from flagos_backend.collectives.communicator import Combine, Communicator, Meeting, Reducer
from flagos_backend.collectives.in_process import InProcessCommunicator
from flagos_backend.collectives.transport import Transport, as_bytes, from_bytes, joined

Arrays = Sequence[Tensor]


class Peers(Protocol):
    """The members of a launch: what a transport tells apart. A process of host devices is one, with all of its
    participants; each accelerator is one of its own."""

    def process_of(self, participant: int) -> int:
        """The process that runs a participant."""
        ...

    def member_of(self, participant: int) -> int:
        """The member that a participant belongs to."""
        ...

    def transport(self, meeting: Meeting) -> Transport:
        """What moves arrays among the members of a meeting, for the caller's. Raises an error of the catalogue when
        nothing does."""
        ...

    def abort(self, reason: str) -> None:
        """A launch failed in this process: the others must not wait for it."""
        ...


@dataclass(frozen=True, slots=True)
class _Party:
    """A meeting, seen by member. ``ranks[r]``: the meeting's ranks that member r of the transport has."""

    meeting: Meeting
    transport: Transport
    ranks: tuple[tuple[int, ...], ...]

    @property
    def own(self) -> tuple[int, ...]:
        return self.ranks[self.transport.rank]

    @property
    def order(self) -> list[int]:
        """The meeting's ranks by member."""
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


class SpanningCommunicator(Communicator):
    """One object serves one launch. Reductions fold each member's arrays in the order of ranks, then totals."""

    def __init__(self, peers: Peers) -> None:
        self._peers = peers
        self._local = InProcessCommunicator()

    def abort(self, code: int, message: str) -> None:
        """Fails this launch: for the participants of this process, and through its peers for the others."""
        self._local.abort(code, message)
        self._peers.abort(message)

    def exchange(self, meeting: Meeting, contribution: Any, combine: Combine) -> Any:
        """Contributions are sequences of arrays, equal in shape for all participants; every member combines them."""
        members = self._members(meeting)
        if members is None:
            return self._local.exchange(meeting, contribution, combine)

        def across(party: _Party, mine: Sequence[Arrays]) -> list[Any]:
            every = combine(_gather(party, mine))
            return [every[rank] for rank in party.own]

        return self._meet(meeting, members, contribution, across)

    def all_reduce(self, meeting: Meeting, arrays: Arrays, reducer: Reducer) -> list[Tensor]:
        members = self._members(meeting)
        if members is None:
            return self._local.all_reduce(meeting, arrays, reducer)

        def across(party: _Party, mine: Sequence[Arrays]) -> list[list[Tensor]]:
            totals = _alike(_fold(mine, reducer), lambda arrays: _reduce(party, arrays, reducer))
            return [totals if i == 0 else [total.clone() for total in totals] for i in range(len(mine))]

        return list(self._meet(meeting, members, arrays, across))

    def all_gather(self, meeting: Meeting, arrays: Arrays, dimension: int) -> list[Tensor]:
        members = self._members(meeting)
        if members is None:
            return self._local.all_gather(meeting, arrays, dimension)

        def across(party: _Party, mine: Sequence[Arrays]) -> list[list[Tensor]]:
            whole = _gather_joined(party, mine, dimension)
            return [whole if i == 0 else [array.clone() for array in whole] for i in range(len(mine))]

        return list(self._meet(meeting, members, arrays, across))

    def reduce_scatter(self, meeting: Meeting, arrays: Arrays, reducer: Reducer, dimension: int) -> list[Tensor]:
        members = self._members(meeting)
        if members is None:
            return self._local.reduce_scatter(meeting, arrays, reducer, dimension)

        def across(party: _Party, mine: Sequence[Arrays]) -> list[list[Tensor]]:
            parts = _alike(_fold(mine, reducer), lambda arrays: _scatter(party, arrays, reducer, dimension))
            # What several share would keep the memory of all.
            shared = len(mine) > 1 or len(parts) > 1
            return [[part[i].clone() if shared else part[i] for part in parts] for i in range(len(mine))]

        return list(self._meet(meeting, members, arrays, across))

    def all_to_all(self, meeting: Meeting, parts: Arrays) -> list[Tensor]:
        members = self._members(meeting)
        if members is None:
            return self._local.all_to_all(meeting, parts)
        routes = [(sender, receiver) for sender in range(meeting.size) for receiver in range(meeting.size)]

        def across(party: _Party, mine: Sequence[Arrays]) -> list[list[Tensor]]:
            sent = dict(zip(party.own, mine, strict=True))
            came = _route(party, routes, lambda sender, receiver: [sent[sender][receiver]], parts[:1])
            return [[came[sender, rank][0] for sender in range(meeting.size)] for rank in party.own]

        return list(self._meet(meeting, members, parts, across))

    def permute(self, meeting: Meeting, arrays: Arrays, source_of: Sequence[int | None]) -> list[Tensor] | None:
        members = self._members(meeting)
        if members is None:
            return self._local.permute(meeting, arrays, source_of)
        routes = [(source, rank) for rank, source in enumerate(source_of) if source is not None]

        def across(party: _Party, mine: Sequence[Arrays]) -> list[list[Tensor] | None]:
            sent = dict(zip(party.own, mine, strict=True))
            came = _route(party, routes, lambda sender, _: sent[sender], arrays)
            sources = [source_of[rank] for rank in party.own]
            return [None if s is None else came[s, rank] for s, rank in zip(sources, party.own, strict=True)]

        received = self._meet(meeting, members, arrays, across)
        return None if received is None else list(received)

    def broadcast(self, meeting: Meeting, arrays: Arrays) -> list[Tensor]:
        members = self._members(meeting)
        if members is None:
            return self._local.broadcast(meeting, arrays)

        def across(party: _Party, mine: Sequence[Arrays]) -> list[list[Tensor]]:
            root = next(member for member, ranks in enumerate(party.ranks) if 0 in ranks)
            given = mine[party.own.index(0)] if root == party.transport.rank else mine[0]
            received = [party.transport.broadcast(meeting.channel, array, root) for array in given]
            return [received if i == 0 else [array.clone() for array in received] for i in range(len(mine))]

        return list(self._meet(meeting, members, arrays, across))

    def _members(self, meeting: Meeting) -> list[int] | None:
        """The member of each participant; None when all are of one."""
        members = [self._peers.member_of(participant) for participant in meeting.participants]
        return members if len(set(members)) > 1 else None

    def _meet(self, meeting: Meeting, members: Sequence[int], contribution: Any, across: Across) -> Any:
        """``across`` is called by one participant of each member, for all of its participants."""

        def combine(mine: Sequence[Any], meet: Callable[[], None] = lambda: None) -> Sequence[Any]:
            transport = replace(self._peers.transport(meeting), meet=meet)
            ranks = (tuple(r for r, own in enumerate(members) if own == member) for member in transport.members)
            return across(_Party(meeting, transport, tuple(ranks)), mine)

        member, process = members[meeting.rank], self._peers.process_of(meeting.participant)
        own = tuple(p for p, other in zip(meeting.participants, members, strict=True) if other == member)
        here = tuple(p for p in meeting.participants if self._peers.process_of(p) == process)
        if own == here:
            return self._local.exchange(replace(meeting, participants=own), contribution, combine)
        # What a transport has begun cannot be taken back: nobody of this process begins before all of it have come.
        neighbours = replace(meeting, participants=here)
        self._local.barrier(neighbours)
        return combine([contribution], lambda: self._local.barrier(neighbours))[0]


def _gather(party: _Party, mine: Sequence[Arrays]) -> list[list[Tensor]]:
    """The contributions of all participants, in the order of ranks."""
    every: list[list[Tensor]] = [[] for _ in range(party.meeting.size)]
    for number, like in enumerate(mine[0]):
        column = [arrays[number] for arrays in mine]
        for rank, array in enumerate(_gather_column(party, column, like)):
            every[rank].append(array)
    return every


def _gather_column(party: _Party, column: Sequence[Tensor], like: Tensor) -> list[Tensor]:
    transport, channel = party.transport, party.meeting.channel
    if party.is_even:
        came = list(_all_gather(party, column).flatten(0, 1))
    else:
        own = as_bytes(column)
        sizes = [like.nbytes * len(ranks) for ranks in party.ranks]
        received = transport.all_to_all(channel, [own] * transport.size, sizes)
        came = [from_bytes(piece, like) for part in received for piece in _pieces(part, like.nbytes)]
    by_rank = dict(zip(party.order, came, strict=True))
    return [by_rank[rank] for rank in range(len(came))]


def _gather_joined(party: _Party, mine: Sequence[Arrays], dimension: int) -> list[Tensor]:
    """The contributions of all participants, joined along ``dimension``."""
    if len(mine[0]) > 1:
        return _gather_packed(party, mine, dimension)
    if dimension == 0 and party.is_regular:
        # They lie one after another as they come.
        return [_all_gather(party, column).flatten(0, 2) for column in zip(*mine, strict=True)]
    return [torch.cat(list(column), dim=dimension) for column in zip(*_gather(party, mine), strict=True)]


def _gather_packed(party: _Party, mine: Sequence[Arrays], dimension: int) -> list[Tensor]:
    """Several arrays travel together."""
    every = [contents for (contents,) in _gather(party, [[as_bytes(arrays)] for arrays in mine])]
    results, start = [], 0
    for like in mine[0]:
        end = start + like.nbytes
        results.append(torch.cat([from_bytes(contents[start:end], like) for contents in every], dim=dimension))
        start = end
    return results


def _all_gather(party: _Party, column: Sequence[Tensor]) -> Tensor:
    """[members, participants of each, ...], where each member has as many."""
    stacked = column[0].unsqueeze(0) if len(column) == 1 else torch.stack(list(column))
    return party.transport.all_gather(party.meeting.channel, stacked)


def _pieces(contents: Tensor, size: int) -> Sequence[Tensor]:
    return torch.split(contents, size) if size else [contents]


def _fold(mine: Sequence[Arrays], reducer: Reducer) -> Arrays:
    """The fold over this member's participants; one's own arrays as they are, which the transport only reads."""
    return mine[0] if len(mine) == 1 else [reducer.fold(column) for column in zip(*mine, strict=True)]


def _alike(arrays: Arrays, work: Callable[[Arrays], list[Tensor]]) -> list[Tensor]:
    """``work`` on the arrays of each dtype, which travel together; its results in the order of the arrays."""
    results: dict[int, Tensor] = {}
    for dtype in dict.fromkeys(array.dtype for array in arrays):
        numbers = [number for number, array in enumerate(arrays) if array.dtype == dtype]
        results.update(zip(numbers, work([arrays[number] for number in numbers]), strict=True))
    return [results[number] for number in range(len(arrays))]


def _reduce(party: _Party, arrays: Arrays, reducer: Reducer) -> list[Tensor]:
    """The folds of arrays of one dtype over members."""
    transport, channel = party.transport, party.meeting.channel
    if len(arrays) == 1:
        return [transport.all_reduce(channel, arrays[0], reducer.fold, reducer.opcode)]
    flat = torch.cat([array.reshape(-1) for array in arrays])
    total = transport.all_reduce(channel, flat, reducer.fold, reducer.opcode)
    parts = torch.split(total, [array.numel() for array in arrays])
    return [part.reshape(array.shape).clone() for part, array in zip(parts, arrays, strict=True)]


def _scatter(party: _Party, arrays: Arrays, reducer: Reducer, dimension: int) -> list[Tensor]:
    """This member's participants' parts of the folds of arrays of one dtype: [participants here, ...] each."""
    size, here = party.meeting.size, len(party.own)
    parts = [_in_parts(array, size, dimension) for array in arrays]
    packed = parts[0] if len(parts) == 1 else torch.cat([part.reshape(size, -1) for part in parts], dim=1)
    own = _scatter_parts(party, packed, reducer)
    if len(parts) == 1:
        return [own]
    pieces = torch.split(own, [part[0].numel() for part in parts], dim=1)
    return [piece.reshape(here, *part.shape[1:]) for piece, part in zip(pieces, parts, strict=True)]


def _in_parts(array: Tensor, size: int, dimension: int) -> Tensor:
    """[size, ...]: the array split along a dimension."""
    if dimension == 0:
        return array.reshape(size, array.shape[0] // size, *array.shape[1:])
    return torch.stack(torch.tensor_split(array, size, dim=dimension))


def _scatter_parts(party: _Party, parts: Tensor, reducer: Reducer) -> Tensor:
    """``parts``: [size of the meeting, ...]. The folds of those of this member's participants."""
    transport, channel = party.transport, party.meeting.channel
    if party.is_even:
        ordered = parts if party.is_regular else parts[party.order]
        by_member = ordered.reshape(transport.size, len(party.own), *parts.shape[1:])
        return transport.reduce_scatter(channel, by_member, reducer.fold, reducer.opcode)
    return transport.all_reduce(channel, parts, reducer.fold, reducer.opcode)[list(party.own)]


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
    received = party.transport.all_to_all(party.meeting.channel, outgoing, [size * len(pairs) for pairs in incoming])
    came: dict[tuple[int, int], list[Tensor]] = {}
    for part, pairs in zip(received, incoming, strict=True):
        for number, pair in enumerate(pairs):
            piece = part[number * size : (number + 1) * size]
            came[pair] = _split(piece, like)
    return came


def _split(contents: Tensor, like: Arrays) -> list[Tensor]:
    pieces = torch.split(contents, [array.nbytes for array in like])
    return [from_bytes(piece, array) for piece, array in zip(pieces, like, strict=True)]
