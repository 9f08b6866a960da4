"""Linear, as the basic operations that it is made of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from flagos_backend.frontends.torch.ops.basic.collectives import AllReduce, ReduceScatter
from flagos_backend.frontends.torch.ops.basic.communication import ProcessGroup, group_size, share
from flagos_backend.frontends.torch.ops.basic.elementary import Bias
from flagos_backend.frontends.torch.ops.basic.linear import BasicLinear
from flagos_backend.frontends.torch.ops.operation import BasicOperation, FusedOperation


class Linear(FusedOperation):
    """x @ weight.T + bias: BasicLinear and Bias. The arguments are BasicLinear's.

    In the tensor parallel mode "row" a ReduceScatter (`sequence_parallel`) or an AllReduce follows, and each process
    adds a bias of its own to its products before they are summed, as in the interface that this is from.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        tensor_parallel_mode: str | None = None,
        tensor_parallel_group: ProcessGroup | None = None,
        sequence_parallel: bool = False,
        rng_state_tracker_function: Callable[[], Any] | None = None,
        accumulate_into_main_grad: bool = False,
    ) -> None:
        parts = 1 if tensor_parallel_mode is None else group_size(tensor_parallel_group)
        row = tensor_parallel_mode == "row" and parts > 1
        options: dict[str, Any] = (
            {}
            if row
            else {
                "tensor_parallel_mode": tensor_parallel_mode,
                "tensor_parallel_group": tensor_parallel_group,
                "sequence_parallel": sequence_parallel,
            }
        )
        linear = BasicLinear(
            share("in_features", in_features, parts) if row else in_features,
            out_features,
            device=device,
            dtype=dtype,
            rng_state_tracker_function=rng_state_tracker_function,
            accumulate_into_main_grad=accumulate_into_main_grad,
            **options,
        )
        ops: list[BasicOperation] = [linear]
        if bias:
            ops.append(Bias(linear.local_out_features, device=device, dtype=dtype))
            bound = in_features**-0.5 if in_features else 0.0
            if ops[1].bias.device.type != "meta":
                torch.nn.init.uniform_(ops[1].bias, -bound, bound)  # type: ignore[arg-type]
        if row:
            ops.append((ReduceScatter if sequence_parallel else AllReduce)(tensor_parallel_group))
        super().__init__(ops)

    @property
    def weight(self) -> torch.nn.Parameter:
        """The weight, out_features by in_features."""
        return self.basic_ops[0].weight  # type: ignore[return-value]

    @property
    def bias(self) -> torch.nn.Parameter | None:
        """The bias, or None."""
        return next((op.bias for op in self.basic_ops if isinstance(op, Bias)), None)

    def register_parameter(self, name: str, param: torch.nn.Parameter | None) -> None:
        """Give the basic operation another weight or bias. Raises ValueError for what it does not have."""
        owner = next((op for op in self.basic_ops if name in op._parameters), None)
        if owner is None:
            raise ValueError(f"Linear has no parameter {name!r} here: a bias is made with bias=True")
        owner.register_parameter(name, param)
