"""Tensors that change their device in place keep what they are: their class, attributes, hooks and gradients."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import nn
from torch.testing import assert_close


class Marked(nn.Parameter):
    """A parameter of a class of its own."""


def test_moved_parameters_keep_class_attributes_and_hooks(device: torch.device) -> None:
    layer = nn.Linear(2, 2)
    layer.extra = Marked(torch.ones(2))
    layer.weight.mark = 5  # type: ignore[attr-defined]
    seen = []
    layer.weight.register_hook(lambda gradient: seen.append("hook"))
    layer.weight.register_post_accumulate_grad_hook(lambda parameter: seen.append("accumulated"))
    for place in (device, torch.device("cpu"), device):
        layer.to(place)
        assert type(layer.extra) is Marked and layer.weight.mark == 5  # type: ignore[attr-defined]
        layer(torch.ones(1, 2, device=place)).sum().backward()
        assert seen == ["hook", "accumulated"]
        seen.clear()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_data_is_set_across_devices(device: torch.device, dtype: torch.dtype) -> None:
    """What libraries write where they move one parameter."""
    parameter = nn.Parameter(torch.tensor([1.0, 2.0]))
    parameter.mark = 5  # type: ignore[attr-defined]
    optimizer = torch.optim.SGD([parameter], 1.0)
    (parameter * parameter).sum().backward()
    parameter.data = parameter.data.to(device, dtype)
    assert (parameter.device, parameter.dtype) == (device, dtype)
    assert parameter.grad is not None and parameter.grad.device == device
    parameter.grad.data = parameter.grad.data.to(device)
    assert type(parameter) is nn.Parameter and parameter.requires_grad and parameter.mark == 5  # type: ignore[attr-defined]
    (parameter * parameter).sum().backward()
    optimizer.step()
    assert parameter.tolist() == [-3, -6]
    parameter.data = parameter.data.cpu()
    assert parameter.device.type == "cpu" and parameter.grad.device.type == "cpu"


def test_data_is_the_memory_that_was_set(device: torch.device) -> None:
    tensor, data = torch.ones(2), torch.zeros(3, device=device)
    tensor.data = data
    data.add_(4)
    assert tensor.tolist() == [4, 4, 4] and tensor.data.data_ptr() == data.data_ptr()


def test_data_that_cannot_be_set_is_refused_by_name(device: torch.device) -> None:
    data = torch.ones(2, device=device)
    made = torch.ones(2, requires_grad=True) * 2
    with pytest.raises(
        RuntimeError, match=r"cannot set the data of a tensor on cpu .* on flagos:0 when a graph made it"
    ):
        made.data = data
    held = torch.ones(2)
    reference = weakref.ref(held)
    with pytest.raises(RuntimeError, match=r"something else rests on it: .*weakref"):
        held.data = data
    assert reference() is held and held.device.type == "cpu"


def test_data_is_set_in_traced_programs(device: torch.device) -> None:
    @torch.compile(backend="eager")
    def program(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.data = y * 2
        return x.data + 1

    for place in (torch.device("cpu"), device):
        x, y = torch.ones(2, device=place), torch.ones(2, device=place)
        assert_close(program(x, y).cpu(), torch.full((2,), 3.0))
        assert x.tolist() == [2, 2]
