"""What launches of an isolated backend send: counted in the rings that this process shares with the backend's."""

from __future__ import annotations

import ctypes
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from cpu.native.harness import add_one, compile, get, put
from plugin_abi import loader
from plugin_abi.host import Context
from support import isolation as isolated
from support.isolation_ring import HEAD, IN_RING, PAGE, RECORD, RING_BYTES, WRITTEN, padded

LAUNCHES = 100
CALLS, REPLIES = 0, 1
EXECUTE, BUFFER_DESTROY = 26, 12


class Rings:
    """Those of all channels of this process, where they are mapped."""

    def __init__(self) -> None:
        size = PAGE + 2 * RING_BYTES
        lines = Path("/proc/self/maps").read_text().splitlines()
        places = [re.match(r"([0-9a-f]+)-([0-9a-f]+) .*/memfd:flagos", line) for line in lines]
        spans = [(int(place[1], 16), int(place[2], 16)) for place in places if place]
        self.places = [begin for begin, end in spans if end - begin == size]
        self.begun = [[self._written(place, ring) for ring in (CALLS, REPLIES)] for place in self.places]

    @staticmethod
    def _written(place: int, ring: int) -> int:
        return ctypes.c_uint64.from_address(place + 8 * (ring * HEAD + WRITTEN)).value

    def messages(self, ring: int) -> Iterator[bytes]:
        """What was written since; no more than a ring holds."""
        for place, begun in zip(self.places, self.begun, strict=True):
            base, position, end = place + PAGE + ring * RING_BYTES, begun[ring], self._written(place, ring)
            assert end - position <= RING_BYTES
            held = ctypes.string_at(base, RING_BYTES) * 2
            while position < end:
                size, kind, _ = RECORD.unpack_from(held, position % RING_BYTES)
                assert kind == IN_RING
                at = position % RING_BYTES + RECORD.size
                yield held[at : at + size]
                position += RECORD.size + padded(size)


@pytest.fixture
def context() -> Iterator[Context]:
    accepted = loader.load(environment=isolated.environment()).accepted
    assert accepted is not None
    with Context(accepted) as context:
        yield context


def test_a_launch_is_one_call_and_one_reply(context: Context) -> None:
    """Also where each launch lets go of the last one's result, which the next call takes along."""
    executable = compile(context, add_one(8, donate=False))
    value = put(context.addressable_devices[0].default_memory, np.zeros(8, np.float32))
    (value,) = executable.execute([[value]])[0][0]
    rings = Rings()
    assert rings.places
    for _ in range(LAUNCHES):
        outputs, _events = executable.execute([[value]])
        value = outputs[0][0]
    call = isolated.messages()["Call"]
    counted = Counter(call.FromString(message).method for message in rings.messages(CALLS))
    replies = sum(1 for _ in rings.messages(REPLIES))
    # What nobody took along within half a second goes by itself, on a machine that stood still for so long.
    counted.pop(BUFFER_DESTROY, None)
    assert counted == {EXECUTE: LAUNCHES}
    assert replies == LAUNCHES
    np.testing.assert_array_equal(get(value), np.full(8, LAUNCHES + 1, np.float32))
