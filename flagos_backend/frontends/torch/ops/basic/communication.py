"""Collectives on tensors split along their first dimension, traceable by a compiler. A group of one changes nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup as ProcessGroup
else:
    ProcessGroup = Any


def group_size(group: ProcessGroup | None) -> int:
    """The processes of a group; None is the world. Raises RuntimeError where torch.distributed is not initialized."""
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        raise RuntimeError(
            "operations over several processes need torch.distributed.init_process_group before they are made"
        )
    return torch.distributed.get_world_size(group)


def share(name: str, size: int, parts: int) -> int:
    """Of a size that the processes of a group divide. Raises ValueError where they cannot."""
    if size % parts:
        raise ValueError(f"{name} is {size}, which {parts} processes cannot divide")
    return size // parts


def _name(group: ProcessGroup | None) -> str:
    from torch.distributed import _functional_collectives as collectives

    whole = cast("ProcessGroup", torch.distributed.group.WORLD if group is None else group)
    return cast(str, collectives._resolve_group_name(whole))


def _wait(result: torch.Tensor) -> torch.Tensor:
    return cast(torch.Tensor, torch.ops._c10d_functional.wait_tensor(result))


def gathered(x: torch.Tensor, group: ProcessGroup | None, parts: int) -> torch.Tensor:
    """The tensors of all processes, one behind the other."""
    if parts == 1:
        return x
    return _wait(torch.ops._c10d_functional.all_gather_into_tensor(x.contiguous(), parts, _name(group)))


def scattered_sum(x: torch.Tensor, group: ProcessGroup | None, parts: int) -> torch.Tensor:
    """This process's part of the sum over all. Raises ValueError where the first dimension cannot be divided."""
    if parts == 1:
        return x
    if x.dim() == 0 or x.shape[0] % parts:
        raise ValueError(f"a tensor of shape {tuple(x.shape)} cannot be scattered over {parts} processes")
    return _wait(torch.ops._c10d_functional.reduce_scatter_tensor(x.contiguous(), "sum", parts, _name(group)))


def summed(x: torch.Tensor, group: ProcessGroup | None, parts: int) -> torch.Tensor:
    """The sum over all processes."""
    if parts == 1:
        return x
    return _wait(torch.ops._c10d_functional.all_reduce(x.contiguous(), "sum", _name(group)))
