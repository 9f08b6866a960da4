"""Counted loops of every direction and type, against counting them."""

import pytest
from jaxlib import _hlo

from flagos_backend.importer import import_module
from flagos_backend.ir.attributes import WhileAttributes
from flagos_backend.ir.opcode import Opcode
from flagos_backend.passes.inline_calls import inline_calls
from flagos_backend.passes.simplify import simplify
from flagos_backend.passes.trip_count import find_trip_counts
from programs import PROGRAMS


def trip_counts(data):
    module = find_trip_counts(simplify(inline_calls(import_module(data))))
    return [
        i.attributes_as(WhileAttributes).trip_count
        for c in module.computations()
        for i in c.instructions
        if i.opcode is Opcode.WHILE
    ]


def loop(start, limit, step, direction, element_type, *, mirrored=False, update="add"):
    test = "n, i" if mirrored else "i, n"
    text = f"""HloModule m
condition {{
 p = ({element_type}[], f32[]) parameter(0)
 i = {element_type}[] get-tuple-element(p), index=0
 n = {element_type}[] constant({limit})
 ROOT lt = pred[] compare({test}), direction={direction}
}}
body {{
 q = ({element_type}[], f32[]) parameter(0)
 j = {element_type}[] get-tuple-element(q), index=0
 v = f32[] get-tuple-element(q), index=1
 s = {element_type}[] constant({step})
 k = {element_type}[] {update}(j, s)
 w = f32[] add(v, v)
 ROOT r = ({element_type}[], f32[]) tuple(k, w)
}}
ENTRY e {{
 x = f32[] parameter(0)
 z = {element_type}[] constant({start})
 t = ({element_type}[], f32[]) tuple(z, x)
 ROOT loop = ({element_type}[], f32[]) while(t), condition=condition, body=body
}}"""
    return _hlo.hlo_module_from_text(text).as_serialized_hlo_module_proto()


COMPARE = {
    "LT": int.__lt__,
    "LE": int.__le__,
    "GT": int.__gt__,
    "GE": int.__ge__,
    "NE": int.__ne__,
    "EQ": int.__eq__,
}


def counted(start, limit, step, direction, low, high):
    """Runs the loop; None when it needs a value outside the type or more than 2000 rounds."""
    count = 0
    while COMPARE[direction](start, limit):
        start, count = start + step, count + 1
        if not low <= start <= high or count > 2000:
            return None
    return count


@pytest.mark.parametrize("direction", COMPARE)
def test_every_small_loop(direction):
    """All starts, limits and steps around the edges of s8 and u8: the count is right, or it is not claimed."""
    claimed = 0
    for element_type, low, high in (("s8", -128, 127), ("u8", 0, 255)):
        edges = sorted({low, low + 1, 0, 1, 7, high - 1, high})
        for start in edges:
            for limit in edges:
                for step in (1, 3, -1, -2, 0):
                    update, written = ("subtract", -step) if step < 0 else ("add", step)
                    found = trip_counts(loop(start, limit, written, direction, element_type, update=update))[0]
                    expected = counted(start, limit, step, direction, low, high)
                    assert found in (None, expected), (element_type, start, limit, step)
                    claimed += found is not None and found > 0
    assert claimed > 10 or direction == "EQ"


@pytest.mark.parametrize(
    ("data", "count"),
    [
        (loop(0, 10, 1, "LT", "s32"), 10),
        (loop(0, 10, 3, "LT", "s64"), 4),
        (loop(0, 10, 1, "GT", "s32", mirrored=True), 10),
        (loop(10, 0, 1, "GT", "u32", update="subtract"), 10),
        (loop(10, 0, 1, "NE", "s32", update="subtract"), 10),
        (loop(0, 10, 3, "NE", "s32"), None),
        (loop(5, 5, 1, "LT", "s32"), 0),
        (loop(0, 10, 1, "LT", "f32"), None),
        (loop(0, 10, 1, "LT", "s32", update="multiply"), None),
    ],
)
def test_loops(data, count):
    assert trip_counts(data) == [count]


def test_jax_loops():
    assert trip_counts(PROGRAMS["scan_with_outputs"].hlo())[:2] == [6, 6]
    assert trip_counts(PROGRAMS["while_counted_and_dynamic"].hlo()) == [7, None]
    assert trip_counts(PROGRAMS["while_batched"].hlo()) == [None]
