"""Peers that the host itself knows: the process groups of a program's envelope, found by their names. The host that
compiles with PyTorch has them already, so nothing meets a second time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _resolve_process_group

from flagos_backend.collectives.communicator import Rendezvous
from flagos_backend.collectives.transport import Transport
from flagos_backend.devices.process_groups import backend_of
from flagos_backend.errors import ProcessGroupMissing
from flagos_backend.importer.program import ProcessGroups


@dataclass(frozen=True, slots=True)
class HostGroups:
    """Participants are the host's processes: each has one device of the launch, of torch's type ``device_type``."""

    groups: ProcessGroups
    device_type: str = "cpu"
    # They may register the memory of what is recorded with one another, which only works if all record at one time.
    no_recording: ClassVar[str] = "its groups are the program's own"

    def process_of(self, participant: int) -> int:
        return participant

    def member_of(self, participant: int) -> int:
        return participant

    def check(self, rendezvous: Rendezvous) -> None:
        """Nothing that is recorded meets in them."""

    def launched(self, rendezvous: Rendezvous) -> None:
        """Nothing that is recorded meets in them."""

    def abort(self, reason: str) -> None:
        """Does nothing: the groups are the host's, and it ends them, as it does in eager mode."""

    def transport(self, rendezvous: Rendezvous) -> Transport:
        """Raises ProcessGroupMissing when this process has no group of that name, or one of other processes."""
        name = self.groups.names.get(rendezvous.channel_id or 0)
        if name is None:
            raise ProcessGroupMissing(
                channel=rendezvous.channel, group="", reason="the program names no group for its channel"
            )
        try:
            group = _resolve_process_group(name)  # type: ignore[arg-type]
            processes = tuple(dist.get_process_group_ranks(group))
            # A group for PyTorch's device flagos has one whose memory is this type's.
            backend = backend_of(group, self.device_type, torch._C._get_privateuse1_backend_name())
        except (RuntimeError, ValueError, KeyError) as error:
            reason = str(error).partition("\n")[0]
            raise ProcessGroupMissing(channel=rendezvous.channel, group=name, reason=reason) from error
        if set(processes) != set(rendezvous.participants):
            reason = f"it has the processes {list(processes)}, the collective {list(rendezvous.participants)}"
            raise ProcessGroupMissing(channel=rendezvous.channel, group=name, reason=reason)
        if backend is None:
            reason = f"it has no backend of torch.distributed for {self.device_type}"
            raise ProcessGroupMissing(channel=rendezvous.channel, group=name, reason=reason)
        return Transport(backend, processes, group.rank(), name, str(backend.name()))
