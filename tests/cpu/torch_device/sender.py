"""Sends tensors of the device to another process and back: python sender.py METHOD STRATEGY..."""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.multiprocessing as multiprocessing

from flagos_backend.frontends.torch.autoload import enable

SECONDS = 120


def tensors() -> dict[str, torch.Tensor]:
    base = torch.arange(6.0, device="flagos").view(2, 3)
    return {
        "base": base,
        "view": base[:, 1],
        "transposed": base.t(),
        "parameter": torch.nn.Parameter(torch.ones(2, device="flagos")),
        "leaf": torch.ones(2, device="flagos", requires_grad=True),
        "empty": torch.empty(0, 3, device="flagos"),
        "scalar": torch.tensor(3, device="flagos"),
        "bfloat16": torch.full((3,), 1.5, dtype=torch.bfloat16, device="flagos"),
    }


def receive(there: Any, back: Any, strategy: str) -> None:
    multiprocessing.set_sharing_strategy(strategy)
    got = there.get(timeout=SECONDS)
    assert all(tensor.device == torch.device("flagos", 0) for tensor in got.values())
    assert got["view"].untyped_storage() is got["base"].untyped_storage()
    assert got["transposed"].stride() == (1, 3)
    assert type(got["parameter"]) is torch.nn.Parameter and got["parameter"].requires_grad
    assert got["leaf"].requires_grad and got["leaf"].is_leaf
    assert (got["empty"].shape, got["scalar"].item(), got["bfloat16"].tolist()) == ((0, 3), 3, [1.5] * 3)
    got["base"].add_(10)
    assert got["view"].tolist() == [11, 14]
    back.put((got["base"].sum(), got["base"][1]))
    assert there.get(timeout=SECONDS) == "written"
    back.put(got["base"][0, 0].item())


def main(method: str, strategies: list[str]) -> None:
    context = multiprocessing.get_context(method)
    for strategy in strategies:
        multiprocessing.set_sharing_strategy(strategy)
        there, back = context.Queue(), context.Queue()
        receiver = context.Process(target=receive, args=(there, back, strategy), daemon=True)
        receiver.start()
        sent = tensors()
        there.put(sent)
        total, row = back.get(timeout=SECONDS)
        assert (total.item(), row.tolist()) == (75, [13, 14, 15])
        assert row.untyped_storage() is sent["base"].untyped_storage()
        assert sent["base"].is_shared() and not torch.ones(1, device="flagos").is_shared()
        sent["base"][0, 0] = 77
        there.put("written")
        assert back.get(timeout=SECONDS) == 77
        receiver.join(SECONDS)
        assert receiver.exitcode == 0
    print("sent")


if __name__ == "__main__":
    assert enable() == ""
    main(sys.argv[1], sys.argv[2:])
