"""What counts as the same results."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from flagos_backend.cli.agreement import differences

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("ours", "theirs", "agrees"),
    [
        ([1.0, 2.0], [1.0, 2.0 + 1e-4], True),
        ([1.0, 2.0], [1.0, 2.0 + 1e-2], False),
        ([0.0, 2.0], [1e-5, 2.0], True),
        ([NAN, INF], [NAN, INF], True),
        ([NAN, 1.0], [1.0, 1.0], False),
        ([1.0, 1.0], [NAN, 1.0], False),
        ([INF], [-INF], False),
        ([], [], True),
        ([0.0], [0.0], True),
        ([1e-9], [0.0], False),
    ],
    ids=str,
)
def test_floats(ours: list[float], theirs: list[float], agrees: bool) -> None:
    [found] = differences([np.array(ours, np.float32)], [np.array(theirs, np.float32)])
    assert found.agrees is agrees


def test_what_is_allowed_is_the_type_s() -> None:
    near = [1.0, 1.04]
    for dtype, agrees in ((ml_dtypes.bfloat16, True), (np.float16, False), (np.float64, False)):
        [found] = differences([np.array([1.0, 1.0]).astype(dtype)], [np.array(near).astype(dtype)])
        assert found.agrees is agrees, found
    [found] = differences([np.array([1j])], [np.array([1j + 1e-4])])
    assert not found.agrees


def test_integers_are_the_same_or_not() -> None:
    [found] = differences([np.array([1, 2, 3])], [np.array([1, 3, 2])])
    assert (found.largest, found.agrees, found.text()) == (2, False, "output 0, int64: 2 elements differ")
    [found] = differences([np.array(True)], [np.array(True)])
    assert found.agrees


def test_other_shapes_are_no_results_of_one_program() -> None:
    with pytest.raises(ValueError, match="output 0 is float64"):
        differences([np.zeros(2)], [np.zeros(3)])
