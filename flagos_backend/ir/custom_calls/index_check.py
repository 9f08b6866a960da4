"""The custom call that checks integers before they tell places: front ends emit it beside gathers and scatters, which
clamp and leave out what lies outside without a word."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from flagos_backend.ir.attributes import CustomCallAttributes
from flagos_backend.ir.config import parse_config
from flagos_backend.ir.hlo import Instruction
from flagos_backend.ir.opcode import Opcode

TARGET = "flagos.check_indices"
#: What ``message`` has in the place of the first index that lies outside, and of its number in the order of memory.
INDEX, POSITION = "{index}", "{position}"


@dataclass(frozen=True, slots=True)
class IndexCheck:
    """Indices are at least ``low`` and less than ``high``; else the program fails with ``exception``, a class of
    Python, and its ``message``."""

    low: int
    high: int
    exception: str
    message: str

    def attributes(self) -> CustomCallAttributes:
        """Those of the call, which has the indices as its operand and no result."""
        return CustomCallAttributes(TARGET, json.dumps(asdict(self)).encode(), has_side_effect=True)


def index_check_of(instruction: Instruction) -> IndexCheck | None:
    """What a well-formed call checks; None for any other instruction."""
    attributes = instruction.attributes
    if not isinstance(attributes, CustomCallAttributes) or instruction.opcode is not Opcode.CUSTOM_CALL:
        return None
    if attributes.target != TARGET or len(instruction.operands) != 1:
        return None
    try:
        config = parse_config(attributes.backend_config)
    except ValueError:
        return None
    if not isinstance(config, dict) or set(config) != set(IndexCheck.__dataclass_fields__):
        return None
    low, high, exception, message = (config[name] for name in IndexCheck.__dataclass_fields__)
    numbers = all(isinstance(bound, int) and not isinstance(bound, bool) for bound in (low, high))
    if not numbers or not isinstance(exception, str) or not isinstance(message, str):
        return None
    return IndexCheck(low, high, exception, message)
