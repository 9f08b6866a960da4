"""Collectives across processes and accelerators over gloo. The "processes" are threads of this one, each with peers of
its own that know nothing of the others' but what is in the store, and the "accelerators" have host memory; the oracle
is arithmetic on the contributions."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from flagos_backend.collectives import Reducer, Rendezvous
from flagos_backend.collectives.communicator import Communicator
from flagos_backend.collectives.context_peers import ContextPeers
from flagos_backend.collectives.multi_process import MultiProcessCommunicator
from flagos_backend.devices.process_groups import backend_for
from flagos_backend.errors import (
    CollectiveAborted,
    CollectiveFailed,
    CollectiveOverdue,
    CollectiveTimeout,
    CollectiveTimeoutInvalid,
    FlagosBackendError,
    RendezvousFailed,
    StatusCode,
)
from flagos_backend.ir.opcode import Opcode
from support.devices import on_each


class Store:
    """A key-value store as the host gives one: a key is put once."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._values: dict[str, bytes] = {}

    def get(self, key: str, milliseconds: int) -> bytes | int:
        with self._changed:
            there = self._changed.wait_for(lambda: key in self._values, milliseconds / 1000)
            return self._values[key] if there else int(StatusCode.DEADLINE_EXCEEDED)

    def put(self, key: str, value: bytes) -> int:
        with self._changed:
            if key in self._values:
                return int(StatusCode.ALREADY_EXISTS)
            self._values[key] = value
            self._changed.notify_all()
            return int(StatusCode.OK)


@contextmanager
def processes(process_of: tuple[int, ...], *, accelerated: bool = False) -> Iterator[list[ContextPeers]]:
    """The peers of each process; ``process_of`` has the process of each device."""
    store = Store()
    peers = [
        ContextPeers(process_of, store.get, store.put, accelerated=accelerated) for _ in range(max(process_of) + 1)
    ]
    yield peers
    for one in peers:
        one.close()


Work = Callable[[Communicator, Rendezvous], Any]


def launch(peers: Sequence[ContextPeers], participants: tuple[int, ...], work: Work) -> list[Any]:
    """``work`` on each participant; its results, or what it raised, by rank. Participants are numbers of devices."""
    process_of = peers[0].device_processes
    communicators = [one.communicator(tuple(range(len(process_of)))) for one in peers]

    def run(rank: int) -> Any:
        device = participants[rank]
        communicator = communicators[process_of[device]]
        try:
            return work(communicator, Rendezvous("%collective.1", participants, device))
        except FlagosBackendError as error:
            communicator.abort(int(error.code), str(error))
            raise

    return on_each(len(participants), run)


def results(outcomes: list[Any]) -> list[Any]:
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome
    return outcomes


# The process of each device, the devices that meet, in the order of their group, and whether they are accelerators.
LAYOUTS = {
    "one device each": ((0, 1, 2), (0, 1, 2), False),
    "two devices each": ((0, 0, 1, 1), (0, 1, 2, 3), False),
    "another order": ((0, 0, 1, 1), (3, 0, 2, 1), False),
    "uneven": ((0, 1, 1, 2, 2), (4, 1, 0, 3, 2), False),
    "some of them": ((0, 0, 1, 1, 2), (2, 0, 4), False),
    "within one process": ((0, 0, 1), (1, 0), False),
    "accelerators of one process": ((0, 0, 0), (2, 0, 1), True),
    "accelerators of two processes": ((0, 0, 1, 1, 1), (4, 0, 2, 1), True),
}


@pytest.fixture(params=LAYOUTS.values(), ids=list(LAYOUTS))
def layout(request: pytest.FixtureRequest) -> Iterator[tuple[list[ContextPeers], tuple[int, ...]]]:
    process_of, participants, accelerated = request.param
    with processes(process_of, accelerated=accelerated) as peers:
        yield peers, participants


Layout = tuple[list[ContextPeers], tuple[int, ...]]

DTYPES = [
    torch.bool,
    torch.int8,
    torch.int16,
    torch.uint32,
    torch.int64,
    torch.float8_e4m3fn,
    torch.float16,
    torch.bfloat16,
    torch.float64,
    torch.complex64,
]


def draw(rng: np.random.Generator, dtype: torch.dtype, *dims: int) -> Tensor:
    """Small whole numbers: sums of them are exact in every dtype and order."""
    return torch.from_numpy(rng.integers(0, 3, dims)).to(dtype)


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("dimension", [0, 1])
def test_all_gather_of_every_dtype(layout: Layout, rng: np.random.Generator, dimension: int, together: bool) -> None:
    peers, participants = layout
    given = [[draw(rng, dtype, 2, 3) for dtype in DTYPES] for _ in participants]

    def gather(c: Communicator, m: Rendezvous) -> list[Tensor]:
        if together:
            return c.all_gather(m, given[m.rank], dimension)
        return [array for one in given[m.rank] for array in c.all_gather(m, [one], dimension)]

    got = results(launch(peers, participants, gather))
    for received in got:
        for number, array in enumerate(received):
            # Compared as bytes: not every dtype has an equality.
            expected = torch.cat([arrays[number].view(torch.uint8) for arrays in given], dimension)
            assert array.view(torch.uint8).equal(expected)
    assert len({array.data_ptr() for received in got for array in received}) == len(participants) * len(DTYPES)


REDUCERS = {
    "sum": Reducer(torch.add, Opcode.ADD),
    "product": Reducer(torch.mul, Opcode.MULTIPLY),
    "maximum": Reducer(torch.maximum, Opcode.MAXIMUM),
    "and": Reducer(torch.bitwise_and, Opcode.AND),
    "xor": Reducer(torch.bitwise_xor, Opcode.XOR),
    "no single operation": Reducer(lambda a, b: a + b - a * b),
}


@pytest.mark.parametrize("dtype", [torch.bool, torch.int16, torch.int32, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("length", [0, 1, 7, 5000])
def test_all_reduce(layout: Layout, rng: np.random.Generator, dtype: torch.dtype, length: int) -> None:
    """Up to 16 KiB one way, beyond it another."""
    peers, participants = layout
    given = [[draw(rng, dtype, length, 3), draw(rng, dtype)] for _ in participants]
    for name, reducer in REDUCERS.items():
        if (dtype.is_floating_point and name in ("and", "xor")) or (dtype is torch.bool and "no single" in name):
            continue
        got = results(launch(peers, participants, lambda c, m, r=reducer: c.all_reduce(m, given[m.rank], r)))
        expected = [reducer.combine(list(column)) for column in zip(*given, strict=True)]
        for received in got:
            for array, value in zip(received, expected, strict=True):
                torch.testing.assert_close(array, value, rtol=0, atol=0, msg=f"{name} of {dtype}")


def test_sums_are_the_same_bits_everywhere(layout: Layout, rng: np.random.Generator) -> None:
    peers, participants = layout
    given = [
        torch.from_numpy(rng.standard_normal(999) * 10.0 ** rng.integers(-8, 8, 999)).float() for _ in participants
    ]
    got = results(launch(peers, participants, lambda c, m: c.all_reduce(m, [given[m.rank]], REDUCERS["sum"])[0]))
    assert all(array.equal(got[0]) for array in got)
    exact = torch.stack(given).double().sum(0)
    error = torch.stack(given).double().abs().sum(0) * 2.0**-23 * len(given)
    assert bool(((got[0].double() - exact).abs() <= error).all())


def test_a_maximum_keeps_a_nan(layout: Layout) -> None:
    peers, participants = layout
    for holder in range(len(participants)):
        given = [torch.tensor([1.0, torch.nan if rank == holder else 2.0]) for rank in range(len(participants))]
        reducer = REDUCERS["maximum"]
        got = results(launch(peers, participants, lambda c, m, g=given, r=reducer: c.all_reduce(m, [g[m.rank]], r)[0]))
        assert all(array[0] == 1 and array[1].isnan() for array in got)


@pytest.mark.parametrize("name", ["sum", "maximum", "no single operation"])
@pytest.mark.parametrize("dtype", [torch.int16, torch.float32])
@pytest.mark.parametrize("dimension", [0, 1])
def test_reduce_scatter(
    layout: Layout, rng: np.random.Generator, dtype: torch.dtype, name: str, dimension: int
) -> None:
    peers, participants = layout
    reducer, size = REDUCERS[name], len(participants)
    given = [draw(rng, dtype, *((3 * size, 2) if dimension == 0 else (2, 3 * size))) for _ in participants]
    got = results(launch(peers, participants, lambda c, m: c.reduce_scatter(m, [given[m.rank]], reducer, dimension)[0]))
    expected = reducer.combine(given)
    for rank, array in enumerate(got):
        assert array.equal(expected.narrow(dimension, 3 * rank, 3))


@pytest.mark.parametrize("name", ["sum", "maximum"])
@pytest.mark.parametrize("dimension", [0, 1])
def test_several_arrays_of_several_types(layout: Layout, rng: np.random.Generator, name: str, dimension: int) -> None:
    """Those of one type travel together; each comes as it is, in memory of its own."""
    peers, participants = layout
    reducer, size = REDUCERS[name], len(participants)
    dtypes = [torch.float32, torch.int16, torch.float32, torch.float64, torch.int16]
    sizes = [(n + 1, 2) if dimension == 0 else (2, n + 1) for n in range(len(dtypes))]
    whole = [tuple(length * size if d == dimension else length for d, length in enumerate(dims)) for dims in sizes]
    given = [[draw(rng, dtype, *dims) for dtype, dims in zip(dtypes, whole, strict=True)] for _ in participants]
    totals = [reducer.combine(list(column)) for column in zip(*given, strict=True)]
    reduced = results(launch(peers, participants, lambda c, m: c.all_reduce(m, given[m.rank], reducer)))
    parts = results(launch(peers, participants, lambda c, m: c.reduce_scatter(m, given[m.rank], reducer, dimension)))
    for rank in range(size):
        for number, total in enumerate(totals):
            length = sizes[number][dimension]
            own = total.narrow(dimension, length * rank, length)
            for array, expected in ((reduced[rank][number], total), (parts[rank][number], own)):
                assert array.dtype == expected.dtype
                assert array.equal(expected)
    for received in (reduced, parts):
        places = {array.untyped_storage().data_ptr() for arrays in received for array in arrays}
        assert len(places) == size * len(dtypes)


def test_all_to_all(layout: Layout, rng: np.random.Generator) -> None:
    peers, participants = layout
    given = [[draw(rng, torch.int16, 3) + 100 * r for _ in participants] for r in range(len(participants))]
    got = results(launch(peers, participants, lambda c, m: c.all_to_all(m, given[m.rank])))
    for rank, received in enumerate(got):
        assert [a.tolist() for a in received] == [sent[rank].tolist() for sent in given]


def test_permute_and_broadcast(layout: Layout, rng: np.random.Generator) -> None:
    peers, participants = layout
    size = len(participants)
    given = [[draw(rng, torch.bool, 5), draw(rng, torch.float64, 2, 2)] for _ in participants]
    source_of: list[int | None] = [(rank + 1) % size for rank in range(size)]
    source_of[1] = None
    permuted = results(launch(peers, participants, lambda c, m: c.permute(m, given[m.rank], source_of)))
    for received, source in zip(permuted, source_of, strict=True):
        if source is None:
            assert received is None
        else:
            assert all(a.equal(b) for a, b in zip(received, given[source], strict=True))
    for received in results(launch(peers, participants, lambda c, m: c.broadcast(m, given[m.rank]))):
        assert all(a.equal(b) for a, b in zip(received, given[0], strict=True))


def test_exchange_gives_every_process_all_contributions(layout: Layout, rng: np.random.Generator) -> None:
    peers, participants = layout
    given = [[draw(rng, torch.int32, 4)] for _ in participants]

    def combine(contributions: Sequence[Sequence[Tensor]]) -> list[tuple[int, int]]:
        return [(rank, int(sum(int(c[0].sum()) for c in contributions))) for rank in range(len(contributions))]

    got = results(launch(peers, participants, lambda c, m: c.exchange(m, given[m.rank], combine)))
    total = sum(int(arrays[0].sum()) for arrays in given)
    assert got == [(rank, total) for rank in range(len(participants))]


def test_groups_of_the_same_processes_do_not_mix(rng: np.random.Generator) -> None:
    """Devices 0 and 2, and devices 1 and 3, meet at once, each pair at its own pace."""
    given = [draw(rng, torch.int64, 3) + 1000 * device for device in range(4)]
    with processes((0, 0, 1, 1)) as peers:
        communicators = [one.communicator((0, 1, 2, 3)) for one in peers]

        def run(device: int) -> Tensor:
            rendezvous = Rendezvous("%all-reduce.1", (0, 2) if device % 2 == 0 else (1, 3), device)
            value = given[device]
            for iteration in range(20):
                time.sleep(0.001 * ((device + iteration) % 3))
                value = communicators[device // 2].all_reduce(rendezvous, [value], REDUCERS["sum"])[0]
            return value

        got = results(on_each(4, run))
    for device, value in enumerate(got):
        assert value.equal((given[device % 2] + given[device % 2 + 2]) * 2**19)


def test_a_launch_that_fails_in_one_process_fails_in_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLAGOS_COLLECTIVE_TIMEOUT", "60")
    participants = (0, 1, 2, 3)

    def work(communicator: Communicator, rendezvous: Rendezvous) -> Tensor:
        communicator.all_reduce(rendezvous, [torch.ones(2)], REDUCERS["sum"])
        if rendezvous.rank == 3:
            assert isinstance(communicator, MultiProcessCommunicator)
            communicator.abort(int(StatusCode.INTERNAL), "device 3 melted")
            raise CollectiveAborted(reason="device 3 melted", participant=3)
        return communicator.all_reduce(rendezvous, [torch.ones(2)], REDUCERS["sum"])[0]

    begin = time.monotonic()
    with processes((0, 0, 1, 1)) as peers:
        outcomes = launch(peers, participants, work)
        assert all(isinstance(outcome, CollectiveAborted | CollectiveFailed) for outcome in outcomes)
        assert "device 3 melted" in str(outcomes[2])
        failed = next(o for o in outcomes[:2] if isinstance(o, CollectiveFailed))
        assert failed.code is StatusCode.UNAVAILABLE
        assert "%collective.1" in str(failed)
        assert "the processes [0, 1]" in str(failed)
        # What comes later does not wait for them either.
        later = launch(peers, participants, lambda c, m: c.all_reduce(m, [torch.ones(2)], REDUCERS["sum"]))
        assert all(isinstance(outcome, CollectiveAborted) for outcome in later)
    assert time.monotonic() - begin < 60


def test_a_launch_that_fails_on_one_accelerator_leaves_the_others_able(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody of one process is in a transport when another of it fails: the groups outlive the launch."""
    monkeypatch.setenv("FLAGOS_COLLECTIVE_TIMEOUT", "60")
    ones = [torch.ones(2)]

    def work(communicator: Communicator, rendezvous: Rendezvous) -> Tensor:
        if rendezvous.rank == 1:
            raise CollectiveTimeout(channel="%sort.3", missing=[7], seconds=1, participant=1)
        return communicator.all_reduce(rendezvous, ones, REDUCERS["sum"])[0]

    begin = time.monotonic()
    with processes((0, 0, 0), accelerated=True) as peers:
        for _ in range(3):
            first, own, last = launch(peers, (0, 1, 2), work)
            assert isinstance(own, CollectiveTimeout)
            assert all(isinstance(other, CollectiveAborted) and "%sort.3" in str(other) for other in (first, last))
            after = launch(peers, (0, 1, 2), lambda c, m: c.all_reduce(m, ones, REDUCERS["sum"])[0])
            assert [array.tolist() for array in results(after)] == [[3, 3]] * 3
    assert time.monotonic() - begin < 60


def test_accelerators_are_named_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLAGOS_COLLECTIVE_TIMEOUT", "1")
    rendezvous = Rendezvous("%all-gather.7", (0, 1), 1)
    with (
        processes((0, 1), accelerated=True) as peers,
        pytest.raises(RendezvousFailed, match=r"At device 1\.") as failed,
    ):
        peers[1].communicator((0, 1)).all_gather(rendezvous, [torch.ones(2)], 0)
    assert "The devices [0, 1] did not come together over gloo" in str(failed.value)


def test_a_process_that_does_not_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLAGOS_COLLECTIVE_TIMEOUT", "1")
    rendezvous = Rendezvous("%all-gather.7", (0, 1), 0)
    with processes((0, 1)) as peers, pytest.raises(RendezvousFailed, match=r"\[0, 1\] did not come together over gloo"):
        peers[0].communicator((0, 1)).all_gather(rendezvous, [torch.ones(2)], 0)


def test_a_process_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLAGOS_COLLECTIVE_TIMEOUT", "1")

    def work(communicator: Communicator, rendezvous: Rendezvous) -> Any:
        communicator.all_gather(rendezvous, [torch.ones(2)], 0)
        return None if rendezvous.rank == 1 else communicator.all_gather(rendezvous, [torch.ones(2)], 0)

    with processes((0, 1)) as peers:
        overdue, fine = launch(peers, (0, 1), work)
    assert fine is None
    assert isinstance(overdue, CollectiveOverdue)
    assert overdue.code is StatusCode.DEADLINE_EXCEEDED
    assert "%collective.1 among the processes [0, 1] gave up after" in str(overdue)


@pytest.mark.parametrize("text", ["soon", "0", "-1", "nan", "inf"])
def test_the_timeout_is_a_number_of_seconds(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("FLAGOS_COLLECTIVE_TIMEOUT", text)
    rendezvous = Rendezvous("%all-gather.7", (0, 1), 0)
    with processes((0, 1)) as peers, pytest.raises(CollectiveTimeoutInvalid, match="FLAGOS_COLLECTIVE_TIMEOUT is"):
        peers[0].communicator((0, 1)).all_gather(rendezvous, [torch.ones(2)], 0)


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., list[int]]]:
    """Registers a backend for the host, as FlagCX's own module does; gives the ranks that it made groups for."""
    for table in ("backend_list", "backend_capability", "backend_type_map", "default_device_backend_map", "_plugins"):
        monkeypatch.setattr(dist.Backend, table, type(getattr(dist.Backend, table))(getattr(dist.Backend, table)))
    names: list[str] = []

    def register(name: str = "flagcx", group: Any = dist.ProcessGroupGloo, *, extended: bool = False) -> list[int]:
        made: list[int] = []

        def create(store: dist.Store, rank: int, size: int, timeout: timedelta) -> Any:
            made.append(rank)
            return group(store, rank, size, timeout)

        def create_extended(facts: Any, _: object) -> Any:
            return create(facts.store, facts.group_rank, facts.group_size, facts.timeout)

        function = create_extended if extended else create
        dist.Backend.register_backend(name, function, extended_api=extended, devices=["cpu"])
        names.append(name)
        return made

    yield register
    for name in names:
        delattr(dist.Backend, name.upper())


def sums(peers: list[ContextPeers]) -> list[Any]:
    return launch(peers, (0, 1), lambda c, m: c.all_reduce(m, [torch.ones(2)], REDUCERS["sum"])[0])


@pytest.mark.parametrize("extended", [False, True])
def test_flagcx_goes_before_all_others(registered: Callable[..., list[int]], extended: bool) -> None:
    made = registered(extended=extended)
    assert backend_for("cpu") == "flagcx"
    with processes((0, 1)) as peers:
        assert all(array.tolist() == [2, 2] for array in results(sums(peers)))
    assert sorted(made) == [0, 1]


def test_accelerators_of_one_process_meet_over_flagcx(registered: Callable[..., list[int]]) -> None:
    made = registered(extended=True)
    with processes((0, 0), accelerated=True) as peers:
        assert all(array.tolist() == [2, 2] for array in results(sums(peers)))
    assert sorted(made) == [0, 1]


@pytest.mark.parametrize("vendors", [("nvidia", "nvidia"), ("nvidia", "metax")])
def test_members_tell_one_another_what_flagcx_is_to_them(
    registered: Callable[..., list[int]], monkeypatch: pytest.MonkeyPatch, vendors: tuple[str, str]
) -> None:
    registered()
    with processes((0, 1)) as peers:
        for own, vendor in zip(peers, vendors, strict=True):
            monkeypatch.setattr(own, "_vendor", lambda vendor=vendor: vendor)
        results(sums(peers))
        made = [(transport.unlike_nccl, transport.coalesces) for own in peers for transport in own._transports.values()]
    alike, different = ("", True), ("FlagCX calls another library for devices of metax", False)
    assert made == [alike if vendors[0] == vendors[1] else different] * 2


def test_flagcx_is_not_waited_for_when_somebody_does_not_come(
    registered: Callable[..., list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It connects at the first collective, and without a limit: who is missing is found before."""
    monkeypatch.setenv("FLAGOS_COLLECTIVE_TIMEOUT", "1")
    made = registered(extended=True)
    rendezvous = Rendezvous("%all-gather.7", (0, 1), 0)
    with processes((0, 1)) as peers, pytest.raises(RendezvousFailed, match=r"did not come together over flagcx"):
        peers[0].communicator((0, 1)).all_gather(rendezvous, [torch.ones(2)], 0)
    assert made == []


def test_what_a_transport_says_on_several_lines_is_told(registered: Callable[..., list[int]]) -> None:
    """FlagCX names the place on the first line and the cause below."""

    class Broken:
        def __init__(self, *_: object) -> None: ...

        def abort(self) -> None: ...

        def allreduce(self, *_: object) -> Any:
            raise RuntimeError("FLAGCX error in: backend.cpp:805, \nflagcxRemoteError: A call failed.\nLast error:\n")

    registered(group=Broken, extended=True)
    with processes((0, 1)) as peers:
        outcomes = sums(peers)
    for outcome in outcomes:
        assert isinstance(outcome, CollectiveFailed | CollectiveAborted)
    failed = next(outcome for outcome in outcomes if isinstance(outcome, CollectiveFailed))
    assert "(flagcx): FLAGCX error in: backend.cpp:805; flagcxRemoteError: A call failed; Last error. At" in str(failed)


def test_the_user_names_the_backend(registered: Callable[..., list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    registered()
    monkeypatch.setenv("FLAGOS_COLLECTIVE_BACKEND", "gloo")
    assert backend_for("cpu") == "gloo"
    monkeypatch.setenv("FLAGOS_COLLECTIVE_BACKEND", "FlagCX")
    assert backend_for("cpu") == "flagcx"
    monkeypatch.setenv("FLAGOS_COLLECTIVE_BACKEND", "nccl")
    with processes((0, 1)) as peers:
        for outcome in sums(peers):
            assert isinstance(outcome, RendezvousFailed | CollectiveAborted)
            assert "FLAGOS_COLLECTIVE_BACKEND is nccl, which torch.distributed does not have for cpu" in str(outcome)


def test_a_flagcx_that_does_not_load_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "flagcx.py").write_text("raise ImportError('libflagcx.so: cannot open shared object file')\n")
    monkeypatch.delitem(sys.modules, "flagcx", raising=False)  # another test's
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(RuntimeError, match=r"does not load \(libflagcx.so: cannot open.*FLAGOS_COLLECTIVE_BACKEND"):
        backend_for("cpu")
    monkeypatch.setenv("FLAGOS_COLLECTIVE_BACKEND", "gloo")
    assert backend_for("cpu") == "gloo"


def test_without_flagcx_pytorch_s_own_choice_counts() -> None:
    assert backend_for("cpu") == "gloo"
    assert backend_for("cuda") == "nccl"
    with pytest.raises(RuntimeError, match=r"torch\.distributed has no backend for toaster"):
        backend_for("toaster")
