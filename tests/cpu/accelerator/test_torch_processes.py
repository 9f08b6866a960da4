"""An accelerator's memory is refused where it is sent, and the accelerator in a forked process; nothing hangs."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing.reduction import ForkingPickler
from typing import Any

import pytest
import torch
import torch.multiprocessing as multiprocessing
from torch.utils.data import DataLoader, TensorDataset

NOT_SHARED = "Cannot send a tensor on device 'flagos' to another process"
FORKED = "Cannot re-initialize flagos in forked subprocess"


@pytest.fixture
def tensor() -> torch.Tensor:
    return torch.arange(12.0).view(6, 2).to("flagos")


def test_a_tensor_is_not_pickled_for_another_process(tensor: torch.Tensor) -> None:
    with pytest.raises(RuntimeError, match=NOT_SHARED):
        ForkingPickler.dumps(tensor)
    with pytest.raises(RuntimeError, match=NOT_SHARED):
        ForkingPickler.dumps(torch.nn.Parameter(tensor).untyped_storage())
    assert tensor.share_memory_() is tensor and not tensor.is_shared()


def test_who_waits_for_it_is_told(tensor: torch.Tensor) -> None:
    queue = multiprocessing.Queue()
    queue.put(tensor)
    with pytest.raises(RuntimeError, match=NOT_SHARED):
        queue.get(timeout=60)
    pool = ProcessPoolExecutor(1, multiprocessing.get_context("fork"))
    with pool, pytest.raises(RuntimeError, match=NOT_SHARED):
        pool.submit(len, tensor).result(timeout=60)


@pytest.mark.parametrize("pin", [False, True])
def test_a_worker_is_refused_the_device(tensor: torch.Tensor, pin: bool) -> None:
    loader = DataLoader(TensorDataset(tensor), num_workers=1, pin_memory=pin, multiprocessing_context="fork")
    with pytest.raises(RuntimeError, match=FORKED):
        list(loader)


def refusals(tensor: torch.Tensor) -> list[str]:
    """What a process that cannot use the device says of each use."""
    uses: list[Callable[[], Any]] = [
        lambda: tensor + 1,
        lambda: tensor.cpu(),
        lambda: tensor[0, 0].item(),
        lambda: torch.ones(2).to("flagos"),
        lambda: torch.empty(2, device="flagos"),
        torch.get_device_module("flagos").synchronize,
    ]
    said = []
    for use in uses:
        try:
            use()
            said.append("nothing")
        except RuntimeError as error:
            said.append(str(error))
    return said


def test_a_forked_process_is_refused_the_device(tensor: torch.Tensor) -> None:
    reading, writing = os.pipe()
    if child := os.fork():
        os.close(writing)
        with os.fdopen(reading) as said:
            lines = said.read().splitlines()
        os.waitpid(child, 0)
        assert len(lines) == 6 and all(FORKED in line for line in lines)
        assert (tensor + 1).sum() == 78
        return
    try:
        torch.manual_seed(1)
        os.write(writing, "\n".join(refusals(tensor)).encode())
    finally:
        sys.stdout.flush()
        os._exit(0)
