"""HLO's replica groups: what their numbers name follows from opcode, channel and use_global_device_ids."""

from __future__ import annotations

import pytest

from flagos_backend.ir.attributes import CollectiveAttributes
from flagos_backend.ir.opcode import Opcode
from flagos_backend.ir.participants import GroupMode, Position, group_mode, participants_of


@pytest.mark.parametrize(
    ("opcode", "channel", "global_ids", "mode"),
    [
        (Opcode.ALL_REDUCE, None, False, GroupMode.CROSS_REPLICA),
        (Opcode.ALL_REDUCE, 1, False, GroupMode.CROSS_REPLICA_AND_PARTITION),
        (Opcode.ALL_REDUCE, 1, True, GroupMode.FLATTENED_ID),
        (Opcode.ALL_GATHER, 1, True, GroupMode.FLATTENED_ID),
        (Opcode.REDUCE_SCATTER, 1, False, GroupMode.CROSS_REPLICA_AND_PARTITION),
        (Opcode.ALL_TO_ALL, None, False, GroupMode.CROSS_REPLICA),
        (Opcode.ALL_TO_ALL, 1, False, GroupMode.CROSS_PARTITION),
        (Opcode.COLLECTIVE_PERMUTE, 1, False, GroupMode.CROSS_PARTITION),
    ],
)
def test_mode(opcode: Opcode, channel: int | None, global_ids: bool, mode: GroupMode) -> None:
    assert group_mode(opcode, channel, global_ids) is mode


@pytest.mark.parametrize(
    ("opcode", "attributes", "participants"),
    [
        # This device: replica 1 of 2, partition 2 of 3; flattened id 5.
        (Opcode.ALL_REDUCE, CollectiveAttributes(((1, 0),)), (5, 2)),
        (Opcode.ALL_REDUCE, CollectiveAttributes(((0,), (1,))), (5,)),
        (Opcode.ALL_REDUCE, CollectiveAttributes(), (2, 5)),
        (Opcode.ALL_REDUCE, CollectiveAttributes(((1, 0),), channel_id=1), (3, 4, 5, 0, 1, 2)),
        (Opcode.ALL_REDUCE, CollectiveAttributes(((0,), (1,)), channel_id=1), (3, 4, 5)),
        (Opcode.ALL_REDUCE, CollectiveAttributes(((5, 1), (0, 2, 3, 4)), 1, True), (5, 1)),
        (Opcode.ALL_TO_ALL, CollectiveAttributes(((2, 0), (1,)), channel_id=1), (5, 3)),
        (Opcode.ALL_TO_ALL, CollectiveAttributes(channel_id=1), (3, 4, 5)),
        (Opcode.COLLECTIVE_BROADCAST, CollectiveAttributes(((0, 1),), channel_id=1), ()),
    ],
)
def test_participants(opcode: Opcode, attributes: CollectiveAttributes, participants: tuple[int, ...]) -> None:
    assert participants_of(opcode, attributes, Position(1, 2, 2, 3)) == participants
