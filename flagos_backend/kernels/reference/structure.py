"""Kernels of instructions that are about the program and not about numbers: map, partition-id, replica-id. Tuples,
calls and control flow belong to the plan."""

from __future__ import annotations

from flagos_backend.ir.hlo import Instruction
from flagos_backend.ir.opcode import Opcode
from flagos_backend.kernels.reference.movement import array_shape
from flagos_backend.kernels.reference.registry import Kernel, Run, kernel
from flagos_backend.kernels.reference.scalar_functions import scalar_function
from flagos_backend.process.torch_loading import torch


@kernel(Opcode.MAP)
def _prepare_map(instruction: Instruction) -> Kernel:
    function = scalar_function(instruction.called[0])
    dims = array_shape(instruction).dims

    def apply(run: Run, *operands: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = function(run, list(operands))[0]
        return result.expand(dims)

    return apply


def _unsigned(value: int, run: Run) -> torch.Tensor:
    return torch.full((), value, dtype=torch.int32, device=run.device)  # made there: it may be recorded


@kernel(Opcode.PARTITION_ID)
def _prepare_partition_id(instruction: Instruction) -> Kernel:
    return lambda run: _unsigned(run.partition_id, run)


@kernel(Opcode.REPLICA_ID)
def _prepare_replica_id(instruction: Instruction) -> Kernel:
    return lambda run: _unsigned(run.replica_id, run)
