"""Storages: saving, loading, copying and pickling, in every direction; and what used to crash the process."""

from __future__ import annotations

import copy
import gc
import io
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as checkpoint
from torch.testing import assert_close

from flagos_backend.frontends.torch.device import memory


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


def test_save_and_load_of_a_distributed_checkpoint(device: torch.device, tmp_path: Path) -> None:
    layer, other = (torch.nn.Linear(3, 2).to(device) for _ in range(2))
    checkpoint.save({"layer": layer.state_dict()}, checkpoint_id=tmp_path, no_dist=True)
    state = {"layer": other.state_dict()}
    checkpoint.load(state, checkpoint_id=tmp_path, no_dist=True)
    other.load_state_dict(state["layer"])
    assert_close(other.weight, layer.weight, rtol=0, atol=0)


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


resizes_storages = pytest.mark.skipif(
    not memory.can_exchange_storages(), reason="this PyTorch (before 2.13) cannot exchange the memories of two storages"
)


@resizes_storages
def test_storages_are_freed_and_allocated_again(device: torch.device) -> None:
    """As FSDP does with the parameters that it gathers: all tensors on the storage follow."""
    gc.collect()
    base = torch.arange(6.0, device=device)
    part, allocated = base[2:], torch.flagos.memory_allocated()
    storage = base.untyped_storage()
    assert storage.resize_(0) is storage
    assert (storage.nbytes(), part.untyped_storage().nbytes(), base.shape) == (0, 0, (6,))
    assert torch.flagos.memory_allocated() == allocated - 24
    storage.resize_(24)
    assert torch.flagos.memory_allocated() == allocated
    base.copy_(torch.arange(6.0))
    assert_close(part.cpu(), torch.arange(2.0, 6.0))
    base._typed_storage()._resize_(0)
    assert base._typed_storage()._size() == 0
    base._typed_storage()._resize_(6)
    base.fill_(7)
    assert_close(part.cpu(), torch.full((4,), 7.0))


@resizes_storages
@pytest.mark.parametrize("size", [4, 12, 17, 100])
def test_a_resized_storage_keeps_what_fits(size: int, device: torch.device) -> None:
    storages = [torch.arange(12, dtype=torch.uint8, device=d).untyped_storage() for d in ("cpu", device)]
    for storage in storages:
        storage.resize_(size)
    kept = min(size, 12)
    host, ours = (storage.cpu().tolist() for storage in storages)
    assert len(ours) == size and ours[:kept] == host[:kept]
    assert storages[1].device == device


@resizes_storages
def test_a_tensor_that_grows_keeps_its_views(device: torch.device) -> None:
    tensors = [torch.ones(3), torch.ones(3, device=device)]
    for x in tensors:
        view = x.view(-1)
        x.resize_(2, 4)[0, 3:] = 5
        view.fill_(2)
    assert_close(tensors[1].cpu()[0], tensors[0][0])


@resizes_storages
def test_resizing_in_compiled_programs(device: torch.device) -> None:
    x = torch.ones(3, device=device)
    torch.ops.inductor.resize_storage_bytes_(x, 0)
    assert x.untyped_storage().nbytes() == 0


def test_a_storage_of_negative_size_is_refused(device: torch.device) -> None:
    with pytest.raises(RuntimeError, match="negative"):
        torch.ones(3, device=device).untyped_storage().resize_(-1)


@pytest.mark.skipif(memory.can_exchange_storages(), reason="this PyTorch can exchange the memories of two storages")
def test_resizing_is_refused_by_name_where_pytorch_cannot(device: torch.device) -> None:
    with pytest.raises(NotImplementedError, match=r"takes PyTorch 2\.13 or later"):
        torch.ones(3, device=device).untyped_storage().resize_(0)
