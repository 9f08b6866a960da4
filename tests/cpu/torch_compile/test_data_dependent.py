"""Sizes and numbers that only data determine: graphs are cut there, and what lies between is compiled."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from flagos_backend.frontends.torch.compile import report
from support.torch_compile import assert_same, check_function, compiled


@pytest.fixture(autouse=True)
def capture() -> Iterator[None]:
    """Keeps in the graph what would break it."""
    config = torch._dynamo.config
    with config.patch(capture_scalar_outputs=True, capture_dynamic_output_shape_ops=True):
        yield


def test_places_of_what_is_not_zero() -> None:
    check_function(lambda x: (x * 2).nonzero() + 1, torch.tensor([[0.0, 1], [0, 2]]))
    assert any(known.outside["aten.nonzero.default"] == 1 for known in report.reports())


def test_one_compiled_function_for_every_number_of_results() -> None:
    run = compiled(lambda x: x[x > 0].exp().sum())
    for x in (torch.tensor([1.0, -1, 2]), torch.tensor([-1.0, -1, -2]), torch.tensor([1.0, 1, 2])):
        assert_same(run(x), x[x > 0].exp().sum())


def test_a_number_out_of_data_as_a_size() -> None:
    def padded(count: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, int]:
        rows = count.item()
        torch._check(rows >= 0)
        torch._check(rows <= 8)
        return torch.zeros(rows, 3) + x, rows

    run = compiled(padded)
    for rows in (4, 0, 7):
        assert_same(run(torch.tensor(rows), torch.arange(3.0)), (torch.arange(3.0).repeat(rows, 1), rows))
    with pytest.raises(RuntimeError, match=r"Runtime assertion failed|to be True"):
        run(torch.tensor(9), torch.zeros(3))


def test_gradients_through_a_selection() -> None:
    def loss(x: torch.Tensor) -> torch.Tensor:
        chosen = x.sin()[x > 0]
        return (chosen * chosen).sum()

    x = torch.randn(9, requires_grad=True)
    gradients = [torch.autograd.grad(call(x), x)[0] for call in (compiled(loss), loss)]
    torch.testing.assert_close(*gradients)


def test_two_cuts_and_what_lies_between() -> None:
    def program(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        first = x.unique()
        rows = (first * 2).nonzero().squeeze(1)
        return first[rows] + 1, rows

    check_function(program, torch.tensor([3.0, 0, 3, 1]))


def test_can_be_refused_by_name() -> None:
    run = compiled(lambda x: x.nonzero(), options={"fallback": "error"})
    with pytest.raises(Exception, match=r"nonzero.*FLAGOS-654"):
        run(torch.ones(2))
