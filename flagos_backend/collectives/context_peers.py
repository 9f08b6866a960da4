"""The processes and devices of one context, found through the host's key-value store: a group of torch.distributed for
each set of devices that meets. Gives launches their communicators."""

from __future__ import annotations

import functools
import logging
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from typing import Any, Final, Protocol, cast

from torch._C._distributed_c10d import HashStore, PrefixStore, Store

from flagos_backend.collectives.communicator import Communicator, Rendezvous
from flagos_backend.collectives.flagcx import unlike_nccl
from flagos_backend.collectives.multi_process import MultiProcessCommunicator
from flagos_backend.collectives.options import timeout_seconds
from flagos_backend.collectives.transport import Transport
from flagos_backend.collectives.watchdog import Event, Watchdog
from flagos_backend.devices.process_groups import FLAGCX, backend_for, make_backend, members_text, reason_of
from flagos_backend.devices.vendors import product_of, vendor_of
from flagos_backend.errors import CollectiveAborted, CollectiveOverdue, RendezvousFailed, StatusCode
from flagos_backend.process.torch_loading import torch

# (key, timeout in ms; 0 does not wait) -> the value or a status code; (key, value) -> a status code.
KeyValueGet = Callable[[str, int], bytes | int]
KeyValuePut = Callable[[str, bytes], int]

logger = logging.getLogger("flagos_backend")

_PREFIX: Final = "flagos/collectives"
# What a member of a group says that has come.
_HERE: Final = "here"
# They notice themselves what takes too long.
_WATCHFUL: Final = frozenset({"gloo", "nccl"})
# What they enqueue can be recorded, and repeated with other arrays. FlagCX calls NCCL on its own stream, which waits
# for the one that is recorded, and is waited for there: the capture has it, too.
_RECORDED: Final = frozenset({"nccl", FLAGCX})
# Several of their operations can be begun as one. FlagCX's end with a wait of the host between chips of several
# vendors, and are put off on some: not there.
_COALESCING: Final = frozenset({"nccl", FLAGCX})
# Would have the members tell each other where the memory of what is recorded lies: all would have to record at one
# time, and its addresses could not be replaced any more.
_REGISTERS: Final = "NCCL_GRAPH_REGISTER"


class Recorded(Protocol):
    """What keeps a graph in which devices meet."""

    def drop(self) -> None:
        """Gives the graph up, for good."""
        ...


class _HostStore(Store):
    """The host's store, as torch.distributed takes one."""

    def __init__(self, get: KeyValueGet, put: KeyValuePut, timeout: float) -> None:
        super().__init__()
        self._get, self._put, self._milliseconds = get, put, int(timeout * 1000)

    def set(self, key: str, value: bytes | str) -> None:
        code = self._put(key, value.encode() if isinstance(value, str) else bytes(value))
        if code:
            raise RuntimeError(f"the key-value store refused to put '{key}' ({StatusCode(code).name})")

    def get(self, key: str) -> bytes:
        value = self._get(key, self._milliseconds)
        if isinstance(value, int):
            raise RuntimeError(f"the key-value store did not give '{key}' ({StatusCode(value).name})")
        return value

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        for key in keys:
            self.get(key)

    def check(self, keys: Sequence[str]) -> bool:
        return not any(isinstance(self._get(key, 0), int) for key in keys)


@dataclass(eq=False)
class ContextPeers:
    """``device_processes``: the process of each device of the context. ``device_type``: torch's name for what they are;
    ``accelerated``: each has memory of its own, and is a member of its own.
    """

    device_processes: tuple[int, ...]
    get: KeyValueGet
    put: KeyValuePut
    device_type: str = "cpu"
    accelerated: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)
    # By the devices that meet, and the member.
    _transports: dict[tuple[tuple[int, ...], int], Transport] = field(default_factory=dict)
    _reason: str = ""
    # torch keeps a store, but not the Python object that it is.
    _stores: list[Store] = field(default_factory=list)
    # Where there is no other process, and the host has no store for this one.
    _own_store: Store = field(default_factory=HashStore)
    _watchdog: Watchdog | None = None
    _recorded: weakref.WeakSet[Recorded] = field(default_factory=weakref.WeakSet)

    @property
    def spans_processes(self) -> bool:
        return len(set(self.device_processes)) > 1

    def member_of(self, device: int) -> int:
        """What a transport knows the device as."""
        return device if self.accelerated else self.device_processes[device]

    def communicator(self, devices: tuple[int, ...]) -> MultiProcessCommunicator:
        """For one launch on these devices."""
        return MultiProcessCommunicator(_LaunchPeers(self, devices))

    @property
    def no_recording(self) -> str:
        """As of Communicator."""
        with self._lock:
            made = list(self._transports.values())
        return self._no_recording_here or next(filter(None, (transport.unlike_nccl for transport in made)), "")

    @functools.cached_property
    def _no_recording_here(self) -> str:
        """As far as this process alone knows. Says in the environment what recording relies on, unless the user did."""
        if not self.accelerated:
            return Communicator.no_recording
        try:
            backend = backend_for(self.device_type)
        except RuntimeError as error:
            return reason_of(error)
        if backend not in _RECORDED:
            return f"{backend} is not known to be recorded"
        if backend == FLAGCX and (reason := unlike_nccl(self._vendor())):
            return reason
        return "" if os.environ.setdefault(_REGISTERS, "0") == "0" else f"{_REGISTERS} is not 0"

    def _vendor(self) -> str:
        """Of this process's devices, as FlagGems names it."""
        return vendor_of(self.device_type, product_of(self.device_type))

    def keep(self, recorded: Recorded) -> None:
        """A transport waits at its end for the graphs that it is in: they are given up first."""
        with self._lock:
            is_over = bool(self._reason)
            if not is_over:
                self._recorded.add(recorded)
        if is_over:
            recorded.drop()

    def transport(self, rendezvous: Rendezvous, devices: Sequence[int], member: int) -> Transport:
        """Among the members that these devices are, for one of them. Each set of devices has its own: in it the order
        of rendezvous is that of the program, while two sets in the same processes know nothing of each other.

        Raises RendezvousFailed when a member does not come, CollectiveAborted after ``abort``.
        """
        key = tuple(sorted(devices)), member
        with self._lock:
            self._raise_if_aborted(rendezvous)
            known = self._transports.get(key)
        if known is not None:
            return known
        # One thread is here for this set of devices and this member: the others of the member wait for what it brings.
        made = self._connect(rendezvous, *key)
        with self._lock:
            self._raise_if_aborted(rendezvous)
            self._transports[key] = made
        return made

    def abort(self, reason: str) -> None:
        """Leaves all groups, so that nobody waits for this process."""
        with self._lock:
            self._reason = self._reason or reason
            transports, self._transports = self._transports, {}
            watchdog, self._watchdog = self._watchdog, None
            graphs = list(self._recorded)
        if watchdog is not None:
            watchdog.close()
        for recorded in graphs:
            recorded.drop()
        for transport in transports.values():
            transport.group.abort()

    def close(self) -> None:
        """The context ends, and its store with it."""
        self.abort("the context is closed")

    def _raise_if_aborted(self, rendezvous: Rendezvous) -> None:
        if self._reason:
            raise CollectiveAborted(reason=self._reason, participant=rendezvous.participant)

    def _connect(self, rendezvous: Rendezvous, devices: tuple[int, ...], member: int) -> Transport:
        members = tuple(sorted({self.member_of(device) for device in devices}))
        kind = "device" if self.accelerated else "process"
        name = ",".join(map(str, devices))
        timeout = timeout_seconds()
        backend, unlike = "torch.distributed", ""
        self._stores.append(_HostStore(self.get, self.put, timeout) if self.spans_processes else self._own_store)
        store = PrefixStore(f"{_PREFIX}/{name}", self._stores[-1])
        rank = members.index(member)
        try:
            backend = backend_for(self.device_type)
            # Who goes without gloo connects at the first collective, where not all give up on who does not come.
            if backend != "gloo":
                own = unlike_nccl(self._vendor()) if backend == FLAGCX else ""
                unlike = _come(store, rank, len(members), timedelta(seconds=timeout), own)
            group = make_backend(backend, store, rank, len(members), timedelta(seconds=timeout))
        except RuntimeError as error:
            raise RendezvousFailed(
                channel=rendezvous.channel,
                backend=backend,
                members=members_text(kind, members),
                member=f"{kind} {member}",
                reason=reason_of(error),
            ) from error
        logger.info("devices %s: %s %d meets the others over %s", name, kind, member, backend)
        coalesces = backend in _COALESCING and not unlike
        transport = Transport(group, members, rank, f"of the devices {name}", backend, kind, unlike, coalesces)
        if backend in _WATCHFUL or self.device_type == "cpu":
            return transport
        return replace(transport, begun=lambda channel: self._note(transport, channel, timeout))

    def check(self, rendezvous: Rendezvous) -> None:
        """Raises CollectiveAborted after ``abort``."""
        with self._lock:
            self._raise_if_aborted(rendezvous)

    def launched(self, rendezvous: Rendezvous, devices: Sequence[int]) -> float:
        """A graph was enqueued in which these devices meet; no transport sees it. Returns for how many seconds whoever
        enqueues more of it on this device need not say so."""
        member = self.member_of(devices[rendezvous.rank])
        with self._lock:
            found = [transport for (_, of), transport in self._transports.items() if of == member]
        watchdog = self._watch()
        if not found or watchdog is None:
            return 0.0
        transport, timeout = max(found, key=lambda transport: transport.size), timeout_seconds()
        described = partial(self._describe, transport, rendezvous.channel, timeout)
        return watchdog.follow(member, self._recorder(), described)

    def _note(self, transport: Transport, channel: object, timeout: float) -> None:
        """What the current device was given to do has to end in time."""
        event, watchdog = self._recorder()(), self._watch()
        if watchdog is not None:
            described = partial(self._describe, transport, channel, timeout)
            watchdog.note(event, transport.members[transport.rank], described)

    def _watch(self) -> Watchdog | None:
        """None once all is over."""
        with self._lock:
            if self._reason:
                return None
            if self._watchdog is None:
                self._watchdog = Watchdog(timeout_seconds(), self.abort)
            return self._watchdog

    def _recorder(self) -> Callable[[], Event]:
        """What records an event on the current device, whichever is the current one then."""
        module = torch.get_device_module(self.device_type)
        if self.device_type == "cpu":  # there is nothing to wait for
            return cast("Callable[[], Event]", module.Event)
        device = module.current_device()

        def record() -> Event:
            event = module.Event(blocking=True)  # whoever waits for it sleeps
            with module.device(device):
                event.record()
            return cast("Event", event)

        return record

    @staticmethod
    def _describe(transport: Transport, channel: object, timeout: float) -> str:
        late = f"the device has not come to its end, and {transport.backend} does not give up by itself"
        return str(CollectiveOverdue(**transport.facts(channel), reason=late, seconds=f"{timeout:g}"))


@dataclass(frozen=True, slots=True)
class _LaunchPeers:
    """The devices of one launch, by participant."""

    peers: ContextPeers
    devices: tuple[int, ...]

    def process_of(self, participant: int) -> int:
        return self.peers.device_processes[self.devices[participant]]

    def member_of(self, participant: int) -> int:
        return self.peers.member_of(self.devices[participant])

    def transport(self, rendezvous: Rendezvous) -> Transport:
        member = self.member_of(rendezvous.participant)
        return self.peers.transport(rendezvous, [self.devices[p] for p in rendezvous.participants], member)

    @property
    def no_recording(self) -> str:
        return self.peers.no_recording

    def check(self, rendezvous: Rendezvous) -> None:
        self.peers.check(rendezvous)

    def launched(self, rendezvous: Rendezvous) -> None:
        # Segments say it each time.
        self.peers.launched(rendezvous, [self.devices[p] for p in rendezvous.participants])

    def abort(self, reason: str) -> None:
        """In one process nobody waits in a group for who failed, as all come before any begins; for who fails just then
        a device waits until it is overdue."""
        if self.peers.spans_processes:
            self.peers.abort(reason)


def _come(store: Any, rank: int, size: int, timeout: timedelta, unlike: str) -> str:
    """Waits for all members. Each says what ``unlike_nccl`` says of it; returns the first of those that is not ""."""
    names = [f"member/{other}" for other in range(size)]
    store.set(names[rank], unlike or _HERE)
    store.wait(names, timeout)
    return next((said for name in names if (said := store.get(name).decode()) != _HERE), "")
