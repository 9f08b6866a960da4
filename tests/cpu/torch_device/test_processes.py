"""Tensors of the device in other processes: sent there, and inherited by a fork."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as multiprocessing
from torch.utils.data import DataLoader, Dataset, TensorDataset

from flagos_backend.frontends.torch.device import memory
from flagos_backend.frontends.torch.device.runtime import runtime

pytestmark = [
    pytest.mark.skipif(
        not runtime().device.is_host_memory, reason="an accelerator's memory: tests/cpu/accelerator has its refusals"
    ),
    pytest.mark.skipif(
        not memory.can_exchange_storages(), reason="this PyTorch (before 2.13) cannot move a storage to shared memory"
    ),
]


def printed(*arguments: str) -> str:
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=250, env=os.environ)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_tensors_are_shared_with_another_process(method: str) -> None:
    strategies = ["file_descriptor", "file_system"] if method == "fork" else ["file_descriptor"]
    assert printed(str(Path(__file__).with_name("sender.py")), method, *strategies) == "sent"


def test_what_is_sent_to_this_process_is_the_same_memory(device: torch.device) -> None:
    x = torch.arange(4.0, device=device)
    held = torch.flagos.memory_allocated()
    pickled = ForkingPickler.dumps([x, x[1:]])
    first, second = ForkingPickler.loads(pickled)
    assert first.untyped_storage() is second.untyped_storage() is x.untyped_storage()
    assert (first.data_ptr(), torch.flagos.memory_allocated()) == (x.data_ptr(), held)
    assert second.tolist() == [1, 2, 3]


def test_storages_are_moved_to_shared_memory_in_place(device: torch.device) -> None:
    model = torch.nn.Linear(2, 2, device=device)
    kept, view = model.weight.detach().cpu(), model.weight.detach()[0]
    assert not model.weight.is_shared()
    assert model.share_memory() is model
    assert model.weight.is_shared() and view.is_shared()
    torch.testing.assert_close(view.cpu(), kept[0], rtol=0, atol=0)
    view.fill_(3)
    assert (model.weight[0] == 3).all()
    with multiprocessing.get_context("fork").Pool(1) as pool:
        pool.apply(model.weight.data.fill_, (4,))
    assert (model.weight == 4).all()


def test_another_strategy_moves_a_storage_again(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.arange(3.0, device=device).share_memory_()
    before = multiprocessing.get_sharing_strategy()
    try:
        multiprocessing.set_sharing_strategy("file_system")
        received = ForkingPickler.loads(ForkingPickler.dumps(x))
        x.add_(1)
        assert received.untyped_storage() is x.untyped_storage() and x.tolist() == [1, 2, 3]
    finally:
        multiprocessing.set_sharing_strategy(before)


def test_shared_memory_keeps_its_size(device: torch.device) -> None:
    """PyTorch documents that it cannot be resized; of the host's, 2.13 ends the process."""
    x = torch.ones(3, device=device).share_memory_()
    with pytest.raises(RuntimeError, match="resize storage that is not resizable"):
        x.resize_(100)
    assert x.resize_(2).tolist() == [1, 1]


class OnDevice(Dataset[Any]):
    """Made on the device by the workers."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"x": torch.full((2,), float(index), device="flagos")}


@pytest.mark.parametrize("persistent", [False, True])
def test_workers_make_batches_on_the_device(device: torch.device, persistent: bool) -> None:
    torch.ones(1, device=device)
    loader = DataLoader(
        OnDevice(), batch_size=2, num_workers=2, persistent_workers=persistent, multiprocessing_context="fork"
    )
    for _ in range(2):
        batches = [batch["x"] for batch in loader]
        assert all(batch.device == device and batch.is_shared() for batch in batches)
        assert torch.cat(batches)[:, 0].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("collate", [None, torch.stack], ids=["rows", "stacked"])
def test_workers_send_what_is_on_the_device(device: torch.device, collate: Any) -> None:
    x = torch.arange(6.0, device=device).view(3, 2)
    given = {"batch_size": None} if collate is None else {"batch_size": 1, "collate_fn": collate}
    loader = DataLoader(x, num_workers=1, multiprocessing_context="fork", **given)
    assert [batch.flatten().tolist() for batch in loader] == x.tolist()


def test_what_a_worker_cannot_send_is_raised_where_it_is_received(device: torch.device) -> None:
    leaf = torch.ones(2, device=device, requires_grad=True)
    with torch.enable_grad():
        loader = DataLoader([leaf * 2], batch_size=None, num_workers=1, multiprocessing_context="fork")
        with pytest.raises(RuntimeError, match="Cowardly refusing to serialize non-leaf tensor"):
            list(loader)
        queue = multiprocessing.get_context("fork").Queue()
        queue.put(leaf * 2)
        with pytest.raises(RuntimeError, match="Cowardly refusing"):
            queue.get(timeout=60)
        with pytest.raises(RuntimeError, match="Cowardly refusing"):
            ForkingPickler.dumps(leaf * 2)


def test_device_tensors_are_not_pinned(device: torch.device) -> None:
    loader = DataLoader(TensorDataset(torch.ones(2, device=device)), num_workers=1, pin_memory=True)
    with pytest.raises(RuntimeError, match="only dense CPU tensors can be pinned"):
        list(loader)


def test_a_forked_process_computes() -> None:
    """The parent has started OpenMP's threads and the backend's; of these a forked process has none."""
    code = """
    import os, signal, sys, torch
    from flagos_backend.frontends.torch.autoload import enable
    enable()
    program = torch.compile(lambda x: (x * 2 + 1).sin().sum(), backend="flagos")
    x, wide = torch.ones(300, 300, device="flagos"), torch.ones(1 << 20)
    expected = [(x @ x).sum().item(), program(x).item(), program(wide).item()]
    if child := os.fork():
        sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    signal.alarm(200)
    assert [(x @ x).sum().item(), program(x).item(), program(wide).item()] == expected
    torch.flagos.synchronize()
    torch.rand(2, device="flagos")
    w = torch.ones(2, device="flagos", requires_grad=True)
    (w * w).sum().backward()
    assert w.grad.tolist() == [2, 2]
    print("computed")
    """
    assert printed("-c", textwrap.dedent(code)) == "computed"
