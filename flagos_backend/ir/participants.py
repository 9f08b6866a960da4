"""Who takes part in a collective: HLO's replica groups, read as replicas, partitions or flattened ids."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from flagos_backend.ir.attributes import CollectiveAttributes, Dims
from flagos_backend.ir.opcode import Opcode


class GroupMode(enum.Enum):
    """What the numbers in replica groups name."""

    CROSS_REPLICA = enum.auto()  # replicas; each partition on its own
    CROSS_PARTITION = enum.auto()  # partitions; each replica on its own
    CROSS_REPLICA_AND_PARTITION = enum.auto()  # replicas, with all their partitions
    FLATTENED_ID = enum.auto()  # replica * num_partitions + partition


# These have no use_global_device_ids: a channel alone makes them go between partitions.
_PARTITION_OPCODES = frozenset(
    {Opcode.ALL_TO_ALL, Opcode.RAGGED_ALL_TO_ALL, Opcode.COLLECTIVE_BROADCAST, Opcode.COLLECTIVE_PERMUTE}
)


def group_mode(opcode: Opcode, channel_id: int | None, use_global_device_ids: bool) -> GroupMode:
    """As HLO defines it by opcode, channel_id and use_global_device_ids."""
    if channel_id is None:
        return GroupMode.CROSS_REPLICA
    if use_global_device_ids:
        return GroupMode.FLATTENED_ID
    return GroupMode.CROSS_PARTITION if opcode in _PARTITION_OPCODES else GroupMode.CROSS_REPLICA_AND_PARTITION


@dataclass(frozen=True, slots=True)
class Position:
    """Where one device stands in the launch."""

    replica: int
    partition: int
    num_replicas: int
    num_partitions: int

    @property
    def flattened(self) -> int:
        return self.replica * self.num_partitions + self.partition

    def own_number(self, mode: GroupMode) -> int:
        """The number by which groups of ``mode`` name this device."""
        match mode:
            case GroupMode.CROSS_PARTITION:
                return self.partition
            case GroupMode.FLATTENED_ID:
                return self.flattened
            case _:
                return self.replica

    def flatten(self, mode: GroupMode, number: int) -> tuple[int, ...]:
        """The flattened ids of the devices that ``number`` names, seen from this device."""
        match mode:
            case GroupMode.CROSS_REPLICA:
                return (number * self.num_partitions + self.partition,)
            case GroupMode.CROSS_PARTITION:
                return (self.replica * self.num_partitions + number,)
            case GroupMode.FLATTENED_ID:
                return (number,)
            case GroupMode.CROSS_REPLICA_AND_PARTITION:
                return tuple(number * self.num_partitions + p for p in range(self.num_partitions))

    def all_numbers(self, mode: GroupMode) -> Dims:
        """What an empty list of groups stands for: everybody in one group."""
        counts = {
            GroupMode.CROSS_PARTITION: self.num_partitions,
            GroupMode.FLATTENED_ID: self.num_replicas * self.num_partitions,
        }
        return tuple(range(counts.get(mode, self.num_replicas)))


def participants_of(opcode: Opcode, attributes: CollectiveAttributes, position: Position) -> tuple[int, ...]:
    """The flattened ids of this device's group, in the group's order; empty when no group holds it."""
    mode = group_mode(opcode, attributes.channel_id, attributes.use_global_device_ids)
    own = position.own_number(mode)
    for group in attributes.replica_groups or (position.all_numbers(mode),):
        if own in group:
            return tuple(device for number in group for device in position.flatten(mode, number))
    return ()
