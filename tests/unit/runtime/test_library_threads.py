"""Small library calls have one thread, and the caller has its threads back, however they end."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from flagos_backend.kernels.reference.registry import Run, Value
from flagos_backend.runtime.library_threads import alone


@pytest.fixture
def three_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("three_threads")
def test_a_call_alone_has_one_thread() -> None:
    seen: list[int] = []

    def kernel(run: Run, x: torch.Tensor) -> Value:
        seen.append(torch.get_num_threads())
        return x + 1

    assert alone(kernel)(Run(), torch.ones(2)).tolist() == [2.0, 2.0]  # type: ignore[union-attr]
    assert (seen, torch.get_num_threads()) == ([1], 3)


@pytest.mark.usefixtures("three_threads")
def test_a_call_that_fails_gives_the_threads_back() -> None:
    def kernel(run: Run, x: torch.Tensor) -> Value:
        raise ValueError(torch.get_num_threads())

    with pytest.raises(ValueError, match="1"):
        alone(kernel)(Run(), torch.ones(2))
    assert torch.get_num_threads() == 3
