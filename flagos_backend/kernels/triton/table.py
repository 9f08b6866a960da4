"""What our own Triton kernels compute, read by kernels/choice.py."""

from __future__ import annotations

import importlib.util
import os

from flagos_backend.devices.target import Target
from flagos_backend.ir.hlo import Instruction
from flagos_backend.ir.opcode import Opcode
from flagos_backend.kernels.attention import BACKWARD, FORWARD, Attention, AttentionBackwardCall, AttentionCall
from flagos_backend.kernels.implementation import Implementation, Provider
from flagos_backend.kernels.triton import attention, sort, top_k, windows


def _no_triton(target: Target) -> str:
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    if target.is_host or (target.device_type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1"):
        return "Triton has no compiler for the host"
    return ""


def _unsupported(instruction: Instruction, target: Target) -> str:
    return _no_triton(target) or attention.unsupported(instruction, AttentionCall.of(instruction).attention)


def _unsupported_backward(instruction: Instruction, target: Target) -> str:
    described: Attention = AttentionBackwardCall.of(instruction).attention
    return _no_triton(target) or attention.unsupported(instruction, described)


def _unsupported_fold(instruction: Instruction, target: Target) -> str:
    return _no_triton(target) or windows.fold_unsupported(instruction)


def _unsupported_scatter(instruction: Instruction, target: Target) -> str:
    return _no_triton(target) or windows.scatter_unsupported(instruction)


def _unsupported_top_k(instruction: Instruction, target: Target) -> str:
    return _no_triton(target) or top_k.unsupported(instruction, target)


def _unsupported_sort(instruction: Instruction, target: Target) -> str:
    return _no_triton(target) or sort.unsupported(instruction, target)


IMPLEMENTATIONS: tuple[tuple[str, Implementation], ...] = (
    (FORWARD, Implementation("attention", Provider.TRITON, _unsupported, attention.forward_variants)),
    (
        BACKWARD,
        Implementation("attention_backward", Provider.TRITON, _unsupported_backward, attention.backward_variants),
    ),
    (
        str(Opcode.REDUCE_WINDOW),
        Implementation("reduce_window", Provider.TRITON, _unsupported_fold, windows.fold_variants),
    ),
    (
        str(Opcode.SELECT_AND_SCATTER),
        Implementation("select_and_scatter", Provider.TRITON, _unsupported_scatter, windows.scatter_variants),
    ),
    (str(Opcode.SORT), Implementation("sort", Provider.TRITON, _unsupported_sort, sort.variants)),
    (str(Opcode.TOP_K), Implementation("top_k", Provider.TRITON, _unsupported_top_k, top_k.variants)),
)
