"""Checks of indices in native programs: bounds of both signs, numbers at the ends of their types, on one thread and on
several, beside what writes over an argument."""

from __future__ import annotations

import json

import numpy as np
import pytest

from cpu.native.harness import compile, get, put, run
from plugin_abi.errors import FlagosStatusError
from plugin_abi.host import Artifact, Context


def text_of(element: str, count: int, low: int, high: int) -> str:
    config = {"low": low, "high": high, "exception": "IndexError", "message": "{index} stands at {position}"}
    escaped = json.dumps(config).replace('"', '\\"')
    return f"""HloModule checks
ENTRY main {{
  x = {element}[{count}] parameter(0)
  check = () custom-call(x), custom_call_target="flagos.check_indices", custom_call_has_side_effect=true,
    backend_config="{escaped}"
  ROOT y = {element}[{count}] add(x, x)
}}"""


@pytest.mark.parametrize("element", ["s32", "s64"])
@pytest.mark.parametrize(("low", "high"), [(0, 5), (-7, 7), (-(1 << 40), 1 << 40), (3, 4)])
@pytest.mark.parametrize("count", [1, 37, 200_000])
def test_what_lies_outside_is_said(
    context: Context, element: str, low: int, high: int, count: int, rng: np.random.Generator
) -> None:
    dtype = np.dtype(f"i{int(element[1:]) // 8}")
    info, memory = np.iinfo(dtype), context.devices[0].default_memory
    first, last = max(low, info.min), min(high - 1, info.max)
    x = rng.integers(first, last, count, dtype, endpoint=True)
    x[0], x[-1] = first, last
    with compile(context, text_of(element, count, low, high)) as executable:
        text = executable.artifact(Artifact.EXPLANATION).decode()
        assert "native check of indices" in text and "0 library calls" in text
        (y,) = run(executable, put(memory, x))
        np.testing.assert_array_equal(get(y), x + x)
        for outside in {low - 1, high, info.min, info.max}:
            if not info.min <= outside <= info.max or low <= outside < high:
                continue
            wrong, position = x.copy(), int(rng.integers(0, count))
            wrong[position] = outside
            with pytest.raises(FlagosStatusError, match=f"{outside} stands at {position}") as caught:
                (y,) = run(executable, put(memory, wrong))
                get(y)
            assert caught.value.payloads["flagos.exception"] == b"IndexError"
        (y,) = run(executable, put(memory, x))
        np.testing.assert_array_equal(get(y), x + x)


def test_a_range_without_numbers_is_a_call(context: Context) -> None:
    """Native code takes no empty range; the interpreter refuses every index."""
    x = put(context.devices[0].default_memory, np.zeros(3, np.int32))
    text = text_of("s32", 3, 4, 4)
    with compile(context, text) as executable, pytest.raises(FlagosStatusError, match="0 stands at 0"):
        get(run(executable, x)[0])
