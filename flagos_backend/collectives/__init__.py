"""Collectives: who takes part (groups), the Communicator interface, and its implementations."""

from flagos_backend.collectives.communicator import Communicator, Meeting
from flagos_backend.collectives.in_process import InProcessCommunicator

__all__ = ["Communicator", "InProcessCommunicator", "Meeting"]
