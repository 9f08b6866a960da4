"""LSTM and GRU cells, which PyTorch fuses on devices other than the host; see torch/recurrent.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_map_only

from flagos_backend.frontends.torch.device.memory import unwrap, wrap


def on_device(cell: Callable[..., tuple[Tensor | None, ...]]) -> Callable[..., tuple[Tensor | None, ...]]:
    """The kernel of a cell that is computed on the inner device."""

    def kernel(*operands: Any, **named: Any) -> tuple[Tensor | None, ...]:
        given, others = tree_map_only(Tensor, unwrap, (operands, named))
        return tuple(None if result is None else wrap(result.contiguous()) for result in cell(*given, **others))

    return kernel
