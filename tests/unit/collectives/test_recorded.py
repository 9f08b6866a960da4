"""Launches of what was recorded with collectives in it: who watches over them, and who gives them up."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from flagos_backend.collectives.communicator import Communicator, Reducer, Rendezvous
from flagos_backend.collectives.context_peers import ContextPeers
from flagos_backend.collectives.in_process import InProcessCommunicator
from flagos_backend.collectives.multi_process import MultiProcessCommunicator
from flagos_backend.collectives.transport import Room, Transport
from flagos_backend.errors import CollectiveAborted, FlagosBackendError
from flagos_backend.ir.opcode import Opcode
from flagos_backend.runtime.accelerator.lending import LentArrays
from support.devices import on_each


class Graph:
    dropped = 0

    def drop(self) -> None:
        self.dropped += 1


@pytest.fixture
def peers() -> ContextPeers:
    return ContextPeers((0, 0), lambda *_: 0, lambda *_: 0, "cpu", accelerated=True)


class OfOneProcess:
    """The peers of two accelerators. ``launched_by``: the participants that have said so."""

    no_recording = ""

    def __init__(self) -> None:
        self.launched_by: list[int] = []

    def process_of(self, participant: int) -> int:
        return 0

    def member_of(self, participant: int) -> int:
        return participant

    def transport(self, rendezvous: Rendezvous) -> Transport:
        raise AssertionError("nothing is exchanged here")

    def check(self, rendezvous: Rendezvous) -> None:
        pass

    def launched(self, rendezvous: Rendezvous) -> None:
        self.launched_by.append(rendezvous.participant)

    def abort(self, reason: str) -> None:
        pass


def test_graphs_are_given_up_before_their_transports_are(peers: ContextPeers) -> None:
    early, late = Graph(), Graph()
    peers.keep(early)
    peers.abort("the other process is lost")
    peers.keep(late)  # it was being recorded
    assert early.dropped == late.dropped == 1
    with pytest.raises(CollectiveAborted, match="the other process is lost"):
        peers.check(Rendezvous("all of it", (0, 1), 0))


def test_what_each_of_a_process_says() -> None:
    communicator = MultiProcessCommunicator(OfOneProcess())

    def say(participant: int) -> list[str]:
        return communicator.of_process(Rendezvous("what", (0, 1), participant), f"device {participant}")

    assert on_each(2, say) == [["device 0", "device 1"]] * 2


def test_none_begins_alone_nor_goes_on() -> None:
    communicator, begun = MultiProcessCommunicator(OfOneProcess()), []

    def launch(participant: int) -> int:
        communicator.begin_together(Rendezvous("all of it", (0, 1), participant), lambda: begun.append(participant))
        return len(begun)

    assert on_each(2, launch) == [2, 2]


def test_who_has_begun_is_watched_when_a_neighbour_fails() -> None:
    """It waits on its device for one that does not come."""
    peers = OfOneProcess()
    communicator = MultiProcessCommunicator(peers)

    def launch(participant: int) -> None:
        def begin() -> None:
            if participant == 1:
                raise RuntimeError("the driver refuses")

        try:
            communicator.begin_together(Rendezvous("all of it", (0, 1), participant), begin)
        except RuntimeError as error:
            communicator.abort(13, str(error))
            raise

    first, second = on_each(2, launch)
    assert isinstance(first, FlagosBackendError) and isinstance(second, RuntimeError)
    assert peers.launched_by == [0]


def test_what_lies_where_the_next_launch_has_something_else_is_copied() -> None:
    """A transport may note where its operands lie; and nobody waits for anybody."""
    seen: list[int] = []

    class Group:
        def _allgather_base(self, target: torch.Tensor, source: torch.Tensor, options: object) -> None:
            seen.append(source.data_ptr())
            target.view(2, -1).copy_(source)

    class Peers(OfOneProcess):
        def transport(self, rendezvous: Rendezvous) -> Transport:
            return Transport(Group(), (0, 1), 0, "of two", "nccl", "device")

    lent, own = torch.randn(4), torch.randn(4)
    communicator = MultiProcessCommunicator(Peers()).recorded(LentArrays([lent], {}))
    for array in (lent, own):
        (whole,) = communicator.all_gather(Rendezvous("%g", (0, 1), 0), [array], 0)
        assert torch.equal(whole, torch.cat([array, array]))
    assert seen[0] != lent.data_ptr() and seen[1] == own.data_ptr()


class Pair:
    """A group of two that both have the same arrays. ``sums`` and ``sent``: where what it was given lay."""

    def __init__(self) -> None:
        self.sums: list[int] = []
        self.sent: list[int] = []

    def allreduce(self, arrays: list[torch.Tensor], options: object) -> None:
        (array,) = arrays
        self.sums.append(array.data_ptr())
        array.mul_(2)

    def alltoall_base(
        self, target: torch.Tensor, source: torch.Tensor, sizes: list[int], given: list[int], options: object
    ) -> None:
        self.sent.append(source.data_ptr())
        assert sizes == given == [0, source.numel()]
        target.copy_(source)


@pytest.fixture
def pair() -> Pair:
    return Pair()


@pytest.fixture
def of_pair(pair: Pair) -> MultiProcessCommunicator:
    class Peers(OfOneProcess):
        def transport(self, rendezvous: Rendezvous) -> Transport:
            return Transport(pair, (0, 1), 0, "of two", "nccl", "device")

    return MultiProcessCommunicator(Peers())


def test_what_a_sum_is_made_in_is_copied_once(pair: Pair, of_pair: MultiProcessCommunicator) -> None:
    lent, copies = torch.randn(4), list[Any]()

    class Counted(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            made = function(*args, **(kwargs or {}))
            if function in (torch.ops.aten.clone.default, torch.ops.aten.copy_.default):
                copies.append(function)
            return made

    before = lent.clone()
    with Counted():
        (total,) = of_pair.recorded(LentArrays([lent], {})).all_reduce(
            Rendezvous("%r", (0, 1), 0), [lent], Reducer(torch.add, Opcode.ADD)
        )
    assert torch.equal(lent, before) and torch.equal(total, before * 2)
    assert len(copies) == 1 and pair.sums == [total.data_ptr()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool])
def test_what_is_sent_to_one_alone_is_not_copied(
    pair: Pair, of_pair: MultiProcessCommunicator, dtype: torch.dtype
) -> None:
    array = torch.randn(3, 5).to(dtype)
    moved = of_pair.recorded(LentArrays([], {})).permute(Rendezvous("%p", (0, 1), 0), [array], [1, 0])
    assert moved is not None
    (came,) = moved
    assert pair.sent == [array.data_ptr()]
    assert came.dtype == dtype and torch.equal(came, array) and came.data_ptr() != array.data_ptr()
    assert came.untyped_storage().nbytes() == array.nbytes


ENTRIES = ["all-gather", "all-reduce", "all-to-all", "permute", "reduce-scatter"]


class Addresses:
    """A group of two, the other of which has the same arrays: where the arrays lie that each operation is given."""

    def __init__(self) -> None:
        self.given: list[tuple[int, int]] = []  # source, target

    def _allgather_base(self, target: torch.Tensor, source: torch.Tensor, options: object) -> None:
        self.given.append((source.data_ptr(), target.data_ptr()))
        target.view(2, -1).copy_(source.view(-1))

    def _reduce_scatter_base(self, target: torch.Tensor, source: torch.Tensor, options: object) -> None:
        self.given.append((source.data_ptr(), target.data_ptr()))
        target.copy_(source.view(2, -1)[0] * 2)

    def alltoall_base(
        self, target: torch.Tensor, source: torch.Tensor, sizes: list[int], given: list[int], options: object
    ) -> None:
        self.given.append((source.data_ptr(), target.data_ptr()))
        if sizes:
            target.copy_(source)
        else:
            target.view(2, -1).copy_(source.view(2, -1)[0])

    def reduce_into(self, source: torch.Tensor, target: torch.Tensor, operation: object) -> None:
        self.given.append((source.data_ptr(), target.data_ptr()))
        target.copy_(source * 2)


def operate(communicator: Communicator, entry: str, x: torch.Tensor) -> torch.Tensor:
    rendezvous, add = Rendezvous("%c", (0, 1), 0), Reducer(torch.add, Opcode.ADD)
    match entry:
        case "all-gather":
            return communicator.all_gather(rendezvous, [x], 0)[0]
        case "all-reduce":
            return communicator.all_reduce(rendezvous, [x], add)[0]
        case "all-to-all":
            return communicator.exchange_along(rendezvous, x, 0)
        case "permute":
            moved = communicator.permute(rendezvous, [x], [1, 0])
            assert moved is not None
            return moved[0]
    return communicator.reduce_scatter(rendezvous, [x], add, 0)[0]


def expected(entry: str, x: torch.Tensor) -> torch.Tensor:
    whole = {"all-gather": torch.cat([x, x]), "all-reduce": x * 2, "permute": x}
    return whole.get(entry, torch.cat([x[:2], x[:2]]) if entry == "all-to-all" else x[:2] * 2)


@pytest.fixture
def addresses(monkeypatch: pytest.MonkeyPatch) -> Addresses:
    group = Addresses()
    monkeypatch.setattr("flagos_backend.collectives.nccl.out_of_place", lambda group: group.reduce_into)
    return group


def communicator_over(group: Addresses, arrays: LentArrays, members: int = 2) -> MultiProcessCommunicator:
    class Peers(OfOneProcess):
        def transport(self, rendezvous: Rendezvous) -> Transport:
            return Transport(group, tuple(range(members)), 0, "of two", "nccl", "device")

    return MultiProcessCommunicator(Peers()).recorded(arrays)


@pytest.mark.parametrize("entry", ENTRIES)
def test_a_collective_reads_and_makes_arrays_where_they_stand_in(addresses: Addresses, entry: str) -> None:
    """At the addresses that the graph is looked through for; and an array is lent once."""
    x = torch.randn(4, 3)
    output = torch.zeros_like(expected(entry, x))
    stand_ins = [x.clone(), torch.zeros_like(output)]
    arrays = LentArrays([x, output], dict(enumerate(stand_ins)))
    communicator = communicator_over(addresses, arrays)
    into = communicator.into(output)
    result = operate(into, entry, x)
    assert addresses.given == [(stand_ins[0].data_ptr(), stand_ins[1].data_ptr())]
    assert torch.equal(result, expected(entry, x)) and into.settled(result, output) is output
    assert not output.any(), "a copy of what a replay makes there"
    assert arrays.lent == {0, 1}
    again = operate(communicator, entry, x)
    assert torch.equal(again, expected(entry, x))
    taken = {array.data_ptr() for array in (x, output, *stand_ins)}
    assert taken.isdisjoint(addresses.given[-1])


@pytest.mark.parametrize("entry", ENTRIES)
def test_parts_of_arrays_are_copied(addresses: Addresses, entry: str) -> None:
    x = torch.randn(5, 3)
    arrays = LentArrays([x], {0: x.clone()})
    assert torch.equal(operate(communicator_over(addresses, arrays), entry, x[1:]), expected(entry, x[1:]))
    assert not arrays.lent and addresses.given[0][0] not in (x.data_ptr(), x[1:].data_ptr())


def test_what_is_as_large_gets_the_room_and_once() -> None:
    place, x = torch.zeros(2, 3), torch.randn(12)
    room = Room(place)
    assert room.like(x).data_ptr() != place.data_ptr()
    assert room.like(x, (6,)).data_ptr() != place.data_ptr(), "what came first may have had it"
    bytes_there = Room(place).like(x.view(torch.uint8), (24,))
    assert bytes_there.data_ptr() == place.data_ptr() and bytes_there.shape == (24,)


def test_a_result_that_was_made_elsewhere_is_copied() -> None:
    output, result = torch.zeros(3), torch.randn(3)
    assert InProcessCommunicator().settled(result, output) is output
    assert torch.equal(output, result)


@pytest.fixture
def over_flagcx(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ContextPeers:
    """The peers of two GPUs whose process has FlagCX, and its files in ``tmp_path``."""
    monkeypatch.setattr("flagos_backend.collectives.context_peers.backend_for", lambda _: "flagcx")
    monkeypatch.setattr(torch, "get_device_module", lambda _: SimpleNamespace(get_device_name=lambda: "NVIDIA H100"))
    monkeypatch.setenv("NCCL_GRAPH_REGISTER", "0")
    monkeypatch.setenv("HOME", str(tmp_path))
    return ContextPeers((0, 0), lambda *_: 0, lambda *_: 0, "cuda", accelerated=True)


def test_flagcx_is_recorded_where_it_calls_nccl(over_flagcx: ContextPeers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLAGCX_USE_HETERO_COMM", "0")
    assert not over_flagcx.no_recording


@pytest.mark.parametrize(
    "setting", ["FLAGCX_USE_HETERO_COMM", "FLAGCX_USE_HOST_COMM", "FLAGCX_USE_TUNER", "FLAGCX_CUSTOM_OP_ENABLE"]
)
def test_flagcx_is_not_recorded_where_it_does_more(
    over_flagcx: ContextPeers, monkeypatch: pytest.MonkeyPatch, setting: str
) -> None:
    monkeypatch.setenv(setting, "1")
    assert over_flagcx.no_recording == f"{setting} is 1"


def test_what_flagcx_reads_in_its_files_counts(over_flagcx: ContextPeers, tmp_path: Path) -> None:
    (tmp_path / ".flagcx.conf").write_text("FLAGCX_SOCKET_IFNAME=lo\n\nFLAGCX_CLUSTER_SPLIT_LIST=2\n")
    assert over_flagcx.no_recording == "FLAGCX_CLUSTER_SPLIT_LIST is 2"


def test_flagcx_is_not_recorded_on_other_vendors_devices(
    over_flagcx: ContextPeers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_device_module", lambda _: SimpleNamespace(get_device_name=lambda: "MetaX C500"))
    assert over_flagcx.no_recording == "FlagCX calls another library for devices of metax"


def test_flagcx_without_a_home_reads_no_file_there(over_flagcx: ContextPeers, monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless(path: Path) -> Path:
        raise RuntimeError("could not determine home directory")

    monkeypatch.setattr(Path, "expanduser", homeless)
    assert not over_flagcx.no_recording


def test_a_group_of_two_vendors_is_not_recorded(over_flagcx: ContextPeers) -> None:
    """Which is known when its members have met; and nothing begins in a capture."""
    assert not over_flagcx.no_recording
    reason = "FlagCX calls another library for devices of metax"
    transport = Transport(None, (0, 1), 0, "of two", "flagcx", "device", unlike_nccl=reason)
    over_flagcx._transports[(0, 1), 0] = transport
    assert over_flagcx.no_recording == reason
    communicator = over_flagcx.communicator((0, 1)).recorded(LentArrays([], {}))
    with pytest.raises(RuntimeError, match=reason):
        communicator.all_gather(Rendezvous("%g", (0, 1), 0), [torch.ones(2)], 0)
