"""Loading data: workers, pinned memory and the device."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("pin", [False, True])
def test_batches_travel(device: torch.device, workers: int, pin: bool) -> None:
    torch.ones(1, device=device)
    data = TensorDataset(torch.arange(8.0))
    seen = []
    for (batch,) in DataLoader(data, batch_size=4, num_workers=workers, pin_memory=pin):
        assert not pin or batch.is_pinned()
        seen += batch.to(device, non_blocking=True).tolist()
    assert seen == list(range(8))


def test_data_on_the_device(device: torch.device) -> None:
    data = TensorDataset(torch.arange(8.0, device=device))
    batches = [batch for (batch,) in DataLoader(data, batch_size=4)]
    assert all(batch.is_flagos for batch in batches)


def test_pinned_memory(device: torch.device) -> None:
    torch.ones(1, device=device)
    pinned = torch.ones(3).pin_memory()
    assert pinned.is_pinned() and pinned[1:].is_pinned() and not torch.ones(3).is_pinned()
    assert int(pinned.__dlpack_device__()[0]) == 1
    assert not torch.ones(3, device=device).is_pinned()
    assert pinned.to(device, non_blocking=True).tolist() == [1.0] * 3


@pytest.mark.parametrize("pin", [False, True])
def test_what_backward_needs_waits_on_the_host(device: torch.device, pin: bool) -> None:
    x = torch.randn(5, device=device, requires_grad=True)
    hooks = torch.autograd.graph.save_on_cpu(pin_memory=pin, device_type="flagos")
    _, saved = hooks.pack_hook(x)
    assert saved.device.type == "cpu" and saved.is_pinned() == pin
    with hooks:
        y = x.sin().exp()
    (gradient,) = torch.autograd.grad(y.sum(), x)
    host = x.detach().cpu()
    torch.testing.assert_close(gradient.cpu(), host.sin().exp() * host.cos())
