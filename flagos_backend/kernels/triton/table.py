"""What our own Triton kernels compute, read by kernels/choice.py."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from flagos_backend.devices.target import Target
from flagos_backend.ir.custom_calls.attention import BACKWARD, FORWARD, AttentionBackwardCall, AttentionCall
from flagos_backend.ir.hlo import Instruction
from flagos_backend.ir.opcode import Opcode
from flagos_backend.ir.types import leaves
from flagos_backend.kernels.implementation import Implementation, Provider, Variant
from flagos_backend.kernels.reference.registry import Run
from flagos_backend.kernels.reference.storage import dtype_of
from flagos_backend.kernels.triton import attention, dot, interpreter, qr, scans, scatter, sort, top_k, windows
from flagos_backend.kernels.triton.launching import unavailable
from flagos_backend.process.torch_loading import torch


def _unsupported(instruction: Instruction, target: Target) -> str:
    reason = unavailable(target) or interpreter.refuses(instruction, target)
    return reason or attention.unsupported(instruction, AttentionCall.of(instruction).attention)


def _unsupported_backward(instruction: Instruction, target: Target) -> str:
    reason = unavailable(target) or interpreter.refuses(instruction, target)
    return reason or attention.unsupported_backward(instruction, AttentionBackwardCall.of(instruction))


def _unsupported_dot(instruction: Instruction, target: Target) -> str:
    return unavailable(target) or interpreter.refuses(instruction, target) or dot.unsupported(instruction)


def _unsupported_reduction(instruction: Instruction, target: Target) -> str:
    reason = unavailable(target)
    if not reason and not scans.unsupported(instruction, target):
        reason = "it is a scan"
    return reason or windows.reduction_unsupported(instruction)


def _unsupported_qr(instruction: Instruction, target: Target) -> str:
    return unavailable(target) or qr.unsupported(instruction, target)


def _unsupported_scan(instruction: Instruction, target: Target) -> str:
    return unavailable(target) or scans.unsupported(instruction, target)


def _unsupported_scatter(instruction: Instruction, target: Target) -> str:
    return unavailable(target) or scatter.unsupported(instruction, target)


def _unsupported_select_and_scatter(instruction: Instruction, target: Target) -> str:
    return unavailable(target) or windows.scatter_unsupported(instruction)


def _unsupported_top_k(instruction: Instruction, target: Target) -> str:
    return unavailable(target) or top_k.unsupported(instruction, target)


def _unsupported_sort(instruction: Instruction, target: Target) -> str:
    return unavailable(target) or sort.unsupported(instruction, target)


def _ours(
    name: str,
    unsupported: Callable[[Instruction, Target], str],
    variants: Callable[[Instruction, Target], Sequence[Variant]],
) -> Implementation:
    def prepared(instruction: Instruction, target: Target) -> tuple[Variant, ...]:
        return tuple(_with_warm_up(variant, instruction) for variant in variants(instruction, target))

    return Implementation(name, Provider.TRITON, unsupported, prepared)


def _with_warm_up(variant: Variant, instruction: Instruction) -> Variant:
    """A call on arrays without memory, for which launches only compile."""
    shapes = [leaf for operand in instruction.operands for leaf in leaves(operand.shape)]

    def warm_up() -> None:
        nowhere = torch.device("meta")
        operands = [torch.empty(s.dims, dtype=dtype_of(s.element_type), device=nowhere) for s in shapes]
        variant.kernel(Run(device=nowhere, asynchronous=True), *operands)

    return replace(variant, warm_up=warm_up)


IMPLEMENTATIONS: tuple[tuple[str, Implementation], ...] = (
    (FORWARD, _ours("attention", _unsupported, attention.forward_variants)),
    (BACKWARD, _ours("attention_backward", _unsupported_backward, attention.backward_variants)),
    (str(Opcode.DOT), _ours("dot", _unsupported_dot, dot.variants)),
    (str(Opcode.REDUCE_WINDOW), _ours("reduce_window", _unsupported_reduction, windows.reduction_variants)),
    *(
        (name, _ours("scan", _unsupported_scan, scans.variants))
        for name in (str(Opcode.REDUCE_WINDOW), *scans.ATEN, *scans.PLACED)
    ),
    *((name, _ours("qr", _unsupported_qr, qr.factor_variants)) for name in qr.FACTORS),
    *((name, _ours("qr_product", _unsupported_qr, qr.product_variants)) for name in qr.PRODUCTS),
    (
        str(Opcode.SELECT_AND_SCATTER),
        _ours("select_and_scatter", _unsupported_select_and_scatter, windows.scatter_variants),
    ),
    (str(Opcode.SCATTER), _ours("scatter", _unsupported_scatter, scatter.variants)),
    (str(Opcode.SORT), _ours("sort", _unsupported_sort, sort.variants)),
    (str(Opcode.TOP_K), _ours("top_k", _unsupported_top_k, top_k.variants)),
)
