"""Collectives: who takes part (groups), the Communicator interface, and its implementations: in_process for devices
that share this process's memory, spanning for the others, over a transport of torch.distributed."""

from flagos_backend.collectives.communicator import Communicator, Reducer, Rendezvous
from flagos_backend.collectives.in_process import InProcessCommunicator

__all__ = ["Communicator", "InProcessCommunicator", "Reducer", "Rendezvous"]
