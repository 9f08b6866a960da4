"""Fields of instructions that this schema does not know: one may change what its instruction means. For graph.py."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import Any, Final

from google.protobuf.unknown_fields import UnknownFieldSet

from flagos_backend.process import interrupts

#: Fields of HloInstructionProto that do not change the meaning: statistics_viz, original_value, and retired ones.
_HARMLESS: Final = frozenset({78, 82, 83, 84, 88})
#: Messages that are looked at before an interrupt is answered, some tens of milliseconds.
_AT_ONCE: Final = 4096


def unknown_fields(instructions: Iterable[Any]) -> dict[int, int]:
    """By an instruction's position, the number of the first field that is unknown and not harmless.

    protobuf makes each field by a call of Python and does not look whether that failed: a KeyboardInterrupt in it ends
    the process with SIGSEGV (seen with 7.36). Interrupts wait meanwhile.
    """
    found: dict[int, int] = {}
    numbered = enumerate(instructions)
    while chunk := list(islice(numbered, _AT_ONCE)):
        with interrupts.deferred():
            for position, proto in chunk:
                number = _first(proto)
                if number is not None:
                    found[position] = number
    return found


def _first(proto: Any) -> int | None:
    for field in UnknownFieldSet(proto):  # type: ignore[attr-defined]
        # An empty message or a zero says what its absence says.
        if field.field_number not in _HARMLESS and field.data:
            return int(field.field_number)
    return None
