"""The arena plan: no two live buffers overlap, and memory is reused."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from flagos_backend.codegen.cpu.arena import ALIGNMENT, Interval, plan_arena

_INTERVALS = st.lists(
    st.builds(
        lambda a, b, size: Interval(min(a, b), max(a, b), size),
        st.integers(0, 30),
        st.integers(0, 30),
        st.integers(0, 5000),
    ),
    max_size=40,
)


@given(_INTERVALS)
def test_live_buffers_never_overlap(intervals: list[Interval]) -> None:
    offsets, total = plan_arena(intervals)
    for i, (a, start) in enumerate(zip(intervals, offsets, strict=True)):
        assert start % ALIGNMENT == 0
        assert start + a.size <= total
        for b, other in list(zip(intervals, offsets, strict=True))[:i]:
            if a.first <= b.last and b.first <= a.last:
                assert start + a.size <= other or other + b.size <= start


def test_memory_is_reused_once_a_buffer_is_dead() -> None:
    offsets, total = plan_arena([Interval(0, 1, 1000), Interval(1, 2, 1000), Interval(2, 3, 1000)])
    assert offsets[2] == offsets[0]
    assert total == 2 * 1024
