"""Collectives: who takes part (groups), the Communicator interface, and its implementations: in_process for the devices
of one process, process_spanning for those of several, over a transport of torch.distributed."""

from flagos_backend.collectives.communicator import Communicator, Meeting, Reducer
from flagos_backend.collectives.in_process import InProcessCommunicator

__all__ = ["Communicator", "InProcessCommunicator", "Meeting", "Reducer"]
