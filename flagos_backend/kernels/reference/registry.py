"""The table of reference kernels. A kernel is prepared once from its instruction, at compile time, and called by the
plan at each run; families of kernels register here by decorator. Between the IR and compile/plan_builder.py."""

from __future__ import annotations

import enum
import functools
import importlib
import pkgutil
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

from flagos_backend.collectives.communicator import Communicator, Rendezvous
from flagos_backend.errors import UnsupportedOpcode
from flagos_backend.ir.hlo import Instruction
from flagos_backend.ir.opcode import Opcode
from flagos_backend.ir.participants import Position
from flagos_backend.ir.types import Shape
from flagos_backend.process.torch_loading import torch

# An array in its storage dtype (storage.py), a tuple of values, or () for a token.
Value = torch.Tensor | tuple["Value", ...]


class HostCallback(Protocol):
    """Calls the host function ``identifier``. Arguments and results are contiguous CPU arrays; tokens are left out."""

    def __call__(
        self, identifier: int, arguments: Sequence[torch.Tensor], shapes: Sequence[Shape], results: Sequence[Shape]
    ) -> Sequence[torch.Tensor]: ...


class Conditionals(Protocol):
    """What data decides, where a launch is recorded: the device decides it when the record runs. A flag is a PRED of
    the device."""

    def run_if(self, chosen: torch.Tensor, body: Callable[[], None]) -> None:
        """``body`` runs if the flag holds."""

    def run_while(self, another: torch.Tensor, body: Callable[[], torch.Tensor]) -> None:
        """``body`` runs as long as the flag, and then the one that it returned last, holds."""


class Communication(Protocol):
    """Collectives beside what does not wait for them, where a launch is recorded."""

    def started(self, collective: Instruction, operands: Sequence[Any]) -> AbstractContextManager[None]:
        """What is enqueued in it, of ``operands``, need not have ended for what is enqueued behind it, up to a wait for
        the collective."""

    def wait(self, collective: Instruction) -> None:
        """For it, and for what was started before it."""

    def wait_for_all(self) -> None:
        """For all that was started."""


@dataclass(slots=True)
class Run:
    """What one launch on one device knows. Kernels may read it and must not keep it."""

    device_ordinal: int = 0
    replica_id: int = 0
    partition_id: int = 0
    num_replicas: int = 1
    num_partitions: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    communicator: Communicator | None = None  # where the devices of the launch meet for collectives
    host_callback: HostCallback | None = None
    asynchronous: bool = False  # the device runs behind the host: who reads a value on the host waits
    conditionals: Conditionals | None = None  # the launch is recorded, and what data decides goes there
    communication: Communication | None = None  # the launch is recorded, and its collectives go there

    def rendezvous(self, channel: Hashable) -> Rendezvous:
        """Of all devices of the launch."""
        position = Position(self.replica_id, self.partition_id, self.num_replicas, self.num_partitions)
        return Rendezvous(channel, tuple(range(self.num_replicas * self.num_partitions)), position.flattened)


# Called as kernel(run, *operand values); returns the instruction's value. Must be safe to call from several threads.
Kernel = Callable[..., Any]
Preparer = Callable[[Instruction], Kernel]


class Storage(enum.Enum):
    """Where a kernel's results lie. The plan writes into a value in place only where this proves it safe."""

    SHARED = enum.auto()  # may lie in an operand's storage, elements may overlap (expand): the safe assumption
    VIEW = enum.auto()  # may lie in an operand's storage, but its elements overlap only where the operand's do
    FRESH = enum.auto()  # each array in new storage of its own, no two elements in one place


@dataclass(frozen=True, slots=True)
class InPlaceKernel:
    """A variant that writes its result over operands which nobody needs any more.

    Result array i must be returned as operand ``operands[i]``, updated. The plan calls this only when all of
    ``operands`` are dead after the call, share storage with nothing alive and have no overlapping elements.
    """

    kernel: Kernel
    operands: tuple[int, ...]


InPlacePreparer = Callable[[Instruction], InPlaceKernel | None]


# Where the results lie, for opcodes whose instructions differ in it.
StorageRule = Callable[[Instruction], Storage]


@dataclass(frozen=True, slots=True)
class _Entry:
    preparer: Preparer
    storage: Storage | StorageRule
    elementwise: bool


_KERNELS: dict[Opcode, _Entry] = {}
_IN_PLACE: dict[Opcode, InPlacePreparer] = {}


def kernel(
    *opcodes: Opcode, storage: Storage | StorageRule = Storage.SHARED, elementwise: bool = False
) -> Callable[[Preparer], Preparer]:
    """Registers the decorated function as what prepares the kernel of ``opcodes``.

    ``elementwise``: the kernel of a scalar instruction computes on arrays of any shapes that broadcast just as well.

    The preparer resolves attributes, chooses paths and builds tables, so that the kernel it returns does the least
    Python work possible. It raises an error of errors.py for what it cannot compute. It may return ``identity``.
    """

    def register(preparer: Preparer) -> Preparer:
        for opcode in opcodes:
            if opcode in _KERNELS:
                raise ValueError(f"{opcode} has two reference kernels")
            _KERNELS[opcode] = _Entry(preparer, storage, elementwise)
        return preparer

    return register


def in_place(*opcodes: Opcode) -> Callable[[InPlacePreparer], InPlacePreparer]:
    """Registers the decorated function as what prepares the in-place variant of ``opcodes``; it may return None."""

    def register(preparer: InPlacePreparer) -> InPlacePreparer:
        for opcode in opcodes:
            if opcode in _IN_PLACE:
                raise ValueError(f"{opcode} has two in-place kernels")
            _IN_PLACE[opcode] = preparer
        return preparer

    return register


def identity(run: Run, operand: Value, *_: Value) -> Value:
    """The kernel of an instruction that changes nothing; the plan spends no step on it."""
    return operand


@functools.cache
def _load_families() -> None:
    # Families import this module, so they are imported at first use and not here.
    package = importlib.import_module("flagos_backend.kernels.reference")
    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"{package.__name__}.{module.name}")


def prepare(instruction: Instruction) -> Kernel:
    """The kernel of ``instruction``. Raises UnsupportedOpcode, or what the family raises for a type it lacks."""
    return _entry(instruction).preparer(instruction)


def prepare_in_place(instruction: Instruction) -> InPlaceKernel | None:
    """The in-place variant, or None when the instruction has none."""
    preparer = _IN_PLACE.get(instruction.opcode)
    return preparer(instruction) if preparer else None


def storage_of(instruction: Instruction) -> Storage:
    """Where the results of ``instruction``'s kernel lie."""
    storage = _entry(instruction).storage
    return storage if isinstance(storage, Storage) else storage(instruction)


def is_elementwise(opcode: Opcode) -> bool:
    """Whether the kernel of a scalar instruction of ``opcode`` works on arrays element by element."""
    _load_families()
    return opcode in _KERNELS and _KERNELS[opcode].elementwise


def supported_opcodes() -> frozenset[Opcode]:
    """The opcodes that have a reference kernel; structure (tuple, call, while, ...) belongs to the plan."""
    _load_families()
    return frozenset(_KERNELS)


def _entry(instruction: Instruction) -> _Entry:
    _load_families()
    entry = _KERNELS.get(instruction.opcode)
    if entry is None:
        raise UnsupportedOpcode.at(instruction, opcode=instruction.opcode, reason="it has no kernel")
    return entry
