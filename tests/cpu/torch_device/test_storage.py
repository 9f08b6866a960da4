"""Storages: saving, loading, copying and pickling, in every direction; and what used to crash the process."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch.testing import assert_close


def saved(value: Any) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return file


@pytest.mark.parametrize("source", ["cpu", "flagos"])
@pytest.mark.parametrize("target", [None, "cpu", "flagos", "flagos:0", torch.device("flagos", 0)], ids=str)
def test_save_and_load(source: str, target: Any) -> None:
    x = torch.randn(4)
    y = x.to(source)
    loaded = torch.load(saved({"x": y, "view": y[1:]}), map_location=target)
    expected = torch.device(source if target is None else target).type
    assert {t.device.type for t in loaded.values()} == {expected}
    assert_close(loaded["x"].cpu(), x)
    loaded["view"].zero_()
    assert loaded["x"][1:].sum() == 0


def test_save_and_load_of_a_model(device: torch.device) -> None:
    model = torch.nn.Linear(3, 2).to(device)
    other = torch.nn.Linear(3, 2)
    other.load_state_dict(torch.load(saved(model.state_dict()), map_location="cpu"))
    assert_close(other.weight, model.weight.cpu())
    there = torch.nn.Linear(3, 2, device="flagos")
    there.load_state_dict(other.state_dict())
    assert_close(there.weight, model.weight)


def test_lazily_conjugated_tensors_are_saved(device: torch.device) -> None:
    x = torch.randn(3, dtype=torch.complex64)
    assert_close(torch.load(saved(x.to(device).conj())).cpu(), x.conj())


def test_copies(device: torch.device) -> None:
    x = torch.randn(4, device=device)
    for made in (copy.deepcopy(x), copy.copy(x), pickle.loads(pickle.dumps(x)), x.detach().clone()):
        assert made.device == x.device
        assert torch.equal(made, x)
    first, second = copy.deepcopy([x, x[1:]])
    assert first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()
    parameter = torch.nn.Parameter(x)
    assert isinstance(copy.deepcopy(parameter), torch.nn.Parameter)


def test_a_storage_is_made_on_the_device() -> None:
    storage = torch.UntypedStorage(10, device="flagos")
    assert (storage.device, storage.nbytes()) == (torch.device("flagos", 0), 10)
    assert torch.UntypedStorage([1, 2, 3], device="flagos").tolist() == [1, 2, 3]
    assert torch.TypedStorage(3, dtype=torch.float32, device="flagos").nbytes() == 12
    assert storage.clone().device.type == "flagos"
    assert storage.cpu().device.type == "cpu"
    assert torch.ones(3).untyped_storage().to(device="flagos").device.type == "flagos"
    assert torch.ones(3, device="flagos").untyped_storage()[3] == 63


def test_attributes_and_printing(device: torch.device) -> None:
    x = torch.tensor([1.5, 2.5], device=device)
    assert repr(x) == "tensor([1.5000, 2.5000], device='flagos:0')"
    assert (x.is_flagos, x.is_cpu, x.get_device()) == (True, False, 0)
    assert torch.ones(2).flagos().is_flagos
    assert x.type() == "torch.flagos.FloatTensor"
    assert type(x) is torch.Tensor
    assert x.tolist() == [1.5, 2.5]
    assert x.data.data_ptr() == x.data_ptr()
