"""Launches of what was recorded with collectives in it: who watches over them, and who gives them up."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from flagos_backend.collectives.communicator import Reducer, Rendezvous
from flagos_backend.collectives.context_peers import ContextPeers
from flagos_backend.collectives.multi_process import MultiProcessCommunicator
from flagos_backend.collectives.transport import Transport
from flagos_backend.errors import CollectiveAborted, FlagosBackendError
from flagos_backend.ir.opcode import Opcode
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
    communicator = MultiProcessCommunicator(Peers()).recorded(lambda array: array is lent)
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
    lent, clones = torch.randn(4), list[torch.Tensor]()

    class Counted(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            made = function(*args, **(kwargs or {}))
            if function is torch.ops.aten.clone.default:
                clones.append(made)
            return made

    before = lent.clone()
    with Counted():
        (total,) = of_pair.recorded(lambda array: array is lent).all_reduce(
            Rendezvous("%r", (0, 1), 0), [lent], Reducer(torch.add, Opcode.ADD)
        )
    assert torch.equal(lent, before) and torch.equal(total, before * 2)
    assert [clone.data_ptr() for clone in clones] == pair.sums == [total.data_ptr()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool])
def test_what_is_sent_to_one_alone_is_not_copied(
    pair: Pair, of_pair: MultiProcessCommunicator, dtype: torch.dtype
) -> None:
    array = torch.randn(3, 5).to(dtype)
    moved = of_pair.recorded(lambda array: False).permute(Rendezvous("%p", (0, 1), 0), [array], [1, 0])
    assert moved is not None
    (came,) = moved
    assert pair.sent == [array.data_ptr()]
    assert came.dtype == dtype and torch.equal(came, array) and came.data_ptr() != array.data_ptr()
    assert came.untyped_storage().nbytes() == array.nbytes


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
    communicator = over_flagcx.communicator((0, 1)).recorded(lambda array: False)
    with pytest.raises(RuntimeError, match=reason):
        communicator.all_gather(Rendezvous("%g", (0, 1), 0), [torch.ones(2)], 0)
