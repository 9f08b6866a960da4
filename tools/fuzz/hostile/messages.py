"""Protobuf messages with fields changed: by their descriptors, so that what comes out parses again."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from typing import Any, Final

from google.protobuf.descriptor import FieldDescriptor

from flagos_backend.ir.opcode import Opcode
from tools.fuzz.hostile.mutations import NUMBERS, TEXTS, changed_bytes, changed_json

_RANGES: Final = {
    **dict.fromkeys((FieldDescriptor.CPPTYPE_INT32, FieldDescriptor.CPPTYPE_ENUM), (-(1 << 31), 1 << 31)),
    FieldDescriptor.CPPTYPE_INT64: (-(1 << 63), 1 << 63),
    FieldDescriptor.CPPTYPE_UINT32: (0, 1 << 32),
    FieldDescriptor.CPPTYPE_UINT64: (0, 1 << 64),
}
_FLOATS: Final = (0.0, -0.0, 1.0, -1.0, 1e300, float("inf"), float("-inf"), float("nan"), 1e-45)
_SMALL: Final = (-2, -1, 0, 1, 2, 3, 5, 7, 64, 1000)
#: Lists grow to no more.
_MAX_LENGTH: Final = 2000


def change_message(rng: random.Random, message: Any) -> None:
    """One field of the message or of one below it."""
    below = list(_below(message))
    # Long lists of instructions hold most messages; what stands above them gets its share.
    owner = rng.choice(below) if rng.randrange(4) else rng.choice(below[:8])
    fields = owner.DESCRIPTOR.fields
    present = [field for field, _ in owner.ListFields()]
    field = rng.choice(present) if present and rng.randrange(4) else rng.choice(fields)
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        _change_map(rng, owner, field)
    elif field.is_repeated:
        _change_list(rng, getattr(owner, field.name), field, below)
    elif not rng.randrange(8):
        owner.ClearField(field.name)
    elif field.message_type is not None:
        _change_submessage(rng, getattr(owner, field.name), field, below)
    else:
        setattr(owner, field.name, _scalar(rng, field, getattr(owner, field.name)))


def _below(message: Any) -> Iterator[Any]:
    """The message and those below it, those above first."""
    level = [message]
    while level:
        yield from level
        level = [child for parent in level for child in _children(parent)]


def _children(message: Any) -> Iterator[Any]:
    for field, value in message.ListFields():
        if field.message_type is None or field.message_type.GetOptions().map_entry:
            continue
        yield from value if field.is_repeated else (value,)


def _alike(rng: random.Random, field: Any, below: list[Any]) -> Any:
    """A message of the field's type from elsewhere; None where there is none."""
    found = [message for message in below if message.DESCRIPTOR is field.message_type]
    return rng.choice(found) if found else None


def _change_submessage(rng: random.Random, value: Any, field: Any, below: list[Any]) -> None:
    other = _alike(rng, field, below)
    if other is not None and rng.randrange(2):
        value.CopyFrom(type(other).FromString(other.SerializeToString()))
    elif other is not None:
        value.MergeFrom(type(other).FromString(other.SerializeToString()))
    else:
        value.SetInParent()
        change_message(rng, value)


def _change_list(rng: random.Random, values: Any, field: Any, below: list[Any]) -> None:
    kind = rng.randrange(6)
    if kind == 0 and values:
        del values[rng.randrange(len(values))]
    elif kind == 1 and values:
        del values[:]
    elif kind == 2 and values and len(values) < _MAX_LENGTH:
        at = rng.randrange(len(values))
        values.extend([values[at]] * rng.choice((1, 1, 40)))
    elif kind == 3 and len(values) > 1:
        first, second = rng.randrange(len(values)), rng.randrange(len(values))
        order = list(values)
        order[first], order[second] = order[second], order[first]
        order = [type(v).FromString(v.SerializeToString()) for v in order] if field.message_type is not None else order
        del values[:]
        values.extend(order)
    elif field.message_type is not None:
        other = _alike(rng, field, below)
        added = values.add()
        if other is not None:
            added.MergeFrom(type(other).FromString(other.SerializeToString()))
        else:
            change_message(rng, added)
    elif values and rng.randrange(3):
        at = rng.randrange(len(values))
        values[at] = _scalar(rng, field, values[at])
    else:
        values.append(_scalar(rng, field, values[-1] if values else None))


def _change_map(rng: random.Random, owner: Any, field: Any) -> None:
    key, value = field.message_type.fields
    mapping = getattr(owner, field.name)
    if mapping and rng.randrange(2):
        del mapping[rng.choice(sorted(mapping))]
    elif value.message_type is not None:
        change_message(rng, mapping[_scalar(rng, key, None)])
    else:
        mapping[_scalar(rng, key, None)] = _scalar(rng, value, None)


def _scalar(rng: random.Random, field: Any, old: Any) -> Any:
    """Another value of the field's type."""
    match field.cpp_type:
        case FieldDescriptor.CPPTYPE_BOOL:
            return not old
        case FieldDescriptor.CPPTYPE_STRING if field.type == FieldDescriptor.TYPE_BYTES:
            if old and old.startswith(b"{") and rng.randrange(4):
                with contextlib.suppress(ValueError):  # bytes of it may be changed already
                    return changed_json(rng, old)
            return changed_bytes(rng, old or bytes(8))
        case FieldDescriptor.CPPTYPE_STRING:
            return _text(rng, field.name)
        case FieldDescriptor.CPPTYPE_DOUBLE | FieldDescriptor.CPPTYPE_FLOAT:
            return rng.choice(_FLOATS)
        case FieldDescriptor.CPPTYPE_ENUM if rng.randrange(4):
            return rng.choice(field.enum_type.values).number
    low, high = _RANGES[field.cpp_type]
    value = rng.choice((*_SMALL, (old or 0) + rng.choice((-1, 1)), rng.choice(NUMBERS)))
    return value if low <= value < high else rng.choice((0, 1, low, high - 1))


def _text(rng: random.Random, name: str) -> str:
    if name == "opcode":
        return rng.choice(tuple(Opcode)).value if rng.randrange(8) else rng.choice(TEXTS[:8]).replace("\ud800", "")
    return rng.choice(TEXTS).replace("\ud800", "")
